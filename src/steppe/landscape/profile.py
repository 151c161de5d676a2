"""Losses of a task's samples at w + α d: along one direction a profile, over two of them a surface.

The model's own weights and buffers are never moved. A chain of linear layers is evaluated layer by layer, samples as
columns: its first layer is linear in α, (W + αD) X = WX + α DX, so two products serve every α, and they are most of the
arithmetic. Any other model is called once for each point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from steppe.errors import DivergedError
from steppe.network.eval_batches import eval_batch_size
from steppe.network.linear_chain import LinearChain
from steppe.network.network import Network
from steppe.runtime.contexts import flush_denormals
from steppe.tensors.batch import Batch
from steppe.tensors.factored import ParamDict
from steppe.tensors.matmul import product

CHUNK = 1024
"""Samples at a time: enough to fill a matrix product, few enough to stay in a core's cache."""
_VALUES = 2**19  # of inputs at a time, where the model is called: images are as many times as large inside it

Measure = Callable[[Tensor, Tensor], Tensor]
"""From logits, (classes, n), and labels, (n,), one value for each sample."""
Points = Sequence[Sequence[float]]
"""Places around w, each by how far it lies along every direction."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    return -torch.log_softmax(logits, 0).gather(0, labels.unsqueeze(0)).squeeze(0)


def zero_one(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for each sample whose label is not the first of its highest outputs, as prediction takes it, or which has an
    output that is not a number; 0 for the rest.
    """
    highest, predicted = logits.max(0)
    return ((predicted != labels) | highest.isnan()).to(logits.dtype)


def in_parts(batch: Batch, network: Network) -> list[Batch]:
    """Prepared samples in parts for which a call of the model is quickest."""
    size = eval_batch_size(network.model, len(batch), max(1, min(CHUNK, _VALUES // max(1, batch.x[0].numel()))))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


class LossProbe:
    """Mean losses on prepared samples wherever the weights stand around the network's own.

    To be made and asked in eval mode, `network.mode(training=False)`. `quick=False` calls the model even where it is
    a chain.
    """

    def __init__(self, network: Network, batch: Batch, *, quick: bool = True) -> None:
        self._network, self._count, self._parts = network, len(batch), in_parts(batch, network)
        with torch.enable_grad():
            network.use_chain_if_exact(batch[:1])
        self._chain = _Chain(network, network.chain, batch) if quick and network.chain is not None else None

    @torch.no_grad()
    def means(
        self,
        directions: Sequence[ParamDict] = (),
        points: Points = ((),),
        measures: Sequence[Measure] = (cross_entropy,),
    ) -> Tensor:
        """Each measure's mean over the samples at w + Σ_k a_k d_k for every point (a_1, …), (points, measures)."""
        total = torch.zeros(len(points), len(measures), dtype=torch.float64, device=self._network.device)
        found = self._called if self._chain is None else self._chain.logits
        with flush_denormals():
            for place, part, logits in found(directions, points):
                for column, measure in enumerate(measures):
                    total[place, column] += measure(logits, part.y).sum(dtype=torch.float64)
        return (total / self._count).cpu()

    def _called(self, directions: Sequence[ParamDict], points: Points) -> Iterator[tuple[int, Batch, Tensor]]:
        """For every point and part of the samples the logits, (classes, n), by calls of the model."""
        network = self._network
        for place, point in enumerate(points):
            weights = {name: p.detach().clone() for name, p in network.trainable.items()}
            for a, d in zip(point, directions, strict=True):
                for name, weight in weights.items():
                    weight.add_(d[name], alpha=a)
            for part in self._parts:
                yield place, part, network.functional_logits(part, weights, statistics=False).T


class _Chain:
    """The same for a chain of linear layers, with the first layer's products kept."""

    def __init__(self, network: Network, chain: LinearChain, batch: Batch) -> None:
        self._network, self._links = network, chain.links
        self._parts = [batch[start : start + CHUNK] for start in range(0, len(batch), CHUNK)]
        self._inputs = [part.x.flatten(1).T for part in self._parts]  # samples as columns
        first = chain.links[0].layer.weight.detach()
        self._first = [product(first, x) for x in self._inputs]

    def logits(self, directions: Sequence[ParamDict], points: Points) -> Iterator[tuple[int, Batch, Tensor]]:
        """For every point and part of the samples the logits, (classes, n)."""
        first = self._links[0]
        for part, x, base in zip(self._parts, self._inputs, self._first, strict=True):
            rises = [None if (step := d.get(first.weight)) is None else product(step, x) for d in directions]
            for place, point in enumerate(points):
                output = _moved(base, rises, point)
                for link in self._links:
                    if link is not first:
                        steps = [d.get(link.weight) for d in directions]
                        output = product(_moved(link.layer.weight, steps, point), output)
                    if link.layer.bias is not None:
                        steps = [d.get(link.bias) for d in directions]
                        output = output + _moved(link.layer.bias, steps, point).unsqueeze(1)
                    if link.activation is not None:
                        output = link.activation.forward(output)
                yield place, part, self._network.heads.mask(output.T, part.task).T


def _moved(start: Tensor, steps: Sequence[Tensor | None], point: Sequence[float]) -> Tensor:
    """The start plus Σ_k a_k step_k; a direction that has no step for a weight leaves it."""
    for a, step in zip(point, steps, strict=True):
        if step is not None:
            start = torch.add(start, step, alpha=a)
    return start


def profile(surroundings: LossProbe, direction: ParamDict, alphas: Sequence[float]) -> list[float]:
    """The loss g(α) at w + α d for every α."""
    return _finite(surroundings.means([direction], [(alpha,) for alpha in alphas])[:, 0]).tolist()


def surface(surroundings: LossProbe, first: ParamDict, second: ParamDict, alphas: Sequence[float]) -> list[list[float]]:
    """The loss at w + α d + β e for every α (rows) and β (columns)."""
    points = [(alpha, beta) for alpha in alphas for beta in alphas]
    losses = _finite(surroundings.means([first, second], points)[:, 0])
    return losses.reshape(len(alphas), len(alphas)).tolist()


def _finite(losses: Tensor) -> Tensor:
    if not bool(torch.isfinite(losses).all()):
        raise DivergedError("the loss is not finite at some of the points: look less far, with a smaller --range.")
    return losses
