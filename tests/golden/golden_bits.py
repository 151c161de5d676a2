"""The bits that every method computes on this machine: digests of weights and predictions after two short tasks.

Bits differ between processors and between versions of torch, so `golden_bits.json` has the digests by a fingerprint of
the machine's arithmetic. On a new machine, from a commit whose bits are right:

    python tests/golden/golden_bits.py --record

After a change that is meant to change bits, which makes the records of other machines worthless:

    python tests/golden/golden_bits.py --record --drop-others
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy
import pictures
import scipy
import torch
from own_models import OWN
from torch import Tensor, nn

import steppe
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.registry import METHODS

FILE = Path(__file__).with_name("golden_bits.json")
HERE = {
    "pmnist": ("benchmark.tasks=2", "benchmark.samples=60", "benchmark.test_samples=100", "updates_per_batch=3"),
    "pictures": ("benchmark.tasks=2", "epochs=3"),
}
FITTING = {
    "gem": ("method.tasks=2", "memory=20"),
    "a-gem": ("method.tasks=2", "memory=20"),
    "icarl": ("exemplars=12",),
    "fs-dgpm": ("threshold=0.9",),  # so that bases from the few samples stay small and leave room to learn
    "gpm": ("basis_samples=40",),
}
VARIANTS = {
    "fs-dgpm second order": ("fs-dgpm", ("second_order=true",)),
    "fs-dgpm chunked": ("fs-dgpm", ("ascent_form=chunked",)),
    "fs-dgpm chunked second order": ("fs-dgpm", ("ascent_form=chunked", "second_order=true", "ascent_steps=3")),
    "fs-dgpm small buffer": ("fs-dgpm", ("buffer=25", "basis_samples=20", "ascent_clamp=0.01")),
    "la-dgpm whole": ("la-dgpm", ("ascent_form=whole",)),
    "fs-er small buffer": ("fs-er", ("buffer=25", "ascent_steps=3", "clip=0")),
    "la-maml second order": ("la-maml", ("second_order=true",)),
    "la-maml synchronous": ("la-maml", ("asynchronous=false", "inner_clamp=0.01", "inner_relu=false")),
    "a-gem batch": ("a-gem", ("method.tasks=2", "memory=20", "reference=batch", "reference_samples=8")),
    "gem strength": ("gem", ("method.tasks=2", "memory=20", "strength=0.5")),
    "ewc strong": ("ewc", ("strength=5000", "method.samples=20")),
    "gpm rising": ("gpm", ("thresholds=0.8", "threshold_step=0.05", "clip=1")),
    "der++ without labels": ("der++", ("beta=0", "buffer=25")),
    "finetune without momentum": ("finetune", ("momentum=0", "clip=0")),
}
NETWORKS = {"cifar100-split": 32, "cifar100-superclass": 32, "tiny-imagenet": 64}  # and their pictures' size
RUNS = ("finetune", "er", "fs-dgpm", "gpm", "multitask", "oracle")


@dataclass(frozen=True)
class Case:
    """A method, a model created for each seed, tasks, and training settings."""

    method: str
    settings: steppe.MethodConfig
    model: Callable[[int], nn.Module]
    tasks: list[steppe.Task]
    how: dict[str, object]
    exclude: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Tensor] | None = None


def cases() -> Iterator[tuple[str, Case]]:
    """All of them, by name."""
    for benchmark in HERE:
        for method in METHODS:
            if (benchmark, method) != ("pmnist", "icarl"):  # which needs heads
                yield f"{benchmark}, {method}", benchmarked(benchmark, method, FITTING.get(method, ()))
        for name, (method, overrides) in VARIANTS.items():
            yield f"{benchmark}, {name}", benchmarked(benchmark, method, overrides)
    for benchmark, size in NETWORKS.items():
        for method in ("finetune", "fs-dgpm"):
            yield f"network of {benchmark}, {method}", on_network(benchmark, method, size)
    for model in OWN:
        for method in ("er", "fs-dgpm", "gpm"):
            yield f"own {model}, {method}", on_own_model(model, method)


def benchmarked(benchmark: str, method: str, overrides: Iterable[str]) -> Case:
    config = RunConfig.make(benchmark, method, [*HERE[benchmark], *overrides])
    made = config.benchmark_settings
    return Case(
        method,
        config.method_settings,
        made.model,
        list(made.stream(0)),
        config.training.as_dict(),
        prepare=made.input_transform,
    )


def on_network(benchmark: str, method: str, size: int) -> Case:
    """A benchmark's own network, on random images."""
    config = RunConfig.make(benchmark, method)
    generator = torch.Generator().manual_seed(1)

    def made(head: range) -> steppe.Task:
        x = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8, generator=generator)
        y = head.start + torch.arange(12) % len(head)
        return steppe.Task((x, y), (x, y), head=head, name=f"outputs from {head.start}")

    tasks = [made(range(0, 5)), made(range(5, 10))]
    how = {"epochs": 1, "batch_size": 6}
    return Case(method, config.method_settings, config.benchmark_settings.model, tasks, how)


