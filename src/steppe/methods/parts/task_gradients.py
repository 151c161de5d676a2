"""The gradients of many tasks at once, each of the mean loss on the task's own samples (for GEM and A-GEM).

Two ways to the same numbers. One by one, for any model: a backward per task, the rows of A written out. Together, for
a model whose weights all belong to linear layers: one forward and backward over all samples, and each row of A is kept
as factors, g_τ = δ_τᵀX_τ for every layer, so that ⟨g_τ, g_σ⟩ = Σ (δ_τδ_σᵀ) ∘ (X_τX_σᵀ) never needs g_τ itself.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from steppe.methods.parts.sgd import clip_by_norm
from steppe.network.linear_hooks import is_plain, record_linear_calls
from steppe.network.network import Network
from steppe.tensors.batch import Batch, index_of
from steppe.tensors.factored import FactoredGrad, Gradient, ParamDict, to_dense

LinearLayers = dict[str, tuple[nn.Module, ...]]


class TaskGradients(Protocol):
    """The matrix A whose rows are the tasks' gradients, as far as it is asked for."""

    def products(self, gradient: Gradient) -> Tensor:
        """A g, (tasks)."""
        ...

    def gram(self) -> Tensor:
        """A Aᵀ, (tasks, tasks)."""
        ...

    def combined(self, weights: Tensor) -> ParamDict:
        """Aᵀ v."""
        ...


@dataclass(frozen=True)
class Rows:
    """A written out: for each weight its gradients, (tasks, *shape)."""

    parts: ParamDict

    def products(self, gradient: Gradient) -> Tensor:
        """A g, weight by weight."""
        found = [_flat(rows) @ to_dense(gradient[name]).flatten() for name, rows in self.parts.items()]
        return torch.stack(found).sum(0)

    def gram(self) -> Tensor:
        """A Aᵀ, weight by weight."""
        return torch.stack([_flat(rows) @ _flat(rows).T for rows in self.parts.values()]).sum(0)

    def combined(self, weights: Tensor) -> ParamDict:
        """Aᵀ v."""
        return {name: torch.tensordot(weights, rows, 1) for name, rows in self.parts.items()}


@dataclass(frozen=True)
class FactoredRows:
    """A as factors: for each weight δ, (tasks, n, out), and X, (tasks, n, in), the gradients being scale_τ · δ_τᵀX_τ.

    A bias is a weight whose inputs are all 1. `unscaled_gram` is A Aᵀ with all scales 1.
    """

    parts: dict[str, FactoredGrad]
    shapes: dict[str, torch.Size]
    unscaled_gram: Tensor
    scale: Tensor

    def clipped(self, norm: float) -> FactoredRows:
        """Each row shortened to the norm where it is longer; 0 means no clipping."""
        if norm == 0:
            return self
        lengths = self.unscaled_gram.diagonal().clamp(min=0).sqrt()
        return dataclasses.replace(self, scale=(norm / (lengths + 1e-6)).clamp(max=1.0))

    def products(self, gradient: Gradient) -> Tensor:
        """A g; cheapest where g comes as factors too."""
        found = []
        for name, rows in self.parts.items():
            g = gradient[name]
            if isinstance(g, FactoredGrad):
                along = (rows.left @ g.left.T) * (rows.right @ g.right.T)
            else:
                along = (rows.left @ g.reshape(len(g), -1)) * rows.right
            found.append(along.sum((1, 2)))
        return self.scale * torch.stack(found).sum(0)

    def gram(self) -> Tensor:
        """A Aᵀ."""
        return self.scale.unsqueeze(1) * self.unscaled_gram * self.scale

    def combined(self, weights: Tensor) -> ParamDict:
        """Aᵀ v."""
        v = (weights * self.scale).view(-1, 1, 1)
        return {
            name: ((rows.left * v).flatten(0, 1).T @ rows.right.flatten(0, 1)).reshape(self.shapes[name])
            for name, rows in self.parts.items()
        }


def block_products(rows: FactoredGrad, kernel: Tensor | None = None) -> Tensor:
    """⟨δ_τᵀX_τ, δ_σᵀX_σ⟩ for all pairs of tasks, (tasks, tasks); XXᵀ over all samples may be given."""
    tasks, count, outputs = rows.left.shape
    total, inputs = tasks * count, rows.right.shape[-1]
    if kernel is None and total**2 * (outputs + inputs) > 4 * (total + tasks**2) * outputs * inputs:
        g = (rows.left.mT @ rows.right).flatten(1)  # so many samples that the gradients themselves are clearly cheaper
        return g @ g.T
    left, right = rows.left.flatten(0, 1), rows.right.flatten(0, 1)
    pairs = (left @ left.T) * (right @ right.T if kernel is None else kernel)
    return pairs.view(tasks, count, tasks, count).sum((1, 3))


