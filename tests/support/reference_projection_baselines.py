"""Slow, obvious references for GPM, SGP, La-MAML and iCaRL: loops, dense matrices, flat vectors, all in float64.

Transcribed from the methods' descriptions, not from the library.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from reference import ListReservoir, Sample
from reference_baselines import Flat
from reference_update import Problem
from torch import Tensor, nn

# Growing bases -------------------------------------------------------------------------------------------------------


def gpm_basis(r: Tensor, old: Tensor, threshold: float, first: bool) -> tuple[Tensor, Tensor]:
    """GPM's rule with full SVDs, R (in, n) and the old basis (in, k); the new directions and their singular values."""
    total = float((r**2).sum())
    missed = r - old @ old.T @ r
    vectors, values, _ = torch.linalg.svd(missed, full_matrices=False)
    held = (total - float((missed**2).sum())) / total
    count = 0
    for value in values.tolist():
        share = value**2 / total
        if first and held + share >= threshold:
            break
        if not first and held >= threshold:
            break
        held += share
        count += 1
    count = min(count, len(r) - old.shape[1])
    return vectors[:, :count], values[:count]


def sgp_importances(r: Tensor, old: Tensor, before: list[float], new: Tensor, alpha: float) -> list[float]:
    """λ of old and new directions after a task: old ones by surrogate singular values from the SVD of M Mᵀ R."""
    strengths = []
    if old.shape[1]:
        u, s, _ = torch.linalg.svd(old @ old.T @ r, full_matrices=False)
        for m in old.T:
            strengths.append(math.sqrt(sum(float(m @ u[:, j]) ** 2 * float(s[j]) ** 2 for j in range(len(s)))))
    strengths += new.tolist()
    top = max(strengths, default=0.0)
    fresh = [(alpha + 1) * s / (alpha * s + top) for s in strengths]
    return [min(1.0, b + f) for b, f in zip(before, fresh, strict=False)] + fresh[len(before) :]


