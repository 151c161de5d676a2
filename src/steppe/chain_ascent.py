"""Sharpness evaluation on a chain of linear layers: what `perturbation` does, with what its passes share (SPEC 5).

The first layer's inputs are the data, which an update sees several times: X Wᵀ and X M are had once for all of D ∪ N.
A wide weight is not moved at all. Its v is a sum of terms δᵀR with R = X_D M diag(λ) Mᵀ, so that
X (W + v)ᵀ = X Wᵀ + η1 Σ (X Rᵀ) δ. A small weight is moved, which then costs less than the detour.

Written for few and cheap calls, because at a batch of ten they are what takes the time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, mm, mv

from steppe.linear_chain import WIDE, LinearChain, weight_gradient
from steppe.network import Network
from steppe.projection.projector import SoftProjector
from steppe.types import Batch, Outer, aligned, multiplied, times_transposed

Found = tuple[dict[str, Tensor | Outer], dict[str, Tensor | Outer], dict[str, Tensor]]
"""The gradient, the gradient along the bases, and the gradient in λ."""


class MovedChain:
    """A chain at w + v: v = 0 at first, then whatever steps have been taken."""

    def __init__(
        self, chain: LinearChain, network: Network, projectors: Mapping[str, SoftProjector], data: Tensor, lr: float
    ) -> None:
        self.network, self.links, self.lr = network, chain.links, network.number(lr)
        self.layers: list[_Small | _Wide] = []
        for link, weight in zip(chain.links, chain.weights, strict=True):
            projector, room = projectors.get(link.weight), network.room(link.weight)
            if weight.numel() <= WIDE or data.shape[0] >= weight.shape[0]:
                self.layers.append(_Small(weight, projector, room, self.lr))
            else:
                self.layers.append(_Wide(weight, projector, room, self.lr, None if self.layers else data))
        self.biases = list(chain.biases)
        self._inputs: list[Tensor] = []
        self._slopes: list[Tensor] = []

    def passed(self, batch: Batch, rows: slice, *, evaluated: bool = True) -> Tensor:
        """One forward and backward where the chain stands now, on the samples `rows` of the data; returns the loss if
        it is to be evaluated.
        """
        h = batch.x
        inputs = self._inputs = [h]
        for link, layer, bias in zip(self.links, self.layers, self.biases, strict=True):
            h = layer.output(h, rows)
            if bias is not None:
                h = h + bias
            if link.activation is not None:
                h = link.activation.forward(h)
            inputs.append(h)
        if evaluated:
            loss, slope = self.network.output_loss(h, batch)
        else:
            loss = slope = self.network.output_slope(h, batch)
        slopes = self._slopes = [slope] * len(self.links)
        for place in range(len(slopes) - 1, -1, -1):
            activation = self.links[place].activation
            if activation is not None:
                slope = activation.backward(slope, inputs[place + 1])
            slopes[place] = slope
            if place > 0:
                slope = self.layers[place].back(slope)
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
            if aligned and layer.projector is not None:
                along[link.weight] = c = layer.coordinates(g, rows)
                alignment[link.weight] = layer.alignment(c)
        return gradient, along, alignment


class _Small:
    """A weight that is moved: W + v is formed."""

    def __init__(self, weight: Tensor, projector: SoftProjector | None, room: Tensor, lr: Tensor) -> None:
        self.at, self.room, self.lr = weight, room, lr
        self.projector = projector
        self._transposed = weight.t()
        self._walked: list[Tensor | Outer] = []  # G_k M

    def output(self, inputs: Tensor, rows: slice) -> Tensor:
        return mm(inputs, self._transposed)

    def back(self, slope: Tensor) -> Tensor:
        return mm(slope, self.at)

    def climb(self, inputs: Tensor, slope: Tensor, rows: slice, clamp: float) -> None:
        g = weight_gradient(slope, inputs)
        known = self.projector
        if known is None:
            step = multiplied(g)
        elif isinstance(g, Outer):
            along = mm(inputs, known.columns)
            self._walked.append(Outer(slope, along))
            step = mm(slope.t(), mm(along * known.importance, known.rows))
        else:
            along = mm(g, known.columns)
            self._walked.append(along)
            step = mm(along * known.importance, known.rows)
        self.at = torch.add(self.at, step.clamp_(-clamp, clamp).mul_(self.lr), out=self.room)
        self._transposed = self.at.t()

    def gradient(self, inputs: Tensor, slope: Tensor) -> Tensor | Outer:
        return weight_gradient(slope, inputs)

    def coordinates(self, gradient: Tensor | Outer, rows: slice) -> Tensor | Outer:
        assert self.projector is not None
        return gradient @ self.projector.columns

    def alignment(self, along: Tensor | Outer) -> Tensor:
        return aligned(self._walked, along).mul_(self.lr)


class _Wide:
    """A weight that stays: v is kept as terms that are added to outputs. Where a step would have to be clamped, which
    terms cannot be, it is moved after all.
    """

    def __init__(
        self, weight: Tensor, projector: SoftProjector | None, room: Tensor, lr: Tensor, data: Tensor | None
    ) -> None:
        self.weight, self.room, self.lr, self.data = weight, room, lr, data
        self.projector = projector
        self._at: Tensor | None = None  # W + v, once it had to be formed
        self._terms: list[_Term] = []
        # Of all the data, where the inputs are that:
        self._outputs: Tensor | None = None  # X Wᵀ
        self._along: Tensor | None = None  # X M

    def output(self, inputs: Tensor, rows: slice) -> Tensor:
        if self._at is not None:
            return times_transposed(inputs, self._at)
        if self.data is None:
            output = times_transposed(inputs, self.weight)
        else:
            if self._outputs is None:
                self._outputs = times_transposed(self.data, self.weight)
            output = _taken(self._outputs, rows)
        for term in self._terms:
            output = torch.addmm(output, self._inner(inputs, term, rows), term.left)
        return output

    def _inner(self, inputs: Tensor, term: _Term, rows: slice) -> Tensor:
        """X Rᵀ = (X M) (X_D M diag(λ))ᵀ; of the data kept."""
        if self.data is None:
            return times_transposed(self._products(inputs, rows), term.weighed)
        if term.inner is None:
            everything = self.data if self.projector is None else self._along
            assert everything is not None
            term.inner = mm(everything, term.weighed.t())
        return _taken(term.inner, rows)

    def back(self, slope: Tensor) -> Tensor:
        if self._at is not None:
            return mm(slope, self._at)
        back = mm(slope, self.weight)
        for term in self._terms:
            back = torch.addmm(back, mm(slope, term.left.t()), self._right(term))
        return back

    def climb(self, inputs: Tensor, slope: Tensor, rows: slice, clamp: float) -> None:
        step = slope * self.lr
        if self.data is not None and self._terms and self._terms[-1].rows == rows:  # on the same data once more
            term = self._terms[-1]
            self._move(slope, term, clamp)
            term.left = term.left + step
        else:
            along = self._products(inputs, rows)
            term = _Term(rows, step, along, along if self.projector is None else along * self.projector.importance)
            self._move(slope, term, clamp)
            self._terms.append(term)

    def _move(self, slope: Tensor, term: _Term, clamp: float) -> None:
        """Form W + v where this step has to be clamped, or an earlier one had to be."""
        # |Σ_n δ_ni R_nj| ≤ Σ_n |δ_ni| ‖R_n‖, mostly far below the bound.
        if self._at is None and float(mv(slope.abs().t(), term.lengths).amax()) > clamp:
            self._at = self.room.copy_(self.weight)
            for earlier in self._terms:
                self._at.addmm_(earlier.left.t(), self._right(earlier))
        if self._at is not None:
            self._at.add_(mm(slope.t(), self._right(term)).clamp_(-clamp, clamp).mul_(self.lr))

    def _right(self, term: _Term) -> Tensor:
        """R = X_D M diag(λ) Mᵀ."""
        if term.right is None:
            term.right = term.weighed if self.projector is None else mm(term.weighed, self.projector.rows)
        return term.right

    def _products(self, inputs: Tensor, rows: slice) -> Tensor:
        """X M, or X itself without a basis."""
        if self.projector is None:
            return inputs
        if self.data is None:
            return mm(inputs, self.projector.columns)
        if self._along is None:
            self._along = mm(self.data, self.projector.columns)
        return _taken(self._along, rows)

    def gradient(self, inputs: Tensor, slope: Tensor) -> Tensor | Outer:
        return Outer(slope, inputs)

    def coordinates(self, gradient: Tensor | Outer, rows: slice) -> Tensor | Outer:
        assert isinstance(gradient, Outer)
        return Outer(gradient.left, self._products(gradient.right, rows))

    def alignment(self, along: Tensor | Outer) -> Tensor:
        return aligned([Outer(term.left, term.along) for term in self._terms], along)


def _taken(data: Tensor, rows: slice) -> Tensor:
    """Some of the rows; a view is made only where it is needed."""
    return data if rows.stop == data.shape[0] and rows.start == 0 else data[rows]


class _Term:
    """One summand δᵀR of v: η1 δ, X_D M, and X_D M diag(λ), of which R is the product with Mᵀ."""

    def __init__(self, rows: slice, left: Tensor, along: Tensor, weighed: Tensor) -> None:
        self.rows, self.left, self.along, self.weighed = rows, left, along, weighed
        self.lengths = torch.linalg.vector_norm(weighed, dim=1)  # ‖R_n‖, as M has orthonormal columns
        self.inner: Tensor | None = None
        self.right: Tensor | None = None
