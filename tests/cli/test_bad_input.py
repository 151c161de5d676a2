"""Invalid input of any kind gives a one-line error and the right exit code, and changes nothing.

A row of the table: the command, a part of its message, the exit code (2: invalid use, 1: failure), and what is done to
the directory before. The directory contains a finished run, a stopped run, a study, and an empty file. The rows that
damage runs are in `tests/support/damaged_runs.py`.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from damaged_runs import BASE, RESULTS, RESUMING, RUN, STOPPED, STUDY, Row, nested, put

from steppe.cli.main import main
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.study import Job, write_plan
from steppe.learning import loop as training
from steppe.learning.events import Event
from steppe.registry import METHODS

SMALL = ["tasks=2", "samples=8", "epochs=1", "patience=0"]


def config(content: str | bytes, says: str) -> Row:
    """An invalid configuration."""
    return Row("run --config c.toml", says, 2, put("c.toml", content))


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
