"""Files written by earlier versions, which must stay readable: learners, runs, a study.

Each archive in `tests/golden/compat` was written by the code of its time, and includes what loading and resuming gave
then. Archives are never rewritten. If a later version writes other files, it adds an archive:

    python tests/golden/compat_files.py NAME
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from pictures import mirrored
from torch import Tensor, nn

import steppe
from steppe.cli.main import main as steppe_command
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import read_result
from steppe.learning.events import EpochEnded, Event, Progress
from steppe.registry import BENCHMARKS, METHODS

DIRECTORY = Path(__file__).with_name("compat")
HOW = {"epochs": 3, "batch_size": 6, "updates_per_batch": 2, "patience": 2, "freeze_norms": True}
FITTING = {
    "gem": {"tasks": 3, "memory": 9},
    "a-gem": {"tasks": 3, "memory": 9},
    "icarl": {"exemplars": 6},
    "ewc": {"samples": 6},
}
CHAINS = ("er", "fs-dgpm", "gpm", "la-maml")  # also on a linear chain, with a single head
LANDSCAPE = ("--points", "5", "--directions", "2", "--samples", "18", "--radius", "1")
_SIZES = ("tasks=2", "samples=20", "test_samples=20", "updates_per_batch=1")
STUDY = ("pmnist", "er", "finetune", "--seeds", "1", "--out", "study", "--jobs", "1")
STUDY = (*STUDY, *(part for size in _SIZES for part in ("--set", size)))

Callback = Callable[[Event], None]


class SmallNet(nn.Module):
    """Convolution, BatchNorm, two linear layers; no dropout, whose draws differ between processors."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.hidden, self.head = nn.Linear(48, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        output: Tensor = self.head(self.hidden(x).relu())
        return output


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )


def images(number: int, count: int, offset: int) -> tuple[Tensor, Tensor]:
    """Images of two classes, each bright in its own positions, computed with integers alone."""
    y = torch.arange(count) % 2
    places = torch.arange(16)
    bright = ((places * (3 + 2 * number) + 5 * y[:, None]) % 7 < 3) * 120
    noise = (torch.arange(count)[:, None] * 37 + places * 53 + number * 11 + offset) ** 2 % 101
    return (bright + noise).to(torch.uint8).view(-1, 1, 4, 4), y


def task(number: int, *, heads: bool, slow: bool = False) -> steppe.Task:
    """A task; a slow one waits before each batch, so that each is reported."""

    def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
        if slow:
            time.sleep(0.25)
        return mirrored(x, generator)

    head = range(2 * number, 2 * number + 2) if heads else None
    start = head.start if head else 0
    (x, y), (u, v), (s, t) = images(number, 18, 0), images(number, 20, 7), images(number, 10, 3)
    return steppe.Task(
        (x, y + start), (u, v + start), val=(s, t + start), head=head, augment=augmented, name=f"compat {number + 1}"
    )


@dataclass(frozen=True)
class Compat(steppe.Benchmark):
    """The tasks as a benchmark."""

    training = steppe.TrainingConfig(epochs=3, batch_size=6, updates_per_batch=2, patience=2, freeze_norms=True)

    tasks: int = steppe.setting(3, "number of tasks", at_least=1, at_most=3)

    def stream(self, seed: int) -> Sequence[steppe.Task]:
        return [task(number, heads=True) for number in range(self.tasks)]

    def network(self) -> nn.Module:
        return SmallNet()


@contextmanager
def registered() -> Iterator[None]:
    """Register the benchmark inside."""
    steppe.register_benchmark("compat", "Tasks for files that must stay readable.")(Compat)
    try:
        yield
    finally:
        del BENCHMARKS["compat"]


@dataclass(frozen=True)
class Saved:
    """A saved learner: its method, its model, and how far it had got."""

    method: str
    chain: bool = False
    within: bool = False  # a task, or between two

    @property
    def name(self) -> str:
        return f"{self.method}{'-chain' if self.chain else ''}-{'within' if self.within else 'between'}"

    @property
    def file(self) -> str:
        return f"learner-{self.name}.safetensors"

    @property
    def sequential(self) -> bool:
        return METHODS[self.method].settings.schedule == "sequential"

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return chain() if self.chain else SmallNet()

    def task(self, number: int, *, slow: bool = False) -> steppe.Task:
        return task(number, heads=not self.chain, slow=slow)


