"""Rows of the table in `tests/cli/test_bad_input.py`: runs and studies whose files are damaged or forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import torch

RUN, STOPPED, STUDY = "run", "stopped", "study"
BASE = "[run]\nbenchmark = 'pmnist'\nmethod = 'er'\n"
DEEP = 100_000


class Row(NamedTuple):
    """One invalid input."""

    command: str
    says: str
    code: int = 2
    before: Callable[[], object] = lambda: None


def put(name: str, content: str | bytes) -> Callable[[], object]:
    """Write a file."""
    return lambda: Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def plan(change: Callable[[Any], Any]) -> Callable[[], object]:
    """Change a study's plan."""
    return lambda: _change_json(Path(STUDY) / "study.json", change)


def result(**changes: Any) -> Callable[[], object]:
    """Change a finished run's result."""
    return lambda: _change_json(Path(RUN) / "result.json", lambda data: data.update(changes))


def _change_json(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    changed = change(data)
    path.write_text(json.dumps(data if changed is None else changed), encoding="utf-8")


def state(change: Callable[[Any], Any]) -> Callable[[], object]:
    """Change the state that a stopped run would resume from, with a correct hash."""
    return lambda: hostile.forged(max(Path(STOPPED).glob("checkpoints/state-*")), "run", change)


def nested(kind: str) -> str:
    return kind[0] * DEEP + kind[1] * DEEP


def outside(data: Any) -> None:
    data["runs"][0]["out"] = "../elsewhere"


def both_in_one(data: Any) -> None:
    data["runs"][1]["out"] = data["runs"][0]["out"]


RESULTS = {
    "show nothing": Row("show missing", "missing"),
    "show a file": Row("show file", "is not a directory"),
    "figure of nothing": Row("figures forgetting missing -o a.png", "missing"),
    **{
        f"result {name}": Row("show run", "as a result: ", 1, put("run/result.json", content))
        for name, content in {
            "empty": "",
            "a list": "[]",
            "without fields": "{}",
            "cut short": '{"acc": 1',
            "binary": b"\x00\xff",
            "of lists without end": nested("[]"),
            "of a number without end": "9" * 100_000,
        }.items()
    },
    **{
        f"result with {name} = {str(value)[:20]}": Row("show run", repr(name), 1, result(**{name: value}))
        for name, value in [
            ("acc", "high"),
            ("acc", None),
            ("bwt", float("nan")),
            ("seed", 1e400),
            ("seconds", {}),
            ("bytes", {"replay": "many"}),
            ("versions", ["torch"]),
            ("config", {}),
            ("command", "\x1b[2J"),
            ("remarks", [5]),
            ("machine", "fast"),
            ("machine", {"processor": "\x1b[2J"}),
        ]
    },
    **{
        f"figure of {value}": Row("figures forgetting run -o a.png", "'accuracy'", 1, result(accuracy=value))
        for value in (5, [5], [[1.0, None]], [[1.0, None], [1.0, "x"]], [[1.0, None], [1.0, None]])
    },
    "figure without a task": Row("figures forgetting run -o a.png", "missing", 2, result(accuracy=[])),
    "study with a bad result": Row("resume study", "as a result: ", 1, put("study/finetune/seed-0/result.json", "{}")),
}
RESUMING = {
    "nothing": Row("resume nowhere", "nothing to resume"),
    "a file": Row("resume file", "nothing to resume"),
    "damaged config": Row("resume stopped", "cannot read", 2, put("stopped/config.toml", b"\xff")),
    "config of another run": Row("resume stopped", "different settings", 1, put("stopped/config.toml", BASE)),
    "plan cut short": Row("resume study", "as a study: ", 1, put("study/study.json", '{"runs": [')),
    "plan binary": Row("resume study", "as a study: ", 1, put("study/study.json", bytes(range(256)))),
    "plan of lists without end": Row(
        "resume study", "nested more than 300 levels", 1, put("study/study.json", nested("[]"))
    ),
    "plan that is a list": Row("resume study", "as a study: ", 1, plan(lambda data: [data])),
    "plan without runs": Row("resume study", "it has no runs", 1, plan(lambda data: {**data, "runs": []})),
    "plan without a command": Row("resume study", "'command' is missing", 1, plan(lambda data: {"runs": data["runs"]})),
    "plan of numbers": Row("resume study", "as a study: ", 1, plan(lambda data: {**data, "runs": [5]})),
    "run outside the study": Row("resume study", "is outside the study", 1, plan(outside)),
    "run in the study's place": Row("resume study", "is outside", 1, plan(lambda d: d["runs"][0].update(out="."))),
    "two runs in one place": Row("resume study", "two in one directory", 1, plan(both_in_one)),
    "run at a number": Row("resume study", "as a study: ", 1, plan(lambda d: d["runs"][0].update(out=5))),
    "run of a number": Row("resume study", "configuration is 5", 2, plan(lambda d: d["runs"][0].update(config=5))),
    "state that is a list": Row("resume stopped", "different settings", 1, state(lambda s: [s])),
    "state of other settings": Row("resume stopped", "different settings", 1, state(lambda s: s.update(config={}))),
    "state without the log": Row("resume stopped", "no valid log length", 1, state(lambda s: s.update(log="x"))),
    **{
        f"state with {name}": Row("resume stopped", "cannot resume from the last checkpoint", 1, state(change))
        for name, change in {
            "no learner": lambda s: s.pop("learner") and None,
            "a stage beyond all": lambda s: s.update(stage=10**15),
            "a stage before all": lambda s: s.update(stage=-1),
            "a stage that is a word": lambda s: s.update(stage="first"),
            "rows too many": lambda s: s["rows"].append([1.0]),
            "tasks that are numbers": lambda s: s.update(stage=1, per_task=[5], rows=[1]),
            "outputs beyond all": lambda s: s["learner"].update(outputs=10**15),
            "heads beyond the outputs": lambda s: s["learner"]["network"].update(heads=[range(10**6)]),
            "no method": lambda s: s["learner"].update(method={}),
            "a method of other parts": lambda s: s["learner"]["method"].update(observe=5),
            "data of another kind": lambda s: s["learner"]["fitting"].update(tasks=[{"head": 5}]),
            "data of no size": lambda s: s["learner"]["fitting"]["tasks"][0].update(samples="many"),
            "cuts without end": lambda s: s["learner"]["fitting"].update(validation={"cuts": 10**15}),
            "a velocity of another shape": lambda s: s["learner"]["method"]["descent"].update(
                velocity={"head.weight": torch.zeros(1)}
            ),
            "a buffer that is too old": lambda s: s["learner"]["method"]["replay"].update(age=10**15),
            "a basis of another shape": lambda s: s["learner"]["method"].update(
                memory={"head.weight": [torch.ones(1), torch.ones(1)]}
            ),
            "streams that are none": lambda s: s["learner"].update(streams={"generators": {"order": torch.zeros(3)}}),
        }.items()
    },
}
