"""Algorithm 1 on one flat weight vector with dense projectors, and two small networks written as functions.

Transcribed from the method's description, not from the library: a gradient is one autograd call on the flat vector, and
`project_onto` and `project_out` are square matrices over all weights.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import ListReservoir, Sample, head_loss, leading_directions, windows
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from steppe.projection.layers import ProjectedWeight, linear_inputs, projected_weights
from steppe.tensors.batch import Batch

Weights = dict[str, Tensor]
Columns = dict[str, Tensor]  # per covered weight, its layer's input vectors, (groups, n, in)


@dataclass(frozen=True)
class Problem:
    """A small network twice: as modules, and as a function of its weights that also returns the layers' inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    heads: tuple[range | None, ...]  # of each task
    covered: dict[str, int]  # weight -> groups
    forward: Callable[[nn.Module, Weights, Tensor, bool], tuple[Tensor, Columns]]


def _mlp(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Columns]]:
    def forward(model: nn.Module, w: Weights, x: Tensor, wanted: bool) -> tuple[Tensor, Columns]:
        first = activation(x @ w["0.weight"].T + w["0.bias"])
        second = activation(first @ w["2.weight"].T)
        return second @ w["4.weight"].T, {"0.weight": x[None], "2.weight": first[None], "4.weight": second[None]}

    return forward


def _conv(model: Any, w: Weights, x: Tensor, wanted: bool) -> tuple[Tensor, Columns]:
    first = relu(conv2d(x, w["0.weight"], stride=2, padding=1))
    second = relu(conv2d(first, w["2.weight"], w["2.bias"], groups=2))
    third = relu(second.flatten(1) @ w["5.weight"].T)
    columns: Columns = {}
    if wanted:
        columns = {"0.weight": windows(model[0], x), "2.weight": windows(model[2], first)}
        columns["5.weight"] = second.flatten(1)[None]
    return third @ w["7.weight"].T + w["7.bias"], columns


def _mlp_modules(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(6, 12), kind(), nn.Linear(12, 10, bias=False), kind(), nn.Linear(10, 4, bias=False)
    ).double()


def _conv_modules() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 10, bias=False),
        nn.ReLU(inplace=True),
        nn.Linear(10, 6),
    ).double()


_MLP_COVERED = {"0.weight": 1, "2.weight": 1, "4.weight": 1}
PROBLEMS = {
    "mlp": Problem(_mlp_modules(nn.ReLU), (6,), (None, None, None), _MLP_COVERED, _mlp(relu)),
    "smooth": Problem(_mlp_modules(nn.Tanh), (6,), (None, None, None), _MLP_COVERED, _mlp(torch.tanh)),
    "conv": Problem(  # its head is not covered: each task has its own outputs
        _conv_modules,
        (2, 5, 5),
        (range(0, 2), range(2, 4), range(4, 6)),
        {"0.weight": 1, "2.weight": 2, "5.weight": 1},
        _conv,
    ),
}


@dataclass
class Bases:
    """Per covered weight and group: basis vectors (in, k) and importances (k)."""

    vectors: dict[str, list[Tensor]] = field(default_factory=dict)
    importance: dict[str, list[Tensor]] = field(default_factory=dict)