class FlatGPM(Flat):
    """GPM and SGP (where `alpha` is given), with dense projection matrices."""

    def __init__(self, s: Any, problem: Problem, model: nn.Module, seeds: Callable[[str], int]) -> None:
        super().__init__(s, problem, model, seeds)
        self.vectors: dict[str, list[Tensor]] = {}
        self.importance: dict[str, list[list[float]]] = {}
        self.tasks_done = 0
        self.pickers = random.Random(seeds("basis draws")), random.Random(seeds("basis pushes"))
        self.samples = ListReservoir(s.basis_samples, *self.pickers)
        numbers = [float(part) for part in s.thresholds.split(",")]
        self.thresholds = dict(zip(problem.covered, numbers * len(problem.covered), strict=False))

    def begin_task(self) -> None:
        super().begin_task()
        self.samples = ListReservoir(self.s.basis_samples, *self.pickers)

    def observe(self, samples: list[Sample]) -> float:
        loss, g = self.slope(lambda w: self.loss(w, samples))
        self.descend(self.outside() @ self.clipped(g))
        return loss

    def outside(self) -> Tensor:
        blocks = []
        for key, shape in self.shapes.items():
            if key not in self.vectors:
                blocks.append(torch.eye(shape.numel(), dtype=torch.float64))
                continue
            groups = len(self.vectors[key])
            for u, weights in zip(self.vectors[key], self.importance[key], strict=True):
                p = torch.eye(len(u), dtype=torch.float64)
                for vector, weight in zip(u.T, weights, strict=True):
                    p = p - weight * torch.outer(vector, vector)
                blocks.append(torch.kron(torch.eye(shape[0] // groups, dtype=torch.float64), p))
        return torch.block_diag(*blocks)

    def after_batch(self, samples: list[Sample]) -> None:
        for sample in samples:
            self.samples.push(sample)

    def end_task(self) -> None:
        x = torch.stack([sample[0] for sample in self.samples.items])
        _, columns = self.problem.forward(self.model, self.parts(self.w), x, True)
        for key, groups in self.problem.covered.items():
            empty = torch.zeros(columns[key].shape[2], 0, dtype=torch.float64)
            olds = self.vectors.get(key, [empty] * groups)
            before = self.importance.get(key, [[]] * groups)
            threshold = self.thresholds[key] + self.tasks_done * self.s.threshold_step
            self.vectors[key], self.importance[key] = [], []
            for rows, old, was in zip(columns[key], olds, before, strict=True):
                new, values = gpm_basis(rows.T, old, threshold, self.tasks_done == 0)
                self.vectors[key].append(torch.cat([old, new], dim=1))
                if hasattr(self.s, "alpha"):
                    self.importance[key].append(sgp_importances(rows.T, old, was, values, self.s.alpha))
                else:
                    self.importance[key].append([1.0] * (old.shape[1] + new.shape[1]))
        self.tasks_done += 1


# La-MAML -------------------------------------------------------------------------------------------------------------


def meta_loss(
    loss: Callable[[Tensor, list[Any]], Tensor],
    theta: Tensor,
    alpha: Tensor,
    slices: list[list[Any]],
    union: list[Any],
    *,
    relu: bool,
    clamp: float,
    constants: list[Tensor] | None = None,
) -> Tensor:
    """(1/K) Σ_k L(Q; θ_k), unrolled. `constants` replaces the inner gradients."""
    rate = alpha.clamp(min=0) if relu else alpha
    total = torch.zeros((), dtype=torch.float64)
    moved = theta
    for k, part in enumerate(slices):
        g = constants[k] if constants is not None else inner_gradient(loss, moved, part, clamp)
        moved = moved - rate * g
        total = total + loss(moved, union)
    return total / len(slices)


def inner_gradient(loss: Callable[[Tensor, list[Any]], Tensor], at: Tensor, part: list[Any], clamp: float) -> Tensor:
    """∇L(B; at), clamped elementwise, differentiable in `at`."""
    at = at if at.requires_grad else at.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(at, part), at, create_graph=True)
    return g.clamp(-clamp, clamp) if clamp else g


def inner_gradients(
    loss: Callable[[Tensor, list[Any]], Tensor],
    theta: Tensor,
    alpha: Tensor,
    slices: list[list[Any]],
    relu: bool,
    clamp: float,
) -> list[Tensor]:
    """g_1 … g_K as numbers."""
    rate = alpha.clamp(min=0) if relu else alpha
    found, moved = [], theta.detach()
    for part in slices:
        found.append(inner_gradient(loss, moved, part, clamp).detach())
        moved = moved - rate.detach() * found[-1]
    return found


# iCaRL ---------------------------------------------------------------------------------------------------------------


def herding(features: Tensor, count: int) -> list[int]:
    """Greedy selection by trying every sample at every step."""
    rows = [[float(v) for v in row] for row in features]
    width = len(rows[0])
    mean = [sum(row[d] for row in rows) / len(rows) for d in range(width)]
    chosen: list[int] = []
    for size in range(1, min(count, len(rows)) + 1):
        best, shortest = -1, math.inf
        for candidate in range(len(rows)):
            if candidate in chosen:
                continue
            picked = [*chosen, candidate]
            gap = math.sqrt(sum((mean[d] - sum(rows[i][d] for i in picked) / size) ** 2 for d in range(width)))
            if gap < shortest:
                best, shortest = candidate, gap
        chosen.append(best)
    return chosen


def icarl_loss(
    current: Tensor, labels: list[int], head: range, old: list[tuple[Tensor, Tensor, range]], gamma: float
) -> Tensor:
    """CE on the head's slice plus γ times every old exemplar's KL(p* ‖ p) on its own head, over that head's classes.

    `old` holds (logits now, stored logits, head) per exemplar.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for row, label in zip(current, labels, strict=True):
        part = row[head.start : head.stop]
        loss = loss - torch.log(torch.exp(part[label - head.start]) / torch.exp(part).sum()) / len(labels)
    for now, stored, rows in old:
        q = torch.exp(now[rows.start : rows.stop]) / torch.exp(now[rows.start : rows.stop]).sum()
        p = torch.exp(stored[rows.start : rows.stop]) / torch.exp(stored[rows.start : rows.stop]).sum()
        for k in range(len(rows)):
            loss = loss + gamma / len(rows) * p[k] * torch.log(p[k] / q[k])
    return loss


def nearest_mean(z: Tensor, exemplars: dict[int, Tensor], head: range) -> list[int]:
    """For every row of z, the class of the head whose exemplars' mean logits are nearest."""
    found = []
    for row in z:
        gaps = {
            label: math.dist(row.tolist(), exemplars[label].mean(0).tolist()) for label in head if label in exemplars
        }
        found.append(min(gaps, key=lambda label: gaps[label]))
    return found


# Shared by the tests of these methods -------------------------------------------------------------------------------


def flattened(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts.values()])
