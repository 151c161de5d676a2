"""The samples of the suite: real images and text, and series made by a formula. Every draw has its own generator."""

from __future__ import annotations

import functools
import math
import pydoc_data.topics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from steppe.data import cifar100, mnist, tiny_imagenet
from steppe.data.images import ImageSet

Pair = tuple[Tensor, Tensor]


class Parts(NamedTuple):
    """The samples of one task: to train on, to choose by, and to report."""

    train: Pair
    val: Pair
    test: Pair


class Sizes(NamedTuple):
    """How many samples of a task are for training, validation and testing."""

    train: int
    val: int
    test: int


def generator(*key: int) -> torch.Generator:
    """A generator for one purpose, from its numbers."""
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(seed)


def draw_parts(train: Pair, test: Pair, sizes: Sizes, rng: torch.Generator) -> Parts:
    """Draw samples of one task: training and validation samples from the training part, without overlap."""
    order = torch.randperm(len(train[1]), generator=rng)[: sizes.train + sizes.val]
    tested = torch.randperm(len(test[1]), generator=rng)[: sizes.test]
    learned, held_out = order[: sizes.train], order[sizes.train :]
    return Parts((train[0][learned], train[1][learned]), (train[0][held_out], train[1][held_out]), pick(test, tested))


def pick(pair: Pair, index: Tensor) -> Pair:
    """Some samples."""
    return pair[0][index], pair[1][index]


def classes_of(images: ImageSet, classes: Sequence[int], first: int) -> tuple[Pair, Pair]:
    """Training and test images of some classes, labeled from `first` on in their order."""
    label = {number: first + place for place, number in enumerate(classes)}
    pairs = []
    for part in ("train", "test"):
        x, y = images.select(part, classes)  # type: ignore[arg-type]
        pairs.append((x, torch.tensor([label[int(each)] for each in y])))
    return pairs[0], pairs[1]


@functools.cache
def digits(side: int) -> tuple[Pair, Pair]:
    """MNIST, (n, 1, side, side), from 0 to 1: 28 pixels, or 14 or 7 by averaging."""
    found = mnist.load()

    def shrink(x: Tensor) -> Tensor:
        return avg_pool2d(x.view(-1, 1, 28, 28).float() / 255, 28 // side)

    return (shrink(found.train_x), found.train_y), (shrink(found.test_x), found.test_y)


@functools.cache
def small_photos(name: str) -> ImageSet:
    """CIFAR-100, or TinyImageNet."""
    return cifar100.load() if name == "cifar-100" else tiny_imagenet.load()


def halve(x: Tensor) -> Tensor:
    """Images of bytes, at half their size, standardized roughly."""
    return avg_pool2d(x.float() / 127.5 - 1, 2)


def waves(number: int, sizes: Sizes, rng: torch.Generator, length: int = 64) -> Parts:
    """Sines with noise: four classes of frequency, which each task shifts; random phase and loudness."""

    def make(count: int) -> Pair:
        y = torch.arange(count) % 4
        frequency = 2.0 + 1.5 * y + 0.6 * number
        phase = 2 * math.pi * torch.rand(count, 1, generator=rng)
        loudness = 0.5 + torch.rand(count, 1, generator=rng)
        time = torch.linspace(0, 1, length)
        x = loudness * torch.sin(2 * math.pi * frequency[:, None] * time + phase)
        return (x + 0.4 * torch.randn(count, length, generator=rng)).unsqueeze(1), y

    return Parts(make(sizes.train), make(sizes.val), make(sizes.test))


def machines(number: int, sizes: Sizes, rng: torch.Generator, length: int = 24) -> Parts:
    """Readings of four sensors, (length, 4): does the machine drift, swing or jump, or is it well? Each task is another
    machine, which mixes and scales its sensors in its own way.
    """
    mixing = torch.linalg.qr(torch.randn(4, 4, generator=rng))[0] * (0.5 + torch.rand(4, generator=rng))

    def make(count: int) -> Pair:
        y = torch.arange(count) % 4
        noise = torch.randn(count, length, 4, generator=rng)
        noise = torch.stack([noise[:, : t + 1].mean(1) * (t + 1) ** 0.5 for t in range(length)], 1)
        time = torch.linspace(0, 1, length)[None, :, None]
        size = 1 + torch.rand(count, 1, 1, generator=rng)
        start = torch.rand(count, 1, 1, generator=rng)
        signal = torch.zeros(count, length, 4)
        signal[..., :1] += (y == 1)[:, None, None] * 3 * size * time
        signal[..., 1:2] += (y == 2)[:, None, None] * size * torch.sin(2 * math.pi * (3 * time + start)) * 1.5
        signal[..., 2:3] += (y == 3)[:, None, None] * 2 * size * (time > 0.2 + 0.6 * start)
        return (noise + signal) @ mixing, y

    return Parts(make(sizes.train), make(sizes.val), make(sizes.test))


@functools.cache
def texts() -> list[tuple[str, str]]:
    """The topics of Python's own help, the longest first: titles and texts."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return sorted(topics.items(), key=lambda topic: (-len(topic[1]), topic[0]))


def passages(topic: int, label: int, sizes: Sizes, rng: torch.Generator, length: int = 48) -> Parts:
    """Passages of one topic as bytes, (n, length): the end of the text is for testing, the part before for choosing."""
    raw = torch.tensor(list(texts()[topic][1].encode("ascii", "replace")), dtype=torch.int64)
    cuts = [0, int(0.7 * len(raw)), int(0.85 * len(raw)), len(raw)]
    pairs = []
    for count, start, stop in zip(sizes, cuts, cuts[1:], strict=False):
        places = start + torch.randint(stop - start - length, (count,), generator=rng)
        pairs.append((torch.stack([raw[place : place + length] for place in places]), torch.full((count,), label)))
    return Parts(*pairs)


def merge(parts: Sequence[Parts], rng: torch.Generator) -> Parts:
    """Several parts as one, shuffled."""
    pairs = []
    for group in zip(*parts, strict=True):
        x, y = torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])
        pairs.append(pick((x, y), torch.randperm(len(y), generator=rng)))
    return Parts(*pairs)
