"""The gradients of many tasks at once, each of the mean loss on the task's own samples (for GEM and A-GEM).

There are two ways. For any model, one backward pass per task gives the rows of A. For a model whose weights all belong
to linear layers, one forward and backward pass over all samples gives every row as factors (`fast.factored_rows`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from steppe.fast.agreement import agree
from steppe.fast.factored import FactoredGrad, Gradient, ParamDict, to_dense
from steppe.fast.factored_rows import FactoredRows, block_products
from steppe.fast.linear_hooks import may_factor, record_linear_calls
from steppe.methods.parts.sgd import clip_by_norm
from steppe.network.network import Network
from steppe.tensors.batch import Batch, index_of

LinearLayers = dict[str, tuple[nn.Module, ...]]


class TaskGradients(Protocol):
    """The matrix A whose rows are the tasks' gradients, through its products."""

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
    """A as a matrix: the gradients of each weight, (tasks, *shape)."""

    parts: ParamDict

    def products(self, gradient: Gradient) -> Tensor:
        """A g, weight by weight."""
        sums = [_flat(rows) @ to_dense(gradient[name]).flatten() for name, rows in self.parts.items()]
        return torch.stack(sums).sum(0)

    def gram(self) -> Tensor:
        """A Aᵀ, weight by weight."""
        return torch.stack([_flat(rows) @ _flat(rows).T for rows in self.parts.values()]).sum(0)

    def combined(self, weights: Tensor) -> ParamDict:
        """Aᵀ v."""
        return {name: torch.tensordot(weights, rows, 1) for name, rows in self.parts.items()}


class PastTasks:
    """Samples of past tasks, and the gradients of these tasks at the network's current weights.

    The fast way is used if a trial here shows that it agrees with the slow one. It does not in a model whose samples
    affect each other (BatchNorm), with randomness (dropout), or with a weight that is used outside its layer.

    Args:
        network: The network.
        samples: Stored samples of each task.
        together: The result of an earlier trial for these samples.
    """

    def __init__(self, network: Network, samples: Sequence[Batch], *, together: bool | None = None) -> None:
        self._network = network
        self._union = network.prepare(Batch.union(samples)) if samples else None  # padded to one length
        self.samples = [] if self._union is None else _parts(self._union, [len(batch) for batch in samples])
        """The prepared samples of each task."""
        self._sample_kernel: Tensor | None = None
        self.linear: LinearLayers = self._find_linear(together)
        """The linear layer of each weight if gradients are computed together, else empty."""

    def __len__(self) -> int:
        return len(self.samples)

    def gradients(self, clip: float) -> TaskGradients:
        """Compute A. Running statistics do not change.

        Args:
            clip: The norm to which longer rows are scaled down; 0 means no clipping.

        Returns:
            A.
        """
        return self._together(self.linear).clipped(clip) if self.linear else self._one_by_one(clip)

    def draw(self, count: int, picker: random.Random) -> Batch:
        """Draw up to `count` distinct samples of all past tasks, uniformly."""
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
        slopes = torch.autograd.grad(loss, [made[0].output for made in calls.values()])
        parts: dict[str, FactoredGrad] = {}
        for (name, (call, *_)), slope in zip(calls.items(), slopes, strict=True):
            dtype = self._network.trainable[name].dtype  # also under autocast
            left = slope.reshape(tasks, -1, slope.shape[-1]).to(dtype)
            right = call.input.reshape(tasks, -1, call.input.shape[-1]).to(dtype)
            parts[name] = FactoredGrad(left, right)
            if (bias := _bias_of(name)) in self._network.trainable:
                parts[bias] = FactoredGrad(left, torch.ones_like(right[..., :1]))
        gram = torch.stack([block_products(rows, self._kernel(rows.right)) for rows in parts.values()]).sum(0)
        shapes = {name: self._network.trainable[name].shape for name in parts}
        return FactoredRows(parts, shapes, gram, torch.ones_like(gram[0]))

    def _kernel(self, x: Tensor) -> Tensor | None:
        """XXᵀ if X is the samples themselves, which stay the same throughout a task."""
        assert self._union is not None
        if not isinstance(self._union.x, Tensor):
            return None
        rows, samples = x.flatten(0, 1), self._union.x.flatten(1)
        if rows.data_ptr() != samples.data_ptr() or rows.shape != samples.shape:
            return None
        if self._sample_kernel is None:
            self._sample_kernel = samples @ samples.T
        return self._sample_kernel

    def _find_linear(self, together: bool | None) -> LinearLayers:
        """The linear layers by their weights' names if gradients can be computed together, else nothing."""
        model, parameters = self._network.model, self._network.trainable
        if len({len(batch) for batch in self.samples}) != 1 or next(model.buffers(), None) is not None:
            return {}
        if not self._network.output_loss.is_cross_entropy:  # others may not be means over the samples
            return {}
        linear: LinearLayers = {
            f"{path}.weight".removeprefix("."): (module,)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        if not linear.keys() <= parameters.keys() <= linear.keys() | {_bias_of(name) for name in linear}:
            return {}
        if not all(may_factor(layer) for (layer,) in linear.values()):
            return {}
        return linear if (self._ways_agree(linear) if together is None else together) else {}

    def _ways_agree(self, linear: LinearLayers) -> bool:
        try:
            fast = self._together(linear)
        except (RuntimeError, IndexError):  # a layer is not used, or not once per sample
            return False
        counts = [rows.left.shape[0] * rows.left.shape[1] for rows in fast.parts.values()]
        if not all(count and count % sum(map(len, self.samples)) == 0 for count in counts):
            return False  # a model that routes samples to different layers may route them differently later
        return all(
            agree((fast.parts[name].left.mT @ fast.parts[name].right).reshape(rows.shape), rows)
            for name, rows in self._one_by_one(0).parts.items()
        )


def _parts(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch split into parts of these sizes."""
    ends = list(accumulate(sizes, initial=0))
    return [batch[start:end] for start, end in pairwise(ends)]


def _flat(rows: Tensor) -> Tensor:
    """One row per task, also for a weight that is a single number."""
    return rows.reshape(len(rows), -1)


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
