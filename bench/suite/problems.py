"""The problems of the suite: data, network and protocol of each.

Each belongs to one half: defaults are chosen on the validation samples of the half "choose"; the half "held out" is
looked at when they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from networks import Recurrent, Transformer, conv1d, convnet, mlp, resnet
from samples import (
    Parts,
    Sizes,
    classes_of,
    digits,
    draw_parts,
    generator,
    halve,
    machines,
    merge,
    passages,
    pick,
    small_photos,
    waves,
)
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

import steppe

Scenario = Literal["task", "domain", "class"]


@dataclass(frozen=True)
class Problem:
    """A sequence of tasks with a network.

    Attributes:
        scenario: Whether the task is known at test ("task", one head each), only the inputs change ("domain"), or new
            classes come and all are told apart ("class").
        half: "choose" or "held out".
        tasks: How many.
        sizes: Samples of each task.
        make: The samples of the n-th task, from its number and a generator.
        network: The network, freshly initialized.
        learning: Arguments of `Learner.learn`.
        head: Outputs of a task, in the scenario "task".
        adamw: AdamW's learning rate, where it takes the place of the method's own SGD; 0 for SGD.
    """

    scenario: Scenario
    half: Literal["choose", "held out"]
    tasks: int
    sizes: Sizes
    make: Callable[[int, Sizes, torch.Generator], Parts]
    network: Callable[[], nn.Module]
    learning: dict[str, Any]
    head: int = 0
    adamw: float = 0.0

    def build(self, seed: int) -> tuple[nn.Module, list[steppe.Task]]:
        """The network and the tasks of a seed."""
        tasks = []
        for number in range(self.tasks):
            train, val, test = self.make(number, self.sizes, generator(seed, number))
            head = range(self.head * number, self.head * (number + 1)) if self.scenario == "task" else None
            tasks.append(steppe.Task(train, test, val=val, head=head, name=f"task {number + 1}"))
        torch.manual_seed(seed)
        return self.network(), tasks


def _digit_pair(side: int) -> Callable[[int, Sizes, torch.Generator], Parts]:
    def make(number: int, sizes: Sizes, rng: torch.Generator) -> Parts:
        parts = []
        for pair in digits(side):
            chosen = (pair[1] // 2 == number).nonzero().squeeze(1)
            parts.append(pick(pair, chosen))
        return draw_parts(parts[0], parts[1], sizes, rng)

    return make


def _permuted(side: int) -> Callable[[int, Sizes, torch.Generator], Parts]:
    def make(number: int, sizes: Sizes, rng: torch.Generator) -> Parts:
        order = torch.randperm(side * side, generator=rng)
        parts = draw_parts(*digits(side), sizes, rng)
        return Parts(*((x.flatten(1)[:, order], y) for x, y in parts))

    return make


def _turned(degrees: float) -> Callable[[int, Sizes, torch.Generator], Parts]:
    def make(number: int, sizes: Sizes, rng: torch.Generator) -> Parts:
        angle = torch.tensor(number * degrees * torch.pi / 180)
        turn = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0]])

        def rotate(x: Tensor) -> Tensor:
            grid = affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
            return grid_sample(x, grid, align_corners=False)

        return Parts(*((rotate(x), y) for x, y in draw_parts(*digits(14), sizes, rng)))

    return make


def _photos(name: str, per_task: int) -> Callable[[int, Sizes, torch.Generator], Parts]:
    def make(number: int, sizes: Sizes, rng: torch.Generator) -> Parts:
        first = number * per_task
        labels = list(range(first, first + per_task))
        train, test = classes_of(small_photos(name), labels, first)
        parts = draw_parts(train, test, sizes, rng)
        return Parts(*((halve(x), y) for x, y in parts))

    return make


def _superclass_domains(number: int, sizes: Sizes, rng: torch.Generator) -> Parts:
    """Which of five superclasses is it? Each task shows another class of each."""
    from steppe.data.cifar100 import SUPERCLASSES

    classes = [SUPERCLASSES[each].classes[number] for each in (0, 4, 9, 14, 18)]
    train, test = classes_of(small_photos("cifar-100"), classes, 0)
    return Parts(*((halve(x), y) for x, y in draw_parts(train, test, sizes, rng)))


def _help_texts(per_task: int) -> Callable[[int, Sizes, torch.Generator], Parts]:
    def make(number: int, sizes: Sizes, rng: torch.Generator) -> Parts:
        each = Sizes(*(count // per_task for count in sizes))
        topics = range(number * per_task, (number + 1) * per_task)
        return merge([passages(topic, topic, each, rng) for topic in topics], rng)

    return make


def _often(epochs: int, batch_size: int = 10) -> dict[str, Any]:
    return {"epochs": epochs, "batch_size": batch_size}


PROBLEMS: dict[str, Problem] = {
    "digit pairs, MLP": Problem(
        "task", "choose", 5, Sizes(500, 200, 400), _digit_pair(14), lambda: mlp(196, 10), _often(2), head=2
    ),
    "digit pairs, convnet, classes": Problem(
        "class", "held out", 5, Sizes(500, 200, 400), _digit_pair(14), lambda: convnet(1, 14, 10), _often(3)
    ),
    "rotated digits, convnet": Problem(
        "domain", "choose", 9, Sizes(300, 200, 400), _turned(20), lambda: convnet(1, 14, 10), _often(10)
    ),
    "50 permutations of 100 digits, MLP": Problem(
        "domain", "held out", 50, Sizes(100, 100, 200), _permuted(14), lambda: mlp(196, 10), _often(10)
    ),
    "200 slow turns of 20 digits, MLP": Problem(
        "domain", "choose", 200, Sizes(20, 20, 50), _turned(1.8), lambda: mlp(196, 10), _often(10)
    ),
    "5 permutations of 5,000 digits, MLP": Problem(
        "domain", "held out", 5, Sizes(5000, 500, 1000), _permuted(14), lambda: mlp(196, 10), _often(1)
    ),
    "photos, ResNet": Problem(
        "task",
        "held out",
        8,
        Sizes(1000, 250, 400),
        _photos("cifar-100", 5),
        lambda: resnet(3, 40),
        _often(3, 20),
        head=5,
    ),
    "photos, ResNet, classes": Problem(
        "class", "choose", 5, Sizes(800, 200, 200), _photos("cifar-100", 2), lambda: resnet(3, 10), _often(4, 20)
    ),
    "photos, convnet, domains": Problem(
        "domain", "choose", 5, Sizes(1000, 250, 400), _superclass_domains, lambda: convnet(3, 16, 5), _often(4, 20)
    ),
    "larger photos, vision transformer": Problem(
        "task",
        "choose",
        6,
        Sizes(1200, 300, 200),
        _photos("tiny-imagenet", 4),
        lambda: Transformer(16, 24, patch=8),
        _often(5, 20),
        head=4,
        adamw=1e-3,
    ),
    "waves, 1-D convolutions": Problem(
        "domain", "held out", 6, Sizes(200, 100, 300), waves, lambda: conv1d(4), _often(5)
    ),
    "machines, GRU": Problem(
        "domain", "held out", 8, Sizes(300, 100, 300), machines, lambda: Recurrent(4, 4), _often(5)
    ),
    "passages, transformer": Problem(
        "task",
        "held out",
        8,
        Sizes(400, 200, 200),
        _help_texts(2),
        lambda: Transformer(48, 16),
        _often(5),
        head=2,
        adamw=1e-3,
    ),
    "passages, transformer, classes": Problem(
        "class",
        "choose",
        5,
        Sizes(400, 200, 200),
        _help_texts(2),
        lambda: Transformer(48, 10),
        _often(5),
        adamw=1e-3,
    ),
}