def all_saved() -> dict[str, Saved]:
    """All of them, by name."""
    sequential = [name for name, entry in METHODS.items() if entry.settings.schedule == "sequential"]
    joint = [name for name in METHODS if name not in sequential]
    saved = [
        *(Saved(name, within=within) for name in sequential for within in (False, True)),
        *(Saved(name, chain=True, within=within) for name in CHAINS for within in (False, True)),
        *(Saved(name) for name in joint),
    ]
    return {each.name: each for each in saved}


def described(learner: steppe.Learner, saved: Saved) -> dict[str, Any]:
    """What can be compared: progress, accuracies, and the model's outputs on three images."""
    learner.model.eval()
    with torch.no_grad():
        outputs = learner.model(saved.task(0).test.first()[0][:3].float() / 255)
    learner.model.train()
    return {
        "tasks": learner.num_tasks,
        "interrupted": learner.has_pending_task,
        "accuracy": learner.evaluate([saved.task(number) for number in range(learner.num_tasks)]),
        "outputs": [[round(value, 5) for value in row] for row in outputs.tolist()],
    }


def finished(learner: steppe.Learner, saved: Saved) -> dict[str, Any]:
    """The result of continuing a loaded learner: it learns the second task, or the rest of it, and the third."""
    for number in (1, 2) if saved.sequential else ():
        learner.learn(saved.task(number), **HOW)
    return described(learner, saved)


def write_learner(saved: Saved, file: Path) -> None:
    """Learn, and save after one task or within the second."""
    entry = METHODS[saved.method]
    settings = entry.settings.from_mapping({"buffer": 9} if "buffer" in entry.settings.schema() else {})
    settings = settings.replace(**entry.variant, **FITTING.get(saved.method, {}))
    learner = steppe.Learner(saved.model(0), settings, seed=4, exclude=() if saved.chain else ("conv",))

    def keep(event: Event) -> None:
        if isinstance(event, Progress) and (event.epoch, event.batch) == (1, 2):
            learner.save(file)

    if not saved.sequential:
        learner.learn([saved.task(0), saved.task(1)], **HOW)
    else:
        learner.learn(saved.task(0), **HOW)
    if saved.within:
        learner.learn(saved.task(1, slow=True), **HOW, callback=keep)
    else:
        learner.save(file)


def learners(directory: Path) -> dict[str, Any]:
    """Write all learners; return what each file gives now."""
    found = {}
    for name, saved in all_saved().items():
        file = directory / saved.file
        write_learner(saved, file)
        loaded = described(steppe.load(file, saved.model(1)), saved)
        found[name] = {"loaded": loaded, "finished": finished(steppe.load(file, saved.model(1)), saved)}
    return found


def runs() -> dict[str, Any]:
    """Write a finished run with a part of its landscape, a run stopped in its second task, and a study with a missing
    run to the working directory, and return what resuming them gives."""
    seen: list[Event] = []

    def stop() -> BaseException | None:
        return KeyboardInterrupt() if isinstance(seen[-1], EpochEnded) and seen[-1].task == 1 else None

    finished = run(RunConfig.make("compat", "fs-dgpm", ("buffer=9", "basis_samples=9")), Path("finished"))
    steppe_command(["landscape", "finished", *LANDSCAPE, "--after", "3"])
    stopped = RunConfig.make("compat", "gpm", ("basis_samples=9",))
    with suppress(KeyboardInterrupt):
        run(stopped, Path("stopped"), seen.append, stop=stop)
    steppe_command(["study", *STUDY])
    missing = read_result(Path("study/finetune/seed-0"))
    rmtree("study/finetune")
    rmtree("study/er/seed-0/checkpoints")  # a network of 360 kB, twice
    whole: list[Event] = []
    accuracy = run(stopped, callback=whole.append).accuracy
    losses = [event.loss for event in whole if isinstance(event, EpochEnded)]
    found = {"finished": finished.accuracy, "stopped": accuracy, "missing": missing.accuracy}
    return {**found, "losses of stopped": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="of the new archive")
    archive = DIRECTORY / f"{parser.parse_args().name}.tar.xz"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made, registered():
        os.chdir(made)
        expected = {"learners": learners(Path()), "runs": runs()}
        DIRECTORY.mkdir(exist_ok=True)
        with tarfile.open(archive, "x:xz", preset=9) as packed:
            for file in sorted(Path().rglob("*")):
                if file.is_file() and file.name != ".lock":
                    packed.add(file, filter=nameless)
        os.chdir(DIRECTORY)
    archive.with_name(f"{archive.name.removesuffix('.tar.xz')}.json").write_text(json.dumps(expected, indent=1) + "\n")


def nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner and date of an archive member."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
