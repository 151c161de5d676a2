"""CPU time of a landscape, point by point, on one thread.

    python bench/landscape.py [--samples 1000] [--rounds 5]

A point is the mean loss of a task's samples at one α along one direction; `by_calls_ms` is what it costs by calling the
model, `forward_ms` one pass of the same samples through the model, all at once. They are timed by turns, the fastest
round of each counts. A whole landscape of ten tasks is 55 pairs · 10 directions · 51 points. Prints JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measuring import fastest
from report import report
from torch import nn

from steppe.landscape.directions import random_direction
from steppe.landscape.profile import LossProbe, loss_profile
from steppe.landscape.settings import LandscapeSettings
from steppe.models.alexnet import AlexNet
from steppe.models.lenet import LeNet
from steppe.models.mlp import MLP
from steppe.network.network import Network
from steppe.tensors.batch import Batch

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (MLP, (784,), 51),
    "lenet": (LeNet, (3, 32, 32), 3),
    "alexnet": (AlexNet, (3, 32, 32), 3),
}


def measured(name: str, samples: int, rounds: int) -> dict[str, object]:
    """One net's row."""
    build, shape, points = NETS[name]
    model = build().eval()
    network = Network(model)
    x = torch.rand(samples, *shape)
    if len(shape) == 3:
        x = x.to(memory_format=torch.channels_last)  # as benchmarks of images prepare it
    labels = torch.arange(samples) % 10
    network.heads.add(None, 100)
    batch = Batch(x, labels, torch.zeros_like(labels))
    alphas = LandscapeSettings(points=points, radius=1.0).alphas
    d = random_direction(network, 0, 0)
    quick, calls = LossProbe(network, batch), LossProbe(network, batch, quick=False)

    @torch.no_grad()
    def forward() -> None:
        model(x)

    best = fastest(
        {
            "point": lambda: loss_profile(quick, d, alphas),
            "call": lambda: loss_profile(calls, d, alphas),
            "forward": forward,
        },
        rounds,
        block=1,
    )
    point, call = best["point"] / points, best["call"] / points
    row = {"net": name, "samples": samples, "point_ms": point, "by_calls_ms": call, "forward_ms": best["forward"]}
    return {**row, "ten_tasks_minutes": 55 * 10 * 51 * point / 60_000}


def main() -> None:
    """Every net."""
    parser = argparse.ArgumentParser(description="Time of a landscape.")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report(nets=[measured(name, options.samples, options.rounds) for name in NETS])


if __name__ == "__main__":
    main()
