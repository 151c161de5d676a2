"""What an FS-DGPM update costs beside the forward and backward passes it contains, as a ratio taken in one run.

    python bench/update_cost.py [NET ...] [--full] [--rounds N]

For each network: the method at work as a run leaves it (buffer filled, bases of given ranks), one update with as many
replayed as current samples, against the same passes alone (K on the batch, one on the union, each the gradient of the
loss in all weights). Both are timed in turn, in CPU time of one thread, and the medians are compared. Ranks are those
that a recorded run reached after its last task; with --full, and for the transformer, of which there is no run, the
bases are full, the most they can cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import report
from vision_transformer import VisionTransformer

from steppe import Learner, Task
from steppe.experiments.config import RunConfig
from steppe.network.network import Network
from steppe.projection.projector import SoftProjector
from steppe.runtime.contexts import flush_denormals, gc_frozen
from steppe.tensors.batch import Batch

RUNS = {
    "mlp": "pmnist/fs-dgpm/seed-0",
    "lenet": "cifar100-superclass-short/fs-dgpm/seed-0",
    "alexnet": "cifar100-split-short/fs-dgpm/seed-0",
    "four-conv": "tiny-imagenet-short/fs-dgpm/seed-0",
}
BENCHMARKS = {
    "mlp": ("pmnist", (784,)),
    "lenet": ("cifar100-superclass", (3, 32, 32)),
    "alexnet": ("cifar100-split", (3, 32, 32)),
    "four-conv": ("tiny-imagenet", (3, 64, 64)),
    "transformer": ("cifar100-superclass", (3, 32, 32)),
}


@dataclass(frozen=True)
class AtWork:
    """FS-DGPM in the middle of a run: buffer filled, bases of given ranks."""

    network: Network
    method: Any
    batch: Batch
    ranks: dict[str, int]

    def update(self) -> None:
        """One update."""
        self.method.observe(self.batch)


def at_work(net: str, ranks: dict[str, int]) -> AtWork:
    """The method on one of the networks; without a rank a basis is full."""
    benchmark, shape = BENCHMARKS[net]
    config = RunConfig.make(benchmark, "fs-dgpm")
    size = config.training.batch_size
    model = VisionTransformer() if net == "transformer" else config.benchmark_settings.model(0)
    learner = Learner(model, config.method_settings, input_transform=config.benchmark_settings.input_transform)
    outputs = list(model.parameters())[-1].shape[0]
    generator = torch.Generator().manual_seed(0)
    count = 4 * size
    x = torch.randint(256, (count, *shape), generator=generator, dtype=torch.uint8)
    y = torch.randint(outputs, (count,), generator=generator)
    head = None if benchmark == "pmnist" else range(outputs)
    learner.learn(Task((x, y), head=head), batch_size=size)
    method: Any = learner.validate(Task((x, y), head=head))
    used, projectors = {}, {}
    for name, projector in method.memory.projectors.items():
        width = projector.basis.shape[1]
        used[name] = min(ranks.get(name, width), width)
        basis = torch.linalg.qr(torch.randn(width, used[name], generator=generator)).Q.contiguous()  # as in a run
        projectors[name] = SoftProjector(basis[None], torch.ones(1, used[name]))
    method.memory.projectors = projectors
    batch = Batch(x[:size], y[:size], torch.zeros(size, dtype=torch.int64))
    return AtWork(learner.network, method, batch, used)


def measured(net: str, ranks: dict[str, int], rounds: int) -> dict[str, Any]:
    """CPU milliseconds of an update and of its passes, and their ratio."""
    found = at_work(net, ranks)
    network, batch, size = found.network, found.batch, len(found.batch)
    union = network.prepare(batch.joined(batch))
    parts = [union[:size]] * found.method.settings.ascent_steps + [union]

    def passes() -> None:
        for part in parts:
            torch.autograd.grad(network.loss(part), list(network.trainable.values()))

    with flush_denormals(), gc_frozen(), network.mode(training=True):  # as while learning
        times = in_turn((found.update, passes), rounds)
    return {
        "net": net,
        "batch": f"{size} + {size}",
        "ranks": ", ".join(map(str, found.ranks.values())),
        "update_ms": times[0],
        "passes_ms": times[1],
        "ratio": times[0] / times[1],
    }


def in_turn(works: tuple[Callable[[], None], ...], rounds: int) -> list[float]:
    """Median CPU milliseconds of each, alternately in blocks of some 20 ms, so that a busy moment hits all alike."""
    spent: list[list[float]] = [[] for _ in works]
    for work in works:
        work()  # warm up
    started = time.process_time()
    works[0]()
    block = max(1, int(0.02 / max(time.process_time() - started, 1e-6)))
    for _ in range(rounds):
        for place, work in enumerate(works):
            started = time.process_time()
            for _ in range(block):
                work()
            spent[place].append(1e3 * (time.process_time() - started) / block)
    return [statistics.median(values) for values in spent]


def reached(net: str) -> dict[str, int]:
    """The ranks after the last task of the recorded run."""
    if net not in RUNS:
        return {}
    log = Path(__file__).parents[1] / "results" / RUNS[net] / "log.jsonl"
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ended = [record for record in records if record["event"] == "TaskEnded"]
    return {name: entry["rank"] for name, entry in ended[-1]["method"]["ranks"].items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nets", nargs="*", default=list(BENCHMARKS), metavar="NET", help=", ".join(BENCHMARKS))
    parser.add_argument("--full", action="store_true", help="bases as large as they can be")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is timed (default: 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(updates=[measured(net, {} if options.full else reached(net), options.rounds) for net in options.nets])


if __name__ == "__main__":
    main()
