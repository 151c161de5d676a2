"""What it costs to find the bases after a task, beside an SVD of the full representation matrix.

    python bench/basis_update.py [NET ...] [--samples N] [--rounds N]

For each network, with random images: ours (Gram matrices, accumulated over chunks, and a symmetric eigensolver) against
collecting all columns and `torch.linalg.svd`, layer by layer, as the paper's released code does. CPU time of one
thread, the fastest of a few rounds; memory as the growth of the process's peak; and how far the two bases are apart, as
the largest element of the difference of their projections, with their ranks. Prints JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import torch
from report import report
from torch import Tensor, nn
from update_cost import BENCHMARKS

from steppe import Learner, Task
from steppe.experiments.config import RunConfig
from steppe.projection.hooks import capture_inputs
from steppe.projection.layers import ProjectedWeight

THRESHOLD = 0.98


def prepared(net: str, samples: int) -> tuple[Any, Any, Tensor]:
    """The network, a memory for it, and stored images."""
    benchmark, shape = BENCHMARKS[net]
    config = RunConfig.make(benchmark, "fs-dgpm")
    model = config.benchmark_settings.model(0)
    learner = Learner(model, config.method_settings, input_transform=config.benchmark_settings.input_transform)
    generator = torch.Generator().manual_seed(0)
    rough = torch.rand(samples, *shape[:-2], *(side // 4 for side in shape[-2:]), generator=generator)
    x = (torch.nn.functional.interpolate(rough, shape[-2:], mode="bilinear") * 255).to(torch.uint8)
    method: Any = learner.validate(Task((x, torch.arange(samples) % 5), head=range(5)))
    return learner.network, method.memory, x


def full_svd(network: Any, memory: Any, x: Tensor) -> dict[str, Tensor]:
    """All columns of every layer, then their SVD."""
    collected: dict[str, list[Tensor]] = {name: [] for name in memory.covered}

    def collect(weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        collected[weight.name].append(weight.rule(layer, x)[0])

    with torch.no_grad(), network.mode(training=False), capture_inputs(memory.covered, collect):
        network.model(network.prepare_inputs(x))
    bases = {}
    for name, parts in collected.items():
        vectors, values, _ = torch.linalg.svd(torch.cat(parts).T, full_matrices=False)
        energy = values.square().cumsum(0) / values.square().sum()
        bases[name] = vectors[:, : int((energy < THRESHOLD).sum()) + 1]
    return bases


def one(net: str, samples: int, rounds: int, ours: bool) -> dict[str, Any]:
    """One way alone, in a process of its own, so that its memory is its own."""
    torch.set_num_threads(1)
    network, memory, x = prepared(net, samples)
    network.model(network.prepare_inputs(x[:8]))  # whatever a first forward loads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        if ours:
            memory.rebuild(network, x, THRESHOLD)
        else:
            bases = full_svd(network, memory, x)
        best = min(best, time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if ours:
        bases = {name: p.basis[0] for name, p in memory.projectors.items()}
    return {"seconds": best, "extra_mb": (peak - before) / 1024, "bases": bases}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "nets", nargs="*", default=["lenet", "alexnet"], metavar="NET", help="lenet, alexnet, four-conv"
    )
    parser.add_argument("--samples", type=int, default=125, help="samples the bases are found from (default: 125)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    found = []
    for net in options.nets:
        results = []
        for ours in (True, False):
            with context.Pool(1) as pool:
                results.append(pool.apply(one, (net, options.samples, options.rounds, ours)))
        mine, theirs = results
        layers = {
            name: {
                "rank": basis.shape[1],
                "svd_rank": theirs["bases"][name].shape[1],
                "difference": float((basis @ basis.T - theirs["bases"][name] @ theirs["bases"][name].T).abs().max()),
            }
            for name, basis in mine["bases"].items()
        }
        found.append(
            {
                "net": net,
                "seconds": mine["seconds"],
                "svd_seconds": theirs["seconds"],
                "times_faster": theirs["seconds"] / mine["seconds"],
                "extra_mb": mine["extra_mb"],
                "svd_extra_mb": theirs["extra_mb"],
                "largest_difference": max(layer["difference"] for layer in layers.values()),
                "layers": layers,
            }
        )
    report(samples=options.samples, nets=found)


if __name__ == "__main__":
    main()