def on_own_model(model: str, method: str) -> Case:
    own, entry = OWN[model], METHODS[method]

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return own.build()

    torch.manual_seed(5)
    tasks = [steppe.Task(own.data(40, place), own.data(20, place), name=f"task {place}") for place in range(2)]
    how: dict[str, object] = {"epochs": 2, "batch_size": 8}
    exclude = tuple(sorted(own.newly_covered))  # so that the bits are those from before these weights were covered
    return Case(method, entry.settings.from_mapping(entry.values("")), made, tasks, how, exclude)


def digests_of(case: Case, directory: Path) -> dict[str, str]:
    """Digests of a learner after each task, and of one loaded from a file after the first."""
    torch.manual_seed(9)
    first, file = case.model(0), directory / "learner"
    learner = steppe.Learner(first, case.settings, seed=0, input_transform=case.prepare, exclude=case.exclude)
    found = {}
    if case.settings.schedule == "sequential":
        learner.learn(case.tasks[0], **case.how)
        found["after one task"] = digest(learner, case.tasks[:1])
        learner.save(file)
        learner.learn(case.tasks[1], **case.how)
    else:
        learner.learn(case.tasks, **case.how)
        learner.save(file)
    found["after both"] = digest(learner, case.tasks)
    loaded = steppe.load(file, case.model(1), input_transform=case.prepare)
    if case.settings.schedule == "sequential":
        loaded.learn(case.tasks[1], **case.how)
    found["loaded"] = digest(loaded, case.tasks)
    return found


def digest(learner: steppe.Learner, tasks: list[steppe.Task]) -> str:
    """Hash all weights and buffers by name, and the predictions."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(learner.model.state_dict().items()):
        add(hashed, name, tensor)
    for task in tasks:
        add(hashed, task.name, learner.predict(task.test.first()[0], task.head))
    hashed.update(json.dumps(learner.evaluate(tasks)).encode())
    return hashed.hexdigest()[:16]


def add(hashed: hashlib._Hash, name: str, tensor: Tensor) -> None:
    hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    hashed.update(tensor.detach().contiguous().numpy().tobytes())


def all_digests() -> dict[str, dict[str, str]]:
    """Digests of every case, and of the accuracies of whole runs."""
    torch.set_num_threads(1)
    found = {}
    with ExitStack() as stack:
        stack.enter_context(pictures.registered())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, case in cases():
            found[name] = digests_of(case, directory)
        for method in RUNS:
            result = run(RunConfig.make("pmnist", method, HERE["pmnist"]))
            told = json.dumps([getattr(result, key) for key in ("accuracy", "acc", "bwt", "updates", "bytes")])
            found[f"run of pmnist, {method}"] = {"result": hashlib.sha256(told.encode()).hexdigest()[:16]}
    return found


def fingerprint() -> str:
    """A hash of this machine's results on fixed numbers, for all kinds of kernels that methods use."""
    torch.set_num_threads(1)
    kinds = torch.__version__, numpy.__version__, scipy.__version__, platform.machine(), processor()
    hashed = hashlib.sha256(" ".join(kinds).encode())
    hashed.update(torch.backends.cpu.get_cpu_capability().encode())
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.float64):
        for n, m in ((10, 784), (100, 100), (37, 250)):
            x, w = (torch.randn(n, m, generator=generator).to(dtype) for _ in range(2))
            for result in (x @ w.T, x.T @ w, x.softmax(1), x.exp(), x.tanh(), x.sum(), x.norm(), torch.cdist(x, w)):
                add(hashed, "", result)
            square = x @ x.T
            for result in (*torch.linalg.eigh(square), *torch.linalg.svd(x, full_matrices=False), *torch.linalg.qr(x)):
                add(hashed, "", result)
    pictures = torch.randn(10, 3, 32, 32, generator=generator)
    for side in (3, 4, 5):
        kernel = torch.randn(20, 3, side, side, generator=generator).requires_grad_()
        output = nn.functional.conv2d(pictures, kernel, padding=1)
        add(hashed, "", output)
        add(hashed, "", torch.autograd.grad(output.square().sum(), kernel)[0])
    return hashed.hexdigest()[:16]


def processor() -> str:
    """Its vendor, on which the choice of some kernels depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def known() -> dict[str, dict[str, dict[str, str]]]:
    """Recorded digests by fingerprint."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the digests as those of this machine")
    parser.add_argument("--drop-others", action="store_true", help="with --record: forget those of other machines")
    asked = parser.parse_args()
    here, found = fingerprint(), all_digests()
    if asked.record:
        kept = {**({} if asked.drop_others else known()), here: found}
        FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        print(json.dumps({here: found}))


if __name__ == "__main__":
    main()