class FlatUpdate:
    """The family's update on a flat vector. `s` holds the settings; the name determines the member."""

    def __init__(self, name: str, s: Any, problem: Problem, model: nn.Module, seeds: Callable[[str], int]) -> None:
        self.name, self.s, self.problem, self.model = name, s, problem, model
        self.shapes = {key: p.shape for key, p in model.named_parameters()}
        self.w = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.velocity = torch.zeros_like(self.w)
        self.bases = Bases()
        self.tasks_done = 0
        self.average = self.w
        self.all_inputs: list[Tensor] = []  # every training sample of all tasks, once each
        self.replays = name != "finetune"
        capacity = s.buffer if self.replays else 1
        self.buffer = ListReservoir(
            capacity, random.Random(seeds("replay draws")), random.Random(seeds("replay pushes"))
        )
        self.projects = name not in ("er", "fs-er", "finetune")
        self.sign = -1.0 if name == "la-dgpm" else 1.0
        self.rule = {"fs-gpm": "ones", "fs-sgpm": "spectral", "fs-rgpm": "ridge"}.get(name, "sigmoid")

    def parts(self, flat: Tensor) -> Weights:
        found, at = {}, 0
        for key, shape in self.shapes.items():
            found[key] = flat[at : at + shape.numel()].reshape(shape)
            at += shape.numel()
        return found

    def loss(self, flat: Tensor, samples: list[Sample]) -> Tensor:
        x = torch.stack([sample[0] for sample in samples])
        logits, _ = self.problem.forward(self.model, self.parts(flat), x, False)
        return head_loss(logits, [s[1] for s in samples], [self.problem.heads[s[2]] for s in samples])

    def union_loss(self, flat: Tensor, current: list[Sample], union: list[Sample]) -> Tensor:
        """2 / |D ∪ N| · (Σ_D weight · loss + Σ_N weight · loss), sample by sample."""
        weights = getattr(self.s, "current_weight", 0.5), getattr(self.s, "replay_weight", 0.5)
        x = torch.stack([sample[0] for sample in union])  # together, for models that normalize by the batch
        logits, _ = self.problem.forward(self.model, self.parts(flat), x, False)
        total = flat.new_zeros(())
        for place, (row, sample) in enumerate(zip(logits, union, strict=True)):
            loss = head_loss(row.unsqueeze(0), [sample[1]], [self.problem.heads[sample[2]]])
            total = total + weights[place >= len(current)] * loss
        return 2 * total / len(union)

    def gradient(self, flat: Tensor, samples: list[Sample]) -> Tensor:
        flat = flat.detach().requires_grad_()
        return torch.autograd.grad(self.loss(flat, samples), flat)[0]

    def union_gradient(self, flat: Tensor, current: list[Sample], union: list[Sample]) -> Tensor:
        flat = flat.detach().requires_grad_()
        return torch.autograd.grad(self.union_loss(flat, current, union), flat)[0]

    def matrix(self, importance: dict[str, list[Tensor]], outside: bool) -> Tensor:
        """`project_onto` or `project_out` as one matrix over all weights; the identity for weights without a basis."""
        blocks = []
        for key, shape in self.shapes.items():
            if key not in importance:
                blocks.append(torch.eye(shape.numel(), dtype=torch.float64))
                continue
            groups = len(importance[key])
            for u, weights in zip(self.bases.vectors[key], importance[key], strict=True):
                p = u @ torch.diag(weights) @ u.T
                p = torch.eye(len(p), dtype=torch.float64) - p if outside else p
                blocks.append(torch.kron(torch.eye(shape[0] // groups, dtype=torch.float64), p))
        return torch.block_diag(*blocks)

    def schedule(self, samples: list[Sample]) -> list[list[Sample]]:
        steps = self.s.ascent_steps
        if getattr(self.s, "ascent_form", "whole") == "whole":
            return [samples] * steps
        size = -(-len(samples) // steps)
        return [samples[at : at + size] for at in range(0, len(samples), size)]

    def perturbed_loss(self, w: Tensor, importance: Any, current: list[Sample], union: list[Sample]) -> Tensor:
        """L_{D∪N}(w + v), or the mean of its values after each chunk, differentiable in w and λ throughout."""
        v, losses = torch.zeros_like(w), []
        within = self.matrix(importance, outside=False)
        clamp = getattr(self.s, "ascent_clamp", 2.0)
        for part in self.schedule(current):
            moved = w + v
            (g,) = torch.autograd.grad(self.loss(moved, part), moved, create_graph=True)
            v = v + self.sign * self.s.ascent_lr * (within @ g).clamp(-clamp, clamp)
            losses.append(self.union_loss(w + v, current, union))
        chunked = getattr(self.s, "ascent_form", "whole") == "chunked"
        return torch.stack(losses).mean() if chunked else losses[-1]

    def first_order(self, current: list[Sample], union: list[Sample]) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        """The same with every ascent gradient constant: loss, gradient, and η1 Σ_rows (Σ_k G_k u)(G_{D∪N} u)."""
        v, walked = torch.zeros_like(self.w), torch.zeros_like(self.w)
        within = self.matrix(self.bases.importance, outside=False)
        clamp = getattr(self.s, "ascent_clamp", 2.0)
        parts = self.schedule(current)
        chunked = getattr(self.s, "ascent_form", "whole") == "chunked"
        found = []
        for place, part in enumerate(parts):
            g = self.gradient(self.w + v, part)
            v = v + self.sign * self.s.ascent_lr * (within @ g).clamp(-clamp, clamp)
            walked = walked + g
            if chunked or place == len(parts) - 1:
                final = self.union_gradient(self.w + v, current, union)
                found.append((self.union_loss(self.w + v, current, union), final, self.alignment(walked, final)))
        slopes = {
            key: [sum(f[2][key][group] for f in found) / len(found) for group in range(len(found[0][2][key]))]
            for key in self.bases.vectors
        }
        return sum(f[0] for f in found) / len(found), sum(f[1] for f in found) / len(found), slopes

    def alignment(self, walked: Tensor, final: Tensor) -> dict[str, list[Tensor]]:
        slopes: dict[str, list[Tensor]] = {}
        one, other = self.parts(walked), self.parts(final)
        for key, bases in self.bases.vectors.items():
            share = self.shapes[key][0] // len(bases)
            slopes[key] = []
            for group, vectors in enumerate(bases):
                rows = slice(group * share, (group + 1) * share)
                a, b = one[key][rows].flatten(1), other[key][rows].flatten(1)
                values = [self.sign * self.s.ascent_lr * ((a @ u) * (b @ u)).sum() for u in vectors.T]
                slopes[key].append(torch.stack(values) if values else torch.zeros(0, dtype=torch.float64))
        return slopes

    def second_order(
        self, current: list[Sample], union: list[Sample]
    ) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        w = self.w.clone().requires_grad_()
        leaves = {key: [x.clone().requires_grad_() for x in xs] for key, xs in self.bases.importance.items()}
        flat = [x for xs in leaves.values() for x in xs]
        loss = self.perturbed_loss(w, leaves, current, union)
        gradient, *slopes = torch.autograd.grad(loss, [w, *flat], materialize_grads=True)
        rest = iter(slopes)
        return loss, gradient, {key: [next(rest) for _ in xs] for key, xs in leaves.items()}

    def observe(self, current: list[Sample]) -> float:
        """Steps 1 to 3 of Algorithm 1."""
        union = current + (self.buffer.draw(len(current)) if self.replays else [])
        perturb = self.second_order if getattr(self.s, "second_order", False) else self.first_order
        loss, gradient = self.union_loss(self.w, current, union), self.union_gradient(self.w, current, union)
        slopes: dict[str, list[Tensor]] = {}
        if self.name == "dgpm":
            slopes = perturb(current, union)[2]
        elif self.name == "fs-er":
            loss, gradient, _ = perturb(union, union)
        elif self.projects:
            loss, gradient, slopes = perturb(current, union)
        if self.s.clip:
            gradient = gradient * min(1.0, self.s.clip / (float(gradient.norm()) + 1e-6))
        if self.rule == "sigmoid" and self.bases.vectors and self.projects:
            self.move_importances(slopes)
        step = self.matrix(self.bases.importance, outside=True) @ gradient
        self.velocity = self.s.momentum * self.velocity + step
        self.w = (self.w - self.s.lr * self.velocity).detach()
        decay = getattr(self.s, "average", 0.0)
        self.average = decay * self.average + (1 - decay) * self.w
        return float(loss.detach())

    def move_importances(self, slopes: dict[str, list[Tensor]]) -> None:
        norm = float(torch.cat([x for xs in slopes.values() for x in xs]).norm())
        step = self.sign * self.s.importance_lr * min(1.0, 2.0 / (norm + 1e-6))
        for key, values in self.bases.importance.items():
            moved = [x - step * g for x, g in zip(values, slopes[key], strict=True)]
            self.bases.importance[key] = [torch.sigmoid(self.s.temperature * x) for x in moved]

    def begin_task(self) -> None:
        self.velocity = torch.zeros_like(self.w)

    def after_batch(self, samples: list[Sample]) -> None:
        for sample in samples:
            self.buffer.push(sample)
            self.all_inputs.append(sample[0])

    def end_task(self) -> None:
        """UpdateGPM: full SVDs of the layers' inputs on samples of the buffer."""
        if not self.projects:
            return
        x = torch.stack([sample[0] for sample in self.buffer.draw(self.s.basis_samples)])
        threshold = min(self.s.threshold + self.tasks_done * self.s.threshold_step, 1 - 1e-11)
        self.tasks_done += 1
        self.bases = Bases()
        _, columns = self.problem.forward(self.model, self.parts(self.w), x, True)
        if getattr(self.s, "first_inputs", "buffer") == "all":
            _, whole = self.problem.forward(self.model, self.parts(self.w), torch.stack(self.all_inputs), True)
            columns["0.weight"] = whole["0.weight"]
        for key in self.problem.covered:
            if self.rule == "ridge":
                a = self.s.ridge_first if key == "0.weight" else self.s.ridge
                self.bases.vectors[key], self.bases.importance[key] = map(
                    list, zip(*(ridge_directions(group, a) for group in columns[key]), strict=True)
                )
                continue
            kept = [leading_directions(group.T, threshold) for group in columns[key]]
            self.bases.vectors[key] = [vectors for vectors, _ in kept]
            self.bases.importance[key] = [self.initial(values) for _, values in kept]

    def initial(self, values: Tensor) -> Tensor:
        if self.rule != "spectral":
            return torch.ones_like(values)
        top, alpha = max(values.tolist()), self.s.alpha
        return torch.tensor([(alpha + 1) * v / (alpha * v + top) for v in values.tolist()], dtype=values.dtype)


def ridge_directions(columns: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """All eigenvectors of Σ x xᵀ, and r (1 + a) / (r + a) with r the shares of the largest eigenvalue."""
    gram = torch.zeros(columns.shape[1], columns.shape[1], dtype=columns.dtype)
    for x in columns:
        gram += torch.outer(x, x)
    energy, vectors = torch.linalg.eigh(gram)
    shares = [max(float(e), 0.0) / float(energy.max()) for e in energy]
    return vectors, torch.tensor([r * (1 + a) / (r + a) for r in shares], dtype=columns.dtype)


def drawn(problem: Problem, task: int, count: int) -> Batch:
    """Random samples of a task, with labels within its head."""
    head = problem.heads[task]
    x = torch.randn(count, *problem.shape, dtype=torch.float64) + 0.3 * task
    y = torch.randint(0, 4, (count,)) if head is None else torch.randint(head.start, head.stop, (count,))
    return Batch(x, y, torch.full((count,), task))


def listed(batch: Batch) -> list[Sample]:
    return [(x, int(y), int(t)) for x, y, t in zip(batch.x, batch.y, batch.task, strict=True)]


def coverage(problem: Problem, model: nn.Module, factored: bool = True) -> dict[str, ProjectedWeight]:
    """The weights that the problem covers; linear layers' gradients may come as factors, as in the library, or not."""
    return {
        key: dataclasses.replace(weight, factorable=factored and weight.rule is linear_inputs)
        for key, weight in projected_weights(model).items()
        if key in problem.covered
    }
