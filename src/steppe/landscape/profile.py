"""Losses of a task's samples at w + α d: along one direction a profile, over two of them a surface.

The model's own weights and buffers are never moved. A chain of linear layers is evaluated layer by layer
(`fast.chain_grid`). Any other model is called once for each point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from steppe.errors import DivergedError
from steppe.fast.chain_grid import ChainGrid
from steppe.fast.factored import ParamDict
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.runtime.contexts import flush_denormals
from steppe.tensors.batch import Batch

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


def split_batch(batch: Batch, network: Network) -> list[Batch]:
    """Prepared samples in parts for which a call of the model is quickest."""
    size = eval_batch_size(network.model, len(batch), max(1, min(CHUNK, _VALUES // max(1, batch.x[0].numel()))))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


class LossProbe:
    """Mean losses on prepared samples wherever the weights stand around the network's own.

    To be made and asked in eval mode, `network.mode(training=False)`. `quick=False` calls the model even where it is
    a chain.
    """

    def __init__(self, network: Network, batch: Batch, *, quick: bool = True) -> None:
        self._network, self._count, self._parts = network, len(batch), split_batch(batch, network)
        with torch.enable_grad():
            network.use_chain_if_exact(batch[:1])
        self._grid: ChainGrid | None = None
        if quick and network.chain is not None:
            self._parts = [batch[start : start + CHUNK] for start in range(0, len(batch), CHUNK)]
            self._grid = ChainGrid(network.chain, [part.x.flatten(1) for part in self._parts])

    @torch.no_grad()
    def means(
        self,
        directions: Sequence[ParamDict] = (),
        points: Points = ((),),
        measures: Sequence[Measure] = (cross_entropy,),
    ) -> Tensor:
        """Each measure's mean over the samples at w + Σ_k a_k d_k for every point (a_1, …), (points, measures)."""
        total = torch.zeros(len(points), len(measures), dtype=torch.float64, device=self._network.device)
        with flush_denormals():
            for place, part, logits in self._logits(directions, points):
                for column, measure in enumerate(measures):
                    total[place, column] += measure(logits, part.y).sum(dtype=torch.float64)
        return (total / self._count).cpu()

    def _logits(self, directions: Sequence[ParamDict], points: Points) -> Iterator[tuple[int, Batch, Tensor]]:
        """For every point and part of the samples the logits, (classes, n)."""
        network = self._network
        if self._grid is not None:
            for place, index, outputs in self._grid.outputs(directions, points):
                part = self._parts[index]
                yield place, part, network.heads.mask(outputs, part.task).T
            return
        for place, point in enumerate(points):
            weights = {name: p.detach().clone() for name, p in network.trainable.items()}
            for a, d in zip(point, directions, strict=True):
                for name, weight in weights.items():
                    weight.add_(d[name], alpha=a)
            for part in self._parts:
                yield place, part, network.functional_logits(part, weights, statistics=False).T


def loss_profile(surroundings: LossProbe, direction: ParamDict, alphas: Sequence[float]) -> list[float]:
    """The loss g(α) at w + α d for every α."""
    return _require_finite(surroundings.means([direction], [(alpha,) for alpha in alphas])[:, 0]).tolist()


def loss_surface(
    surroundings: LossProbe, first: ParamDict, second: ParamDict, alphas: Sequence[float]
) -> list[list[float]]:
    """The loss at w + α d + β e for every α (rows) and β (columns)."""
    points = [(alpha, beta) for alpha in alphas for beta in alphas]
    losses = _require_finite(surroundings.means([first, second], points)[:, 0])
    return losses.reshape(len(alphas), len(alphas)).tolist()


def _require_finite(losses: Tensor) -> Tensor:
    if not bool(torch.isfinite(losses).all()):
        raise DivergedError("the loss is not finite at some of the points: look less far, with a smaller --range.")
    return losses
