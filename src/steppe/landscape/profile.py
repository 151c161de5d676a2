"""Losses of a task's samples at w + α d: a profile along one direction, a surface over two.

The model's own weights and buffers are never changed. A chain of linear layers is evaluated layer by layer
(`fast.chain_grid`). Other models are called once for each point.
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
from steppe.tensors.nest import leaves

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
    """The zero-one loss of each sample.

    Args:
        logits: The outputs, (classes, n).
        labels: The labels.

    Returns:
        1 for each misclassified sample, else 0. As in prediction, the first of several equal maxima counts; a sample
        with a NaN among its outputs counts as misclassified.
    """
    highest, predicted = logits.max(0)
    return ((predicted != labels) | highest.isnan()).to(logits.dtype)


def split_batch(batch: Batch, network: Network) -> list[Batch]:
    """Split prepared samples into parts of the size for which a call of the model is fastest."""
    values = sum(leaf[0].numel() for leaf in leaves(batch.x))  # of a sample
    size = eval_batch_size(network.model, len(batch), max(1, min(CHUNK, _VALUES // max(1, values))))
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
        """Each measure's mean over the samples at w + Σ_k a_k d_k.

        Args:
            directions: The directions d_k.
            points: The points (a_1, …).
            measures: What to average.

        Returns:
            A tensor (points, measures).
        """
        total = torch.zeros(len(points), len(measures), dtype=torch.float64, device=self._network.device)
        with flush_denormals():
            for place, part, logits in self._logits(directions, points):
                for column, measure in enumerate(measures):
                    total[place, column] += measure(logits, part.y).sum(dtype=torch.float64)
        return (total / self._count).cpu()

    def _logits(self, directions: Sequence[ParamDict], points: Points) -> Iterator[tuple[int, Batch, Tensor]]:
        """Logits (classes, n) for every point and part of the samples."""
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


def loss_profile(probe: LossProbe, direction: ParamDict, alphas: Sequence[float]) -> list[float]:
    """The loss g(α) at w + α d for every α.

    Args:
        probe: Network and samples.
        direction: d.
        alphas: The values of α.

    Returns:
        The losses.

    Raises:
        DivergedError: A loss is not finite.
    """
    return _require_finite(probe.means([direction], [(alpha,) for alpha in alphas])[:, 0]).tolist()


def loss_surface(probe: LossProbe, first: ParamDict, second: ParamDict, alphas: Sequence[float]) -> list[list[float]]:
    """The loss at w + α d + β e for every α and β.

    Args:
        probe: Network and samples.
        first: d.
        second: e.
        alphas: The values of α and of β.

    Returns:
        One row per α, one column per β.

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
