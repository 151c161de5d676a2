"""Invalid input of any kind gives a one-line error and the right exit code, and changes nothing.

A row of the table: the command, a part of its message, the exit code (2: invalid use, 1: failure), and what is done to
the directory before. The directory contains a finished run, a stopped run, a study, and a data file.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import pytest
import torch

from steppe.cli.main import main
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.study import Job, write_plan
from steppe.learning import loop as training
from steppe.learning.events import Event
from steppe.registry import METHODS

RUN, STOPPED, STUDY = "run", "stopped", "study"
SMALL = ["tasks=2", "samples=8", "epochs=1", "patience=0"]
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


def config(content: str | bytes, says: str) -> Row:
    """An invalid configuration."""
    return Row("run --config c.toml", says, 2, put("c.toml", content))


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


NAMES = {
    "method": Row("run pmnist fs-dgmp", "fs-dgpm"),
    "benchmark": Row("run pmnst er", "pmnist"),
    "benchmark of a study": Row("study pmnst er", "pmnist"),
    "nothing behind a colon": Row("run pmnist:5 er", "takes no argument"),
    "setting": Row("run pmnist er --set bufer=3", "method.buffer"),
    "setting in its section": Row("run pmnist er --set method.bufer=3", "buffer"),
    "section": Row("run pmnist er --set metod.buffer=3", "method"),
    "no value": Row("run pmnist er --set buffer", "KEY=VALUE"),
    "no key": Row("run pmnist er --set =3", "KEY=VALUE"),
    "which of two": Row("run pmnist gem --set tasks=3", "is ambiguous"),
    "not half a run": Row("run pmnist", "steppe list"),
    "nothing to list": Row("list nothing", "er"),
    "no method to compare": Row("study pmnist", "--methods paper"),
    "one method twice": Row("study pmnist er er", "twice"),
    "command": Row("fly", "invalid choice"),
    "no command": Row("", "required: COMMAND"),
    "option that a terminal would obey": Row("run --sed\x1b[2J 1", "unrecognized arguments: --sed\\x1b[2J"),
    "command that turns text around": Row("\u202efly", "invalid choice"),
    "option": Row("run --sed 1", "unrecognized arguments: --sed"),
    "device": Row("run pmnist er --device tpu", "invalid choice: 'tpu'"),
    "figure": Row("figures loss run -o a.png", "invalid choice: 'loss'"),
    "data set": Row("data fetch mnist cifar", "cifar-100"),
    "data set to verify": Row("data verify cifar", "cifar-100"),
    "data set to find": Row("data where cifar", "cifar-100"),
}
NUMBERS = {
    "too small": Row("run pmnist er --set buffer=0", "at least 1"),
    "NaN": Row("run pmnist er --set lr=nan", "lr = nan"),
    "infinity": Row("run pmnist er --set lr=inf", "lr = inf"),
    "negative": Row("run pmnist er --set lr=-1", "lr = -1.0"),
    "word": Row("run pmnist er --set lr=fast", "lr = 'fast' is not a number"),
    "half": Row("run pmnist er --set buffer=2.5", "whole number"),
    "beyond 64 bits": Row("run pmnist er --set buffer=99999999999999999999", "at most 9223372036854775807"),
    "thousands of digits": Row(f"run pmnist er --set buffer={'9' * 9999}", "is not a whole number"),
    "no ascent": Row("run pmnist fs-dgpm --set ascent_steps=0", "at least 1"),
    "no threshold": Row("run pmnist fs-dgpm --set threshold=0", "above 0 and at most 1"),
    "threshold above 1": Row("run pmnist fs-dgpm --set threshold=1.01", "above 0 and at most 1"),
    "maybe": Row("run pmnist fs-dgpm --set second_order=maybe", "true or false"),
    "no such choice": Row("run pmnist fs-dgpm --set importance=free", "sigmoid"),
    "negative seed": Row("run pmnist er --seed -1", "seed = -1"),
    "seed beyond 64 bits": Row("run pmnist er --seed 9999999999999999999", "2**63 - 1"),
    "seed that is a word": Row("run pmnist er --seed one", "invalid int value: 'one'"),
    "no seeds": Row("run pmnist er --seeds 0", "between 1 and 10,000 seeds; 0 gives 0"),
    "seeds that are words": Row("run pmnist er --seeds five", "must be a number, such as 5, or"),
    "seeds the wrong way round": Row("study pmnist er --seeds 9-5", "between 1 and 10,000"),
    "a million seeds": Row("study pmnist er --seeds 1000000000", "gives 1,000,000,000"),
    "no threads": Row("run pmnist er --threads 0", "from 1 to 1024"),
    "a million threads": Row("run pmnist er --threads 1000000", "from 1 to 1024"),
    "no threads to resume with": Row("resume stopped --threads 0", "from 1 to 1024"),
    "no jobs": Row("study pmnist er --jobs 0", "at least 1"),
    "no epochs": Row("run pmnist er --epochs 0", "epochs = 0"),
    "too many tasks": Row("run pmnist er --tasks 1000000000", "at most 1000"),
    "negative minutes": Row("run pmnist er --checkpoint-every -1", "0 or more"),
    "no number of minutes": Row("resume stopped --checkpoint-every nan", "0 or more"),
    "no jobs to resume": Row("resume stopped --jobs 0", "at least 1"),
    "thresholds": Row("run pmnist gpm --set thresholds=0.9,0.9", "3 projected layers"),
    "memory": Row("run pmnist gem --set memory=10", "raise memory"),
    "tasks of the memory": Row("run pmnist gem --set benchmark.tasks=21", "set tasks to the number"),
}
CONTRADICTIONS = {
    "seed and seeds": Row("run pmnist er --seed 1 --seeds 2", "not both"),
    "jobs of one run": Row("run pmnist er --jobs 2", "--seeds"),
    "config and names": Row("run pmnist er --config missing.toml", "--config defines the whole run"),
    "config and threads": Row("run --config missing.toml --threads 2", "--config defines the whole run"),
    "a method the tasks do not suit": Row("run pmnist icarl", "needs its own classes"),
    "one such method of a study": Row("study pmnist er icarl --seeds 1", "needs its own classes"),
    "no CUDA": Row("run pmnist er --device cuda", "--device cpu"),
    "patience without validation": Row("run pmnist er --set patience=3", "needs validation data", 1),
}
CONFIGS = {
    "config missing": Row("run --config missing.toml", "missing.toml"),
    "config a directory": Row("run --config run", "it is a directory, not a file"),
    "config without end": Row("run --config /dev/zero", "it is a device, not a file"),
    "empty": config("", "has no benchmark"),
    "no benchmark": config("[run]\nmethod = 'er'", "has no benchmark"),
    "no TOML": config("[run\n", "cannot read"),
    "binary": config(bytes(range(256)), "cannot read"),
    "cut short": config(BASE + "[method]\nlr =", "cannot read"),
    "unknown section": config(BASE + "[metod]\nlr = 1", "metod"),
    "unknown key": config(BASE + "speed = 1", "speed"),
    "unknown setting": config(BASE + "[method]\nrate = 1", "rate"),
    "setting out of range": config(BASE + "[method]\nlr = -1", "lr = -1"),
    "setting of another type": config(BASE + "[method]\nlr = [1]", "lr = [1] is not a number"),
    "section that is a number": config("run = 5", "run = 5; expected a section"),
    "section that is a list": config(BASE + "[[method]]\nlr = 1", "expected a section"),
    "benchmark that is a list": config("[run]\nbenchmark = [1]\nmethod = 'er'", "has no benchmark"),
    "seed out of range": config(BASE + "seed = -1", "seed = -1"),
    "seed that is true": config(BASE + "seed = true", "seed = True"),
    "seed that is a date": config(BASE + "seed = 2020-01-01", "seed = datetime"),
    "no threads": config(BASE + "threads = 0", "threads = 0"),
    "device that is a number": config(BASE + "device = 5", "unknown device"),
    "plugins that are a number": config(BASE + "plugins = 5", "plugins = 5"),
    "plugin that is a number": config(BASE + "plugins = [5]", "plugins = [5]"),
    "plugin no file can be called": config(BASE + 'plugins = ["\\u0000"]', "is not a Python file"),
    "a million digits": config(BASE + "seed = " + "9" * 900_000, "cannot read"),
    "a million hexadecimal digits": config(BASE + "seed = 0x" + "f" * 50_000, "too long to show"),
    "a huge setting": config(BASE + "[method]\nbuffer = 0x" + "f" * 50_000, "too long to show"),
    "a long text": config(BASE + f"[method]\nlr = '{'x' * 50_000}'", "50,002 characters"),
    "lists without end": config(BASE + "seed = " + "[" * 20_000, "more than 200 brackets"),
    "keys within keys without end": config("a." * 20_000 + "b = 1", "a line with more than 100 dots"),
    "a megabyte": config(BASE + "#" * 10**6, "more than 64,000 bytes"),
    "tables without end": config(BASE + "seed = " + nested("{}"), "cannot read"),
    "a path in half characters": Row("run folder:\udcff er --set size=32", "path = '\\udcff' is not printable text"),
}
OUTS = {
    "out a file": Row("run pmnist er --out file", "file is a file"),
    "out of a study a file": Row("study pmnist er --out file", "file is a file"),
    "out within a file": Row("run pmnist er --out file/x", "Not a directory", 1),
    "out of a study within a file": Row("study pmnist er --seeds 1 --out file/x", "Not a directory", 1),
    "out that nobody may make": Row("run pmnist er --out /proc/deep/out", "cannot write /proc/deep/out", 1),
    "out of too long a name": Row(f"run pmnist er --out {'x' * 300}", "File name too long", 1),
    **{
        f"a NUL in {name}": Row(command, "file names cannot contain NUL", 2)
        for name, command in {
            "out": "run pmnist er --out a\0b",
            "out of a study": "study pmnist er --seeds 1 --out a\0b",
            "a figure": "figures forgetting run -o a\0.png",
            "the data": "run cifar100-split er --data a\0b",
            "a run": "resume a\0b",
        }.items()
    },
    "out that a terminal would obey": Row("run pmnist er --out file/\x1b[2J", "cannot write file/\\x1b[2J", 1),
    "out that is taken": Row("run pmnist er --out run", "already contains a run"),
    "figure within a file": Row("figures forgetting run -o file/a.png", "cannot write file/a.png", 1),
    "figure of another kind": Row("figures forgetting run -o a.txt", ".pdf, .svg, .png"),
}
DATA = {
    "no directory": Row("run pmnist er --data nowhere", "nowhere"),
    "no directory for a study": Row("study pmnist er --data nowhere", "nowhere"),
    "no directory to list": Row("data --data nowhere", "nowhere"),
    "no directory to verify": Row("data verify --data nowhere", "nowhere"),
    "a file for a directory": Row("data fetch cifar-100 --data file", "no such directory"),
    "not there": Row("run cifar100-split er --data .", "steppe data fetch cifar-100", 1),
    "not there to be found": Row("data where cifar-100", "steppe data fetch cifar-100", 1),
    "not there to verify": Row("data verify tiny-imagenet", "steppe data fetch tiny-imagenet", 1),
    "a file for a folder": Row(
        "run cifar100-split er --data .", "missing or not a regular file", 1, put("cifar-100-binary", b"")
    ),
    "an archive that is none": Row(
        "run cifar100-split er --data .", "cannot be read", 1, put("cifar-100-binary.tar.gz", b"x" * 99)
    ),
    "a zip that is none": Row(
        "run tiny-imagenet er --data .", "cannot be read", 1, put("tiny-imagenet-200.zip", b"PK" * 99)
    ),
    "folder missing": Row("run folder:nowhere er", "nowhere is not a directory", 1),
    "folder without classes": Row("run folder:empty er", "at least two classes", 1, Path("empty").mkdir),
    "folder not named": Row("run folder er", "folder", 2),
}
PLUGINS = {
    "plugin missing": Row("run pmnist er --plugin missing.py", "missing.py does not exist"),
    "plugin that raises": Row("run pmnist er --plugin p.py", "ZeroDivisionError", 2, put("p.py", "1 / 0")),
    "plugin that raises lines": Row("list --plugin p.py", "a b", 2, put("p.py", "raise ValueError('a\\n\\nb')")),
    "plugin that raises commands to a terminal": Row(
        "run pmnist er --plugin p.py", "\\x1b]0;title\\x07", 2, put("p.py", "raise ValueError('\x1b]0;title\x07')")
    ),
    "plugin that ends the program": Row("run pmnist er --plugin p.py", "SystemExit", 2, put("p.py", "exit(0)")),
    "plugin that is no Python": Row("run pmnist er --plugin p.py", "SyntaxError", 2, put("p.py", "steppe run")),
    "plugin of zeros": Row("run pmnist er --plugin p.py", "cannot import", 2, put("p.py", bytes(99))),
    "plugin of another kind": Row("run pmnist er --plugin file", "is not a Python file"),
    "plugin that is a directory": Row("run pmnist er --plugin run", "is not a Python file"),
    "plugin with a bad preset": Row(
        "run pmnist er --plugin p.py",
        "lr = -1",
        2,
        put("p.py", "import steppe\nsteppe.register_method('m', steppe.ER, '', variant={'lr': -1})"),
    ),
}
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
TABLE = {
    f"{kind}: {name}": row
    for kind, rows in {
        "names": NAMES,
        "numbers": NUMBERS,
        "contradictions": CONTRADICTIONS,
        "configurations": CONFIGS,
        "places": OUTS,
        "data": DATA,
        "plugins": PLUGINS,
        "results": RESULTS,
        "resuming": RESUMING,
    }.items()
    for name, row in rows.items()
}


class Broken(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, pictures_known: None) -> Iterator[Path]:
    """A finished run, a run stopped in the middle, a study with one finished run, and a file."""
    place = tmp_path_factory.mktemp("world")
    (place / "file").write_bytes(b"")
    small = RunConfig.make("pictures", "finetune", SMALL)
    run(small, place / RUN)
    left = [6]

    def stop(event: Event) -> None:
        left[0] -= 1
        if not left[0]:
            raise Broken

    with pytest.MonkeyPatch.context() as patch, suppress(Broken):
        patch.setattr(training, "_REPORT_EVERY", 0.0)
        run(RunConfig.make("pictures", "fs-dgpm", SMALL), place / STOPPED, stop, checkpoint_every=0)
    (place / STUDY).mkdir()
    (place / STUDY / ".lock").touch()
    jobs = [Job(small, place / STUDY / "finetune" / f"seed-{seed}") for seed in range(2)]
    write_plan(place / STUDY, jobs, "steppe study pictures finetune --seeds 2")
    shutil.copytree(place / RUN, jobs[0].out)
    yield place
    METHODS.pop("m", None)


def tree(place: Path) -> dict[str, bytes | None]:
    """All files and their contents."""
    return {str(file.relative_to(place)): file.read_bytes() if file.is_file() else None for file in place.rglob("*")}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_gives_one_line_and_changes_nothing(
    case: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command, says, code, arrange = TABLE[case]
    arrange()
    before = tree(tmp_path)
    try:
        found = main(shlex.split(command))
    except SystemExit as stopped:  # by argparse
        found = stopped.code  # type: ignore[assignment]
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.startswith("steppe: ")
    assert told.err.count("\n") == 1
    assert not any(sign in told.err for sign in "\0\x1b\x07\u202e")
    assert len(told.err) < 1500
    assert (found, told.out) == (code, "")
    assert tree(tmp_path) == before
