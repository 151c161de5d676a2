"""Sharpness evaluation on a chain of linear layers: what `perturbation` does, with what its passes share (SPEC 5).

The first layer's inputs are the data, which an update sees several times: X Wᵀ and X M are had once for all of D ∪ N.
A wide weight is not moved at all. Its v is a sum of terms δᵀR with R = X_D M diag(λ) Mᵀ, so that
X (W + v)ᵀ = X Wᵀ + η1 Σ (X Rᵀ) δ. A small weight is moved, which then costs less than the detour.

Written for few and cheap calls, because at a batch of ten they are what takes the time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, mm
from torch.nn.functional import linear

from steppe.linear_chain import WIDE, LinearChain, times_transposed
from steppe.network import Network
from steppe.projection.projector import SoftProjector
from steppe.types import Batch, Outer

Found = tuple[dict[str, Tensor | Outer], dict[str, Tensor | Outer], dict[str, Tensor]]
"""The gradient, the gradient along the bases, and the gradient in λ."""


class MovedChain:
    """A chain at w + v: v = 0 at first, then whatever steps have been taken."""

    def __init__(
        self, chain: LinearChain, network: Network, projectors: Mapping[str, SoftProjector], data: Tensor, lr: float
    ) -> None:
        self.network, self.links, self.lr = network, chain.links, data.new_tensor(lr)
        self.layers: list[_Small | _Wide] = []
        for link in chain.links:
            weight, projector = link.layer.weight, projectors.get(link.weight)
            if weight.numel() <= WIDE or data.shape[0] >= weight.shape[0]:
                self.layers.append(_Small(weight, projector, network.room(link.weight), lr))
            else:
                shared = None if self.layers else data
                self.layers.append(_Wide(weight, projector, network.room(link.weight), self.lr, shared))
        self.biases: list[Tensor | None] = [link.layer.bias for link in chain.links]
        self._inputs: list[Tensor] = []
        self._slopes: list[Tensor] = []

    def passed(self, batch: Batch, rows: slice, *, evaluated: bool = True) -> Tensor:
        """One forward and backward where the chain stands now, on the samples `rows` of the data; returns the loss if
        it is to be evaluated.
        """
        h = batch.x
        self._inputs = [h]
        for link, layer, bias in zip(self.links, self.layers, self.biases, strict=True):
            h = layer.output(h, rows)
            if bias is not None:
                h = h + bias
            if link.activation is not None:
                h = link.activation.forward(h)
            self._inputs.append(h)
        loss, slope = self.network.output_loss(h, batch, wanted=evaluated)
        slopes = []
        for place in reversed(range(len(self.links))):
            activation = self.links[place].activation
            if activation is not None:
                slope = activation.backward(slope, self._inputs[place + 1])
            slopes.append(slope)
            if place > 0:
                slope = self.layers[place].back(slope)
        self._slopes = slopes[::-1]
        return loss

    def climb(self, rows: slice, clamp: float) -> None:
        """One step of v along the gradient of the last pass, within the memory."""
        for place, (layer, slope) in enumerate(zip(self.layers, self._slopes, strict=True)):
            layer.climb(self._inputs[place], slope, rows, clamp)
            bias = self.biases[place]
            if bias is not None:
                self.biases[place] = bias + slope.sum(0).clamp_(-clamp, clamp) * self.lr

    def gradient(self, rows: slice, *, aligned: bool) -> Found:
        """What the last pass gives; the gradient along the bases and that in λ only if `aligned`."""
        gradient: dict[str, Tensor | Outer] = {}
        along: dict[str, Tensor | Outer] = {}
        alignment: dict[str, Tensor] = {}
        for place, (link, layer) in enumerate(zip(self.links, self.layers, strict=True)):
            slope = self._slopes[place]
            gradient[link.weight] = g = layer.gradient(self._inputs[place], slope)
            if self.biases[place] is not None:
                gradient[link.bias] = slope.sum(0)
            if aligned and layer.basis is not None:
                along[link.weight] = c = layer.coordinates(g, rows)
                alignment[link.weight] = layer.alignment(c).mul_(self.lr)
        return gradient, along, alignment


class _Small:
    """A weight that is moved: W + v is formed."""

    def __init__(self, weight: Tensor, projector: SoftProjector | None, room: Tensor, lr: float) -> None:
        self.at, self.room, self.lr = weight, room, lr
        self.basis = None if projector is None else projector.columns
        self._back = None if projector is None else (projector.columns * projector.importance).t()  # diag(λ) Mᵀ
        self._walked: Tensor | None = None  # Σ G_k M

    def output(self, inputs: Tensor, rows: slice) -> Tensor:
        return linear(inputs, self.at)

    def back(self, slope: Tensor) -> Tensor:
        return mm(slope, self.at)

    def climb(self, inputs: Tensor, slope: Tensor, rows: slice, clamp: float) -> None:
        step = mm(slope.t(), inputs)
        if self.basis is not None and self._back is not None:
            along = mm(step, self.basis)
            self._walked = along if self._walked is None else self._walked + along
            step = mm(along, self._back)
        self.at = torch.add(self.at, step.clamp_(-clamp, clamp), alpha=self.lr, out=self.room)

    def gradient(self, inputs: Tensor, slope: Tensor) -> Tensor | Outer:
        return mm(slope.t(), inputs)

    def coordinates(self, gradient: Tensor | Outer, rows: slice) -> Tensor | Outer:
        assert isinstance(gradient, Tensor)
        assert self.basis is not None
        return mm(gradient, self.basis)

    def alignment(self, along: Tensor | Outer) -> Tensor:
        """Σ_rows (G_D u_i)(G_{D∪N} u_i)."""
        assert isinstance(along, Tensor)
        assert self._walked is not None
        return (self._walked * along).sum(0, keepdim=True)


class _Wide:
    """A weight that stays: v is kept as factors and added to outputs. Where a step would have to be clamped, which
    factors cannot be, it is moved after all.
    """

    def __init__(
        self, weight: Tensor, projector: SoftProjector | None, room: Tensor, lr: Tensor, data: Tensor | None
    ) -> None:
        self.weight, self.room, self.lr, self.data = weight, room, lr, data
        self.basis = None if projector is None else projector.columns
        self.importance = None if projector is None else projector.importance
        self._at: Tensor | None = None  # W + v, once it had to be formed
        self._terms: list[tuple[Tensor, Tensor]] = []  # η1 δ and R
        self._walked: list[tuple[Tensor, Tensor]] = []  # δ and X M
        self._within: tuple[slice, Tensor, Tensor] | None = None
        # Of all the data, where the inputs are that:
        self._outputs: Tensor | None = None  # X Wᵀ
        self._along: Tensor | None = None  # X M
        self._columns: Tensor | None = None  # Xᵀ

    def output(self, inputs: Tensor, rows: slice) -> Tensor:
        if self._at is not None:
            return times_transposed(inputs, self._at)
        if self.data is None:
            output = times_transposed(inputs, self.weight)
        else:
            if self._outputs is None:
                self._outputs = times_transposed(self.data, self.weight)
            output = self._outputs[rows]
        for left, right in self._terms:
            output = torch.addmm(output, self._inner(inputs, right, rows), left)
        return output

    def _inner(self, inputs: Tensor, right: Tensor, rows: slice) -> Tensor:
        """X Rᵀ."""
        if self.data is None:
            return mm(inputs, right.t())
        if self._columns is None:
            self._columns = self.data.t().contiguous()
        return mm(right, self._columns[:, rows]).t()

    def back(self, slope: Tensor) -> Tensor:
        if self._at is not None:
            return mm(slope, self._at)
        back = mm(slope, self.weight)
        for left, right in self._terms:
            back = torch.addmm(back, mm(slope, left.t()), right)
        return back

    def climb(self, inputs: Tensor, slope: Tensor, rows: slice, clamp: float) -> None:
        right, largest = self._projected(inputs, rows)
        if self.basis is not None:
            self._walked.append((slope, self._products(inputs, rows)))
        # |Σ_n δ_ni R_nj| ≤ Σ_n max|δ_n| max|R_n|: mostly far below the bound.
        if self._at is None and float(slope.abs().amax(1).dot(largest)) <= clamp:
            self._terms.append((slope * self.lr, right))
            return
        if self._at is None:
            self._at = self.room.copy_(self.weight)
            for left, earlier in self._terms:
                self._at.addmm_(left.t(), earlier)
        self._at.add_(mm(slope.t(), right).clamp_(-clamp, clamp) * self.lr)

    def _projected(self, inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """R = X M diag(λ) Mᵀ, or X itself without a basis, and the largest element of each row; for the data kept."""
        if self.data is not None and self._within is not None and self._within[0] == rows:
            return self._within[1:]
        right = inputs
        if self.basis is not None and self.importance is not None:
            right = mm(self._products(inputs, rows) * self.importance, self.basis.t())
        self._within = rows, right, right.abs().amax(1)
        return self._within[1:]

    def _products(self, inputs: Tensor, rows: slice) -> Tensor:
        """X M."""
        assert self.basis is not None
        if self.data is None:
            return mm(inputs, self.basis)
        if self._along is None:
            self._along = mm(self.data, self.basis)
        return self._along[rows]

    def gradient(self, inputs: Tensor, slope: Tensor) -> Tensor | Outer:
        return Outer(slope, inputs)

    def coordinates(self, gradient: Tensor | Outer, rows: slice) -> Tensor | Outer:
        assert isinstance(gradient, Outer)
        return Outer(gradient.left, self._products(gradient.right, rows))

    def alignment(self, along: Tensor | Outer) -> Tensor:
        """Σ_nm (δ_n · δ'_m)(X_n u_i)(X'_m u_i): over pairs of samples rather than over the rows of gradients."""
        assert isinstance(along, Outer)
        parts = [mm(mm(slope, along.left.t()), along.right).mul_(products) for slope, products in self._walked]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).sum(0, keepdim=True)