class PastTasks:
    """Samples of past tasks as the model takes them, and the tasks' gradients on them wherever the weights stand.

    The fast way is taken if, tried here once, it gives what the slow one gives: in a model whose samples affect each
    other (BatchNorm), or with randomness (dropout), or with a weight used outside its layer, it does not. `together`
    says what was found when it was tried before.
    """

    def __init__(self, network: Network, samples: Sequence[Batch], *, together: bool | None = None) -> None:
        self._network = network
        self.samples = [network.prepare(batch) for batch in samples]
        """What is held of each task, prepared."""
        self._union = Batch.union(self.samples) if samples else None
        self._sample_kernel: Tensor | None = None
        self.linear: LinearLayers = self._factorable(together)
        """The weights of linear layers, each with its layer, if gradients are taken together; else empty."""

    def __len__(self) -> int:
        return len(self.samples)

    def gradients(self, clip: float) -> TaskGradients:
        """The rows of A at the present weights, each shortened to the norm `clip` where it is longer (0: never).

        Running statistics stay as they are.
        """
        return self._together(self.linear).clipped(clip) if self.linear else self._one_by_one(clip)

    def draw(self, count: int, picker: random.Random) -> Batch:
        """Up to `count` distinct samples of all past tasks, uniformly."""
        assert self._union is not None
        total = len(self._union)
        return self._union[index_of(picker.sample(range(total), min(count, total)), self._union.y.device)]

    def _one_by_one(self, clip: float) -> Rows:
        parameters = self._network.trainable
        rows = {name: p.new_empty((len(self), *p.shape)) for name, p in parameters.items()}
        for task, batch in enumerate(self.samples):
            _, gradient = self._network.loss_and_grad(batch, statistics=False)
            for name, g in clip_by_norm(gradient, clip).items():
                rows[name][task] = to_dense(g)
        return Rows(rows)

    def _together(self, linear: LinearLayers) -> FactoredRows:
        assert self._union is not None
        tasks = len(self)
        with record_linear_calls(linear) as calls:
            loss = self._network.loss(self._union) * tasks  # the sum of the tasks' mean losses
        slopes = torch.autograd.grad(loss, [seen[0].output for seen in calls.values()])
        parts: dict[str, FactoredGrad] = {}
        for (name, (call, *_)), slope in zip(calls.items(), slopes, strict=True):
            dtype = self._network.trainable[name].dtype  # whatever the precision of the moment
            left = slope.reshape(tasks, -1, slope.shape[-1]).to(dtype)
            right = call.input.reshape(tasks, -1, call.input.shape[-1]).to(dtype)
            parts[name] = FactoredGrad(left, right)
            if (bias := _bias_of(name)) in self._network.trainable:
                parts[bias] = FactoredGrad(left, torch.ones_like(right[..., :1]))
        gram = torch.stack([block_products(rows, self._kernel(rows.right)) for rows in parts.values()]).sum(0)
        shapes = {name: self._network.trainable[name].shape for name in parts}
        return FactoredRows(parts, shapes, gram, torch.ones_like(gram[0]))

    def _kernel(self, x: Tensor) -> Tensor | None:
        """XXᵀ where X is the samples themselves: they stay the same for the length of a task."""
        assert self._union is not None
        rows, samples = x.flatten(0, 1), self._union.x.flatten(1)
        if rows.data_ptr() != samples.data_ptr() or rows.shape != samples.shape:
            return None
        if self._sample_kernel is None:
            self._sample_kernel = samples @ samples.T
        return self._sample_kernel

    def _factorable(self, together: bool | None) -> LinearLayers:
        """The linear layers by their weights' names, if gradients can be taken together; else nothing."""
        model, parameters = self._network.model, self._network.trainable
        if len({len(batch) for batch in self.samples}) != 1 or next(model.buffers(), None) is not None:
            return {}
        linear: LinearLayers = {
            f"{path}.weight".removeprefix("."): (module,)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        if not linear.keys() <= parameters.keys() <= linear.keys() | {_bias_of(name) for name in linear}:
            return {}
        if not all(is_plain(layer) for (layer,) in linear.values()):
            return {}  # what it does when it is tried says little about other times
        return linear if (self._ways_agree(linear) if together is None else together) else {}

    def _ways_agree(self, linear: LinearLayers) -> bool:
        try:
            fast = self._together(linear)
        except (RuntimeError, IndexError):  # a layer that is not used, or not once per sample
            return False
        seen = [rows.left.shape[0] * rows.left.shape[1] for rows in fast.parts.values()]
        if not all(count and count % sum(map(len, self.samples)) == 0 for count in seen):
            return False  # a model that sends samples to different layers may send others elsewhere when it has learnt
        tolerance = math.sqrt(torch.finfo(self._network.dtype).eps)
        for name, rows in self._one_by_one(0).parts.items():
            difference = (fast.parts[name].left.mT @ fast.parts[name].right).reshape(rows.shape) - rows
            if not difference.norm() <= tolerance * rows.norm():
                return False
        return True


def _flat(rows: Tensor) -> Tensor:
    """One row of numbers for each task, also of a weight that is a single number."""
    return rows.reshape(len(rows), -1)


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
