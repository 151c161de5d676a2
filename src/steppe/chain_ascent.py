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
        if evaluated:
            loss, slope = self.network.output_loss(h, batch)
        else:
            loss = slope = self.network.output_slope(h, batch)
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
        self.importance = None if projector is None else projector.importance
        self._transposed = weight.t()
        self._walked: list[Tensor | Outer] = []  # G_k M

    def output(self, inputs: Tensor, rows: slice) -> Tensor:
        return mm(inputs, self._transposed)

    def back(self, slope: Tensor) -> Tensor:
        return mm(slope, self.at)

    def climb(self, inputs: Tensor, slope: Tensor, rows: slice, clamp: float) -> None:
        g = weight_gradient(slope, inputs)
        if self.basis is None or self.importance is None:
            step = multiplied(g).clamp(-clamp, clamp) if isinstance(g, Tensor) else g.dense().clamp_(-clamp, clamp)
        else:
            along = g @ self.basis
            self._walked.append(along)
            step = multiplied(along * self.importance @ self.basis.t()).clamp_(-clamp, clamp)
        self.at = torch.add(self.at, step, alpha=self.lr, out=self.room)
        self._transposed = self.at.t()

    def gradient(self, inputs: Tensor, slope: Tensor) -> Tensor | Outer:
        return weight_gradient(slope, inputs)

    def coordinates(self, gradient: Tensor | Outer, rows: slice) -> Tensor | Outer:
        assert self.basis is not None
        return gradient @ self.basis

    def alignment(self, along: Tensor | Outer) -> Tensor:
        return aligned(self._walked, along)


class _Wide:
    """A weight that stays: v is kept as terms that are added to outputs. Where a step would have to be clamped, which
    terms cannot be, it is moved after all.
    """

    def __init__(
        self, weight: Tensor, projector: SoftProjector | None, room: Tensor, lr: Tensor, data: Tensor | None
    ) -> None:
        self.weight, self.room, self.lr, self.data = weight, room, lr, data
        self.basis = None if projector is None else projector.columns
        self.importance = None if projector is None else projector.importance
        self._at: Tensor | None = None  # W + v, once it had to be formed
        self._terms: list[_Term] = []
        self._walked: list[Tensor | Outer] = []  # G_k M
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
            output = self._outputs[rows]
        for term in self._terms:
            output = torch.addmm(output, self._inner(inputs, term, rows), term.left)
        return output

    def _inner(self, inputs: Tensor, term: _Term, rows: slice) -> Tensor:
        """X Rᵀ = (X M) (X_D M diag(λ))ᵀ; of the data kept."""
        if self.data is None:
            return times_transposed(self._products(inputs, rows), term.weighed)
        if term.inner is None:
            term.inner = times_transposed(self._products(self.data, slice(None)), term.weighed)
        return term.inner[rows]

    def back(self, slope: Tensor) -> Tensor:
        if self._at is not None:
            return mm(slope, self._at)
        back = mm(slope, self.weight)
        for term in self._terms:
            back = torch.addmm(back, mm(slope, term.left.t()), self._right(term))
        return back

    def climb(self, inputs: Tensor, slope: Tensor, rows: slice, clamp: float) -> None:
        term = self._term(inputs, rows)
        if self.basis is not None:
            self._walked.append(Outer(slope, self._products(inputs, rows)))
        # |Σ_n δ_ni R_nj| ≤ Σ_n max|δ_n| ‖R_n‖, mostly far below the bound.
        if self._at is None and float(slope.abs().amax(1).dot(term.lengths)) <= clamp:
            step = slope * self.lr
            term.left = step if term.fresh else term.left + step
            if term.fresh:
                self._terms.append(term)
            term.fresh = False
            return
        if self._at is None:
            self._at = self.room.copy_(self.weight)
            for earlier in self._terms:
                self._at.addmm_(earlier.left.t(), self._right(earlier))
        self._at.add_(mm(slope.t(), self._right(term)).clamp_(-clamp, clamp).mul_(self.lr))

    def _term(self, inputs: Tensor, rows: slice) -> _Term:
        """The term of a step on these samples; a second step on the same data makes it larger."""
        if self.data is not None and self._terms and self._terms[-1].rows == rows:
            return self._terms[-1]
        along = self._products(inputs, rows)
        return _Term(rows, along if self.importance is None else along * self.importance)

    def _right(self, term: _Term) -> Tensor:
        """R = X_D M diag(λ) Mᵀ."""
        if term.right is None:
            term.right = term.weighed if self.basis is None else mm(term.weighed, self.basis.t())
        return term.right

    def _products(self, inputs: Tensor, rows: slice) -> Tensor:
        """X M, or X itself without a basis."""
        if self.basis is None:
            return inputs
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
        return aligned(self._walked, along)


class _Term:
    """One summand δᵀR of v: η1 δ, and X_D M diag(λ), of which R is the product with Mᵀ."""

    def __init__(self, rows: slice, weighed: Tensor) -> None:
        self.rows, self.weighed = rows, weighed
        self.left = weighed  # until the first step
        self.fresh = True
        self.lengths = torch.linalg.vector_norm(weighed, dim=1)  # ‖R_n‖, as M has orthonormal columns
        self.inner: Tensor | None = None
        self.right: Tensor | None = None
