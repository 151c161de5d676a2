"""Sharpness evaluation (the inner loop of Algorithm 1) on a chain of linear layers, sharing work between its passes.

Each layer's products are in `perturbed_layers`. At a batch size of ten, the time goes into the number of calls. So
whatever stays the same between updates is created once, and η1 is multiplied into λ for all layers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad
from steppe.fast.linear_chain import WIDE, LinearChain
from steppe.fast.perturbed_layers import FirstLayer, PerturbedLayer, Projector, SmallLayer, WideLayer
from steppe.tensors.batch import Batch

ChainGrad = tuple[dict[str, Tensor | FactoredGrad], dict[str, Tensor | FactoredGrad], Tensor | None]
"""The gradient G, its coordinates G M in the bases, and the gradient in λ, all layers in one row."""


class ScratchMemory(Protocol):
    """Tensors that are used again and again."""

    def scalar(self, value: float) -> Tensor:
        """A number as a tensor, the same one every time."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Memory of a parameter's shape, the same every time."""
        ...


class LogitsLoss(Protocol):
    """A loss given the outputs."""

    def loss_and_slope(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient in the outputs."""
        ...

    def slope(self, output: Tensor, batch: Batch) -> Tensor:
        """The gradient alone."""
        ...


class LossSource(Protocol):
    """What a perturbed chain needs from its network."""

    @property
    def scratch(self) -> ScratchMemory:
        """Its scratch memory."""
        ...

    @property
    def output_loss(self) -> LogitsLoss:
        """Its loss in closed form."""
        ...


class PerturbedChain:
    """A chain at w + v; v is 0 after `start`.

    Args:
        chain: The chain.
        network: The network that it belongs to.
        projectors: The projector of each weight that has one.
        importance: All their λ in one row.
        samples: The number of samples in D ∪ N.
        lr: The step size η1.
        clamp: The largest absolute value of an element of a projected gradient.
    """

    def __init__(
        self,
        chain: LinearChain,
        network: LossSource,
        projectors: Mapping[str, Projector],
        importance: Tensor,
        samples: int,
        lr: float,
        clamp: float,
    ) -> None:
        self._network, self._lr = network, network.scratch.scalar(lr)
        self._built_for = chain, projectors, samples
        self._importance = importance
        self._steps = torch.empty_like(importance)  # η1 λ of all layers
        sizes = [p.importance.numel() for p in projectors.values()]
        steps = dict(zip(projectors, torch.split(self._steps, sizes), strict=True))
        self.layers: list[PerturbedLayer] = []
        for link, weight in zip(chain.links, chain.weights, strict=True):
            # On other devices it costs less to move a weight than to wait for the check whether to clamp.
            small = weight.numel() <= WIDE or samples >= weight.shape[0] or not weight.is_cpu
            kind = SmallLayer if small else WideLayer if self.layers else FirstLayer
            projector, scratch = projectors.get(link.weight), network.scratch.tensor(link.weight)
            self.layers.append(
                kind(link, weight, projector, steps.get(link.weight), scratch, self._lr, abs(lr) * clamp)
            )
        self._first, self._backwards = self.layers[0], self.layers[::-1]

    def fits(self, chain: LinearChain, projectors: Mapping[str, Projector], samples: int) -> bool:
        """Whether it was built for this chain, these projectors and this number of samples."""
        built_for = self._built_for
        return built_for[0] is chain and built_for[1] is projectors and built_for[2] == samples

    def start(self, data: Tensor) -> None:
        """Begin at v = 0 with the inputs of D ∪ N, of which each pass sees some."""
        if self._built_for[1]:
            torch.mul(self._importance, self._lr, out=self._steps)
        for layer in self.layers:
            layer.bias = layer.link.layer.bias
            layer.start(data)

    def forward_backward(self, batch: Batch, rows: slice | None, *, with_loss: bool = True) -> Tensor:
        """Run one forward and backward pass at w + v.

        Args:
            batch: The samples.
            rows: Which rows of the data they are; None for all.
            with_loss: Whether the loss is needed.

        Returns:
            The loss, if needed.
        """
        h = batch.x
        for layer in self.layers:
            layer.inputs = h
            h = layer.outputs = layer.finish(layer.product(h, rows))
        if with_loss:
            loss, slope = self._network.output_loss.loss_and_slope(h, batch)
        else:
            loss = slope = self._network.output_loss.slope(h, batch)
        for layer in self._backwards:
            if layer.activation is not None:
                slope = layer.activation.backward(slope, layer.outputs)
            layer.slope = slope
            if layer is not self._first:
                slope = layer.back(slope)
        return loss

    def ascend(self, rows: slice | None) -> None:
        """Take one step of v along the projected gradient of the last pass, which saw the same rows."""
        for layer in self.layers:
            layer.ascend(rows)
            if layer.bias is not None:
                layer.bias = layer.bias + layer.slope.sum(0).mul_(self._lr).clamp_(-layer.bound, layer.bound)

    def gradient(self, *, with_importance: bool) -> ChainGrad:
        """The gradients of the last pass, which must have seen all rows.

        Args:
            with_importance: Whether to compute the gradient in λ and all coordinates.

        Returns:
            The gradient, its coordinates in the bases, and the gradient in λ. Without importance, the last is None, and
            coordinates are included only where they are known anyway.
        """
        gradient: dict[str, Tensor | FactoredGrad] = {}
        coordinates: dict[str, Tensor | FactoredGrad] = {}
        alignment: dict[str, Tensor] = {}
        for layer in self.layers:
            name = layer.link.weight
            gradient[name] = g = layer.gradient()
            if layer.bias is not None:
                gradient[layer.link.bias] = layer.slope.sum(0)
            if layer.projector is not None and (with_importance or layer.knows_coordinates):
                coordinates[name] = c = layer.coordinates(g)
                if with_importance:
                    alignment[name] = layer.alignment(c)
        if not alignment:
            return gradient, coordinates, None
        slopes = torch.cat([alignment[name] for name in self._built_for[1]], 1)
        return gradient, coordinates, slopes.mul_(self._lr).view(-1)
