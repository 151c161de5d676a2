"""Slow, obvious references for what the library computes: loops, dense matrices, full decompositions, in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steppe.projection.memory import GradientMemory

Sample = tuple[Tensor, int, int]  # input, label, index of its task


# Projectors ----------------------------------------------------------------------------------------------------------


def dense_projectors(basis: Tensor, importance: Tensor) -> list[Tensor]:
    """Σ_i λ_i u_i u_iᵀ of every group, (in, in) each."""
    found = []
    for vectors, weights in zip(basis, importance, strict=True):
        matrix = torch.zeros(len(vectors), len(vectors), dtype=basis.dtype)
        for u, weight in zip(vectors.T, weights, strict=True):
            matrix += weight * torch.outer(u, u)
        found.append(matrix)
    return found


def projected_rows(gradient: Tensor, matrices: list[Tensor]) -> Tensor:
    """Each row of the weight's (out, in) view times its group's matrix."""
    rows = gradient.reshape(len(gradient), -1)
    share = len(rows) // len(matrices)
    out = torch.stack([row @ matrices[place // share] for place, row in enumerate(rows)])
    return out.reshape(gradient.shape)


def orthonormal(inputs: int, rank: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns, (in, rank)."""
    return torch.linalg.qr(torch.randn(inputs, rank, dtype=torch.float64, generator=generator))[0]


def soften(memory: GradientMemory, generator: torch.Generator) -> None:
    """Give every direction of a memory an importance between 0 and 1."""
    memory.projectors = {
        name: p.with_importance(torch.rand(p.importance.shape, dtype=p.importance.dtype, generator=generator))
        for name, p in memory.projectors.items()
    }


# Layer inputs --------------------------------------------------------------------------------------------------------


def _taken_from(place: int, size: int, mode: str) -> int | None:
    """The index that a padded position takes its value from; None is a zero."""
    if 0 <= place < size:
        return place
    if mode == "zeros":
        return None
    if mode == "replicate":
        return min(max(place, 0), size - 1)
    if mode == "circular":
        return place % size
    return -place if place < 0 else 2 * (size - 1) - place  # reflect


def windows(layer: Any, x: Tensor) -> Tensor:
    """Every window of a convolution, element by element, (groups, n, in)."""
    axes = range(len(layer.kernel_size))
    before = []
    for axis in axes:
        if layer.padding == "same":
            before.append(layer.dilation[axis] * (layer.kernel_size[axis] - 1) // 2)
        else:
            before.append(0 if layer.padding == "valid" else layer.padding[axis])
    values = x.numpy()
    with torch.no_grad():
        places = [range(size) for size in layer(x).shape[2:]]
    share = x.shape[1] // layer.groups
    found = []
    for group in range(layer.groups):
        for sample, place in itertools.product(range(len(x)), itertools.product(*places)):
            window = []
            for channel in range(group * share, (group + 1) * share):
                for tap in itertools.product(*(range(size) for size in layer.kernel_size)):
                    at = [
                        _taken_from(
                            place[axis] * layer.stride[axis] + tap[axis] * layer.dilation[axis] - before[axis],
                            x.shape[2 + axis],
                            layer.padding_mode,
                        )
                        for axis in axes
                    ]
                    window.append(0.0 if None in at else float(values[(sample, channel, *at)]))
            found.append(window)
    return torch.tensor(found, dtype=x.dtype).reshape(layer.groups, -1, len(found[0]))


# Bases ---------------------------------------------------------------------------------------------------------------


def leading_directions(r: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """By a full SVD of R, (in, n): vectors until the share of energy is reached, including the one that crosses it."""
    vectors, values, _ = torch.linalg.svd(r, full_matrices=True)
    total = float(values.square().sum())
    held, k = 0.0, 0
    while held < threshold * total:
        held += float(values[k]) ** 2
        k += 1
    return vectors[:, :k], values[:k]


def widest_angle(a: Tensor, b: Tensor) -> float:
    """Sine of the largest angle between the spans of two sets of orthonormal columns; 1 if their sizes differ."""
    if a.shape != b.shape:
        return 1.0
    return float(torch.linalg.matrix_norm(a - b @ (b.T @ a), 2)) if a.shape[1] else 0.0


# Replay --------------------------------------------------------------------------------------------------------------


class ListReservoir:
    """Algorithm R on a plain list, sample by sample."""

    def __init__(self, capacity: int, draws: random.Random, pushes: random.Random) -> None:
        self.capacity, self.draws, self.pushes = capacity, draws, pushes
        self.items: list[Any] = []
        self.seen = 0

    def push(self, item: Any) -> None:
        self.seen += 1
        if len(self.items) < self.capacity:
            self.items.append(item)
            return
        place = self.pushes.randrange(self.seen)
        if place < self.capacity:
            self.items[place] = item

    def draw(self, count: int) -> list[Any]:
        return [self.items[place] for place in self.draws.sample(range(len(self.items)), min(count, len(self.items)))]


# Losses --------------------------------------------------------------------------------------------------------------


def head_loss(logits: Tensor, labels: list[int], heads: list[range | None]) -> Tensor:
    """Mean over samples of −log softmax, each over the outputs of its own task's head."""
    total = logits.new_zeros(())
    for row, label, head in zip(logits, labels, heads, strict=True):
        start = 0 if head is None else head.start
        part = row if head is None else row[head.start : head.stop]
        total = total + torch.logsumexp(part, 0) - part[label - start]
    return total / len(labels)


def central_differences(function: Callable[[Tensor], float], at: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient of a function of a flat vector, one element at a time."""
    slopes = torch.zeros_like(at)
    for place in range(len(at)):
        moved = at.clone()
        moved[place] = at[place] + step
        above = function(moved)
        moved[place] = at[place] - step
        slopes[place] = (above - function(moved)) / (2 * step)
    return slopes


# Measures ------------------------------------------------------------------------------------------------------------


def measures(r: list[list[float]]) -> dict[str, float]:
    """ACC, BWT, forgetting and learning accuracy from the lower triangle of R, term by term."""
    last = len(r) - 1
    acc = learned = bwt = forgetting = 0.0
    for j in range(last + 1):
        acc += r[last][j] / (last + 1)
        learned += r[j][j] / (last + 1)
    for j in range(last):
        bwt += (r[last][j] - r[j][j]) / last
        best = r[j][j]
        for i in range(j, last):
            if r[i][j] > best:
                best = r[i][j]
        forgetting += (best - r[last][j]) / last
    return {"acc": acc, "bwt": bwt, "forgetting": forgetting, "learning_acc": learned}


def no_hooks(model: nn.Module) -> bool:
    """Whether no module of the model has a forward or backward hook."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any(getattr(module, kind) for module in model.modules() for kind in kinds)
