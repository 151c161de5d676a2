"""Losses of a task's samples at w + α d: a profile along one direction, a surface over two.

The model's own weights and buffers are never changed. A chain of linear layers is evaluated layer by layer, samples as
columns: its first layer is linear in α, (W + αD) X = WX + α DX, so two products serve every α, and they are most of the
arithmetic. Other models are called once for each point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from steppe.errors import DivergedError
from steppe.network.linear_chain import LinearChain
from steppe.network.network import Network
from steppe.runtime.contexts import flush_denormals
from steppe.tensors.batch import Batch
from steppe.tensors.factored import ParamDict
from steppe.tensors.matmul import product

CHUNK = 1024
"""Samples per matrix product: enough to be efficient, few enough for the cache."""
_VALUES = 2**19  # input values per call of a model: activations of images are larger still

Measure = Callable[[Tensor, Tensor], Tensor]
"""One value for each sample, from logits (classes, n) and labels (n,)."""
Points = Sequence[Sequence[float]]
"""Points around w, each given by its coordinate along every direction."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    return -torch.log_softmax(logits, 0).gather(0, labels.unsqueeze(0)).squeeze(0)


def zero_one(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for each misclassified sample, else 0. As in prediction the first of several equal maxima counts; outputs that
    contain NaN count as misclassified.
    """
    highest, predicted = logits.max(0)
    return ((predicted != labels) | highest.isnan()).to(logits.dtype)


def split_batch(batch: Batch, network: Network) -> list[Batch]:
    """Split prepared samples into parts of the size for which a call of the model is fastest."""
    size = network.batch_size(len(batch), max(1, min(CHUNK, _VALUES // max(1, batch.x[0].numel()))))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


class LossProbe:
    """Mean losses on prepared samples at points around the network's weights.

    Create and use it in eval mode, within `network.mode(training=False)`.

    Args:
        network: The network.
        batch: Prepared samples.
        quick: Evaluate chains of linear layers layer by layer; False calls every model.
    """

    def __init__(self, network: Network, batch: Batch, *, quick: bool = True) -> None:
        self._network, self._count, self._parts = network, len(batch), split_batch(batch, network)
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
        """Each measure's mean over the samples at w + Σ_k a_k d_k.

        Args:
            directions: The directions d_k.
            points: The points (a_1, …).
            measures: What to average.

        Returns:
            A tensor (points, measures).
        """
        total = torch.zeros(len(points), len(measures), dtype=torch.float64, device=self._network.device)
        found = self._called if self._chain is None else self._chain.logits
        with flush_denormals():
            for place, part, logits in found(directions, points):
                for column, measure in enumerate(measures):
                    total[place, column] += measure(logits, part.y).sum(dtype=torch.float64)
        return (total / self._count).cpu()

    def _called(self, directions: Sequence[ParamDict], points: Points) -> Iterator[tuple[int, Batch, Tensor]]:
        """Logits (classes, n) for every point and part of the samples, by calling the model."""
        network = self._network
        for place, point in enumerate(points):
            weights = {name: p.detach().clone() for name, p in network.trainable.items()}
            for a, d in zip(point, directions, strict=True):
                for name, weight in weights.items():
                    weight.add_(d[name], alpha=a)
            for part in self._parts:
                yield place, part, network.functional_logits(part, weights, statistics=False).T


class _Chain:
    """The same for a chain of linear layers, reusing the first layer's products."""

    def __init__(self, network: Network, chain: LinearChain, batch: Batch) -> None:
        self._network, self._links = network, chain.links
        self._parts = [batch[start : start + CHUNK] for start in range(0, len(batch), CHUNK)]
        self._inputs = [part.x.flatten(1).T for part in self._parts]  # samples as columns
        first = chain.links[0].layer.weight.detach()
        self._first = [product(first, x) for x in self._inputs]

    def logits(self, directions: Sequence[ParamDict], points: Points) -> Iterator[tuple[int, Batch, Tensor]]:
        """Logits (classes, n) for every point and part of the samples."""
        first = self._links[0]
        for part, x, base in zip(self._parts, self._inputs, self._first, strict=True):
            rises = [None if (step := d.get(first.weight)) is None else product(step, x) for d in directions]
            for place, point in enumerate(points):
                output = _move(base, rises, point)
                for link in self._links:
                    if link is not first:
                        steps = [d.get(link.weight) for d in directions]
                        output = product(_move(link.layer.weight, steps, point), output)
                    if link.layer.bias is not None:
                        steps = [d.get(link.bias) for d in directions]
                        output = output + _move(link.layer.bias, steps, point).unsqueeze(1)
                    if link.activation is not None:
                        output = link.activation.forward(output)
                yield place, part, self._network.mask_logits(output.T, part.task).T


def _move(start: Tensor, steps: Sequence[Tensor | None], point: Sequence[float]) -> Tensor:
    """The start plus Σ_k a_k step_k, without steps that are None."""
    for a, step in zip(point, steps, strict=True):
        if step is not None:
            start = torch.add(start, step, alpha=a)
    return start


def loss_profile(probe: LossProbe, direction: ParamDict, alphas: Sequence[float]) -> list[float]:
    """The loss g(α) at w + α d for every α.

    Args:
        probe: Network and samples.
        direction: d.
        alphas: The values of α.

    Raises:
        DivergedError: A loss is not finite.
    """
    return _require_finite(probe.means([direction], [(alpha,) for alpha in alphas])[:, 0]).tolist()


def loss_surface(probe: LossProbe, first: ParamDict, second: ParamDict, alphas: Sequence[float]) -> list[list[float]]:
    """The loss at w + α d + β e for every α (rows) and β (columns).

    Args:
        probe: Network and samples.
        first: d.
        second: e.
        alphas: The values of α and of β.

    Raises:
        DivergedError: A loss is not finite.
    """
    points = [(alpha, beta) for alpha in alphas for beta in alphas]
    losses = _require_finite(probe.means([first, second], points)[:, 0])
    return losses.reshape(len(alphas), len(alphas)).tolist()


def _require_finite(losses: Tensor) -> Tensor:
    if not bool(torch.isfinite(losses).all()):
        raise DivergedError("the loss is not finite at some points; pass a smaller --range.")
    return losses
