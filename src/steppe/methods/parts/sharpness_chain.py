"""Sharpness evaluation (Algorithm 1, the inner loop) on a chain of linear layers: what `perturbation` does, with what
its passes share (docs/performance.md: the identities).

The first layer's inputs are the data, which an update sees several times: X Wᵀ and X M are had once for all of D ∪ N.
A wide weight is not moved at all. Its v is a sum of terms δᵀR with R = X_D M diag(η1 λ) Mᵀ, so that
X (W + v)ᵀ = X Wᵀ + Σ (X Rᵀ) δ. A small weight is moved, which then costs less than the detour.

Written for few and cheap calls, because at a batch of ten they are what takes the time: what stays from update to
update is made once, and η1 is multiplied into λ, all layers' at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, addmm, mm, mv

from steppe.network.linear_chain import WIDE, LinearChain, Link, weight_gradient
from steppe.network.network import Network
from steppe.projection.memory import GradientMemory
from steppe.projection.projector import SoftProjector
from steppe.tensors.batch import Batch
from steppe.tensors.factored import FactoredGrad, columnwise_dot, to_dense
from steppe.tensors.matmul import times_transposed

Found = tuple[dict[str, Tensor | FactoredGrad], dict[str, Tensor | FactoredGrad], Tensor | None]
"""The gradient, the gradient along the bases, and the gradient in λ, all layers' in a row."""


class PerturbedChain:
    """A chain at w + v: v = 0 from `start` on, until steps are taken."""

    def __init__(
        self, chain: LinearChain, network: Network, memory: GradientMemory, samples: int, lr: float, clamp: float
    ) -> None:
        self._network, self._lr = network, network.scratch.scalar(lr)
        self._made_for = chain, memory.projectors, samples
        self._importance = memory.importance
        self._steps = torch.empty_like(memory.importance)  # η1 λ, all layers'
        sizes = [p.importance.numel() for p in memory.projectors.values()]
        steps = dict(zip(memory.projectors, torch.split(self._steps, sizes), strict=True))
        self.layers: list[_Layer] = []
        for link, weight in zip(chain.links, chain.weights, strict=True):
            # Elsewhere than on a CPU it costs less to move a weight than to wait for what says whether to clamp.
            small = weight.numel() <= WIDE or samples >= weight.shape[0] or not weight.is_cpu
            kind = _Small if small else _Wide if self.layers else _First
            known = memory.projectors.get(link.weight)
            room = network.scratch.tensor(link.weight)
            self.layers.append(kind(link, weight, known, steps.get(link.weight), room, self._lr, abs(lr) * clamp))
        self._first, self._downwards = self.layers[0], self.layers[::-1]

    def fits(self, chain: LinearChain, projectors: Mapping[str, SoftProjector], samples: int) -> bool:
        """Whether it was made for this chain, these bases and as many samples."""
        made = self._made_for
        return made[0] is chain and made[1] is projectors and made[2] == samples

    def start(self, data: Tensor) -> None:
        """Begin at v = 0, with samples of which each pass sees some."""
        if self._made_for[1]:
            torch.mul(self._importance, self._lr, out=self._steps)
        for layer in self.layers:
            layer.bias = layer.link.layer.bias
            layer.start(data)

    def forward_backward(self, batch: Batch, rows: slice | None, *, evaluated: bool = True) -> Tensor:
        """One forward and backward where the chain stands now, on the samples `rows` of the data, or on all; returns
        the loss if it is to be evaluated.
        """
        h = batch.x
        for layer in self.layers:
            layer.inputs = h
            h = layer.product(h, rows)
            if layer.bias is not None:
                h = h + layer.bias
            if layer.activation is not None:
                h = layer.activation.forward(h)
            layer.outputs = h
        if evaluated:
            loss, slope = self._network.output_loss.loss_and_slope(h, batch)
        else:
            loss = slope = self._network.output_loss.slope(h, batch)
        for layer in self._downwards:
            if layer.activation is not None:
                slope = layer.activation.backward(slope, layer.outputs)
            layer.slope = slope
            if layer is not self._first:
                slope = layer.back(slope)
        return loss

    def ascend(self, rows: slice | None) -> None:
        """One step of v along the gradient of the last pass, which saw the same samples, within the memory."""
        for layer in self.layers:
            layer.ascend(rows)
            if layer.bias is not None:
                layer.bias = layer.bias + layer.slope.sum(0).mul_(self._lr).clamp_(-layer.bound, layer.bound)

    def gradient(self, *, columnwise_dot: bool) -> Found:
        """What the last pass gives, which must have seen all the data; the gradient in λ only if `aligned`, and that
        along the bases then too, or where it costs nothing.
        """
        gradient: dict[str, Tensor | FactoredGrad] = {}
        along: dict[str, Tensor | FactoredGrad] = {}
        alignment: dict[str, Tensor] = {}
        for layer in self.layers:
            name = layer.link.weight
            gradient[name] = g = layer.gradient()
            if layer.bias is not None:
                gradient[layer.link.bias] = layer.slope.sum(0)
            if layer.projector is not None and (columnwise_dot or layer.knows_coordinates):
                along[name] = c = layer.coordinates(g)
                if columnwise_dot:
                    alignment[name] = layer.alignment(c)
        if not alignment:
            return gradient, along, None
        slopes = torch.cat([alignment[name] for name in self._made_for[1]], 1)
        return gradient, along, slopes.mul_(self._lr).view(-1)


class _Layer(ABC):
    """A linear layer with what follows it, and what it saw in the last pass: inputs X, outputs, and the gradient δ in
    what X Wᵀ gave.
    """

    knows_coordinates = False
    """Whether the gradient along the bases is had for nothing."""
    inputs: Tensor
    outputs: Tensor
    slope: Tensor
    bias: Tensor | None

    def __init__(
        self,
        link: Link,
        weight: Tensor,
        projector: SoftProjector | None,
        steps: Tensor | None,
        room: Tensor,
        lr: Tensor,
        bound: float,
    ) -> None:
        self.link, self.weight, self.room, self.lr, self.bound = link, weight, room, lr, bound
        self.projector, self.steps = projector, lr if steps is None else steps
        if projector is not None:
            self.columns, self.back_rows = projector.columns, projector.rows
        self.activation = link.activation

    @abstractmethod
    def start(self, data: Tensor) -> None:
        """Begin at v = 0."""

    @abstractmethod
    def product(self, inputs: Tensor, rows: slice | None) -> Tensor:
        """X (W + v)ᵀ."""

    @abstractmethod
    def back(self, slope: Tensor) -> Tensor:
        """δ (W + v)."""

    @abstractmethod
    def ascend(self, rows: slice | None) -> None:
        """One step of v."""

    @abstractmethod
    def gradient(self) -> Tensor | FactoredGrad:
        """G = δᵀX."""

    @abstractmethod
    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        """G M."""

    @abstractmethod
    def alignment(self, along: Tensor | FactoredGrad) -> Tensor:
        """∂L/∂λ / η1, (1, k), from G M."""


class _Small(_Layer):
    """A weight that is moved: W + v is formed."""

    def start(self, data: Tensor) -> None:
        self._at, self._transposed = self.weight, self.weight.t()
        self._walked: list[Tensor | FactoredGrad] = []  # G_k M

    def product(self, inputs: Tensor, rows: slice | None) -> Tensor:
        return mm(inputs, self._transposed)

    def back(self, slope: Tensor) -> Tensor:
        return mm(slope, self._at)

    def ascend(self, rows: slice | None) -> None:
        g = weight_gradient(self.slope, self.inputs)
        if self.projector is None:
            step = to_dense(g).mul_(self.lr)
        elif isinstance(g, FactoredGrad):
            along = mm(self.inputs, self.columns)
            self._walked.append(FactoredGrad(self.slope, along))
            step = mm(self.slope.t(), mm(along * self.steps, self.back_rows))
        else:
            along = mm(g, self.columns)
            self._walked.append(along)
            step = mm(along * self.steps, self.back_rows)
        self._at = torch.add(self._at, step.clamp_(-self.bound, self.bound), out=self.room)
        self._transposed = self._at.t()

    def gradient(self) -> Tensor | FactoredGrad:
        return weight_gradient(self.slope, self.inputs)

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        return gradient @ self.columns

    def alignment(self, along: Tensor | FactoredGrad) -> Tensor:
        return columnwise_dot(self._walked, along)


class _Wide(_Layer):
    """A weight that stays: v is kept as terms that are added to outputs. Where a step would have to be clamped, which
    terms cannot be, it is moved after all.
    """

    def start(self, data: Tensor) -> None:
        self._at: Tensor | None = None  # W + v, once it had to be formed
        self._terms: list[_Term] = []

    def product(self, inputs: Tensor, rows: slice | None) -> Tensor:
        if self._at is not None:
            return times_transposed(inputs, self._at)
        output = times_transposed(inputs, self.weight)
        for term in self._terms:  # X Rᵀ = (X M) (X_D M diag(η1 λ))ᵀ
            output = addmm(output, times_transposed(self.along(rows), term.weighed), term.left)
        return output

    def along(self, rows: slice | None) -> Tensor:
        """X M, or X itself without a basis."""
        return self.inputs if self.projector is None else mm(self.inputs, self.columns)

    def back(self, slope: Tensor) -> Tensor:
        if self._at is not None:
            return mm(slope, self._at)
        back = mm(slope, self.weight)
        for term in self._terms:
            back = addmm(back, mm(slope, term.left.t()), self._right(term))
        return back

    def ascend(self, rows: slice | None) -> None:
        term, slope = self.term(rows), self.slope
        # |Σ_n δ_ni R_nj| ≤ Σ_n |δ_ni| ‖R_n‖, mostly far below the bound.
        if self._at is None and float(mv(slope.abs().t(), term.lengths).amax()) > self.bound:
            self._at = self.room.copy_(self.weight)
            for earlier in self._terms:
                self._at.addmm_(earlier.left.t(), self._right(earlier))
        if self._at is not None:
            self._at.add_(mm(slope.t(), self._right(term)).clamp_(-self.bound, self.bound))
        if self._terms and term is self._terms[-1]:
            term.left = term.left + slope
        else:
            term.left = slope
            self._terms.append(term)

    def term(self, rows: slice | None) -> _Term:
        """The summand of v that this step belongs to."""
        along = self.along(rows)
        return _Term(rows, along, along * self.steps)

    def _right(self, term: _Term) -> Tensor:
        """R."""
        if term.right is None:
            term.right = term.weighed if self.projector is None else mm(term.weighed, self.back_rows)
        return term.right

    def gradient(self) -> Tensor | FactoredGrad:
        return FactoredGrad(self.slope, self.inputs)

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        return FactoredGrad(self.slope, self.along(None))

    def alignment(self, along: Tensor | FactoredGrad) -> Tensor:
        return columnwise_dot([FactoredGrad(term.left, term.along) for term in self._terms], along)


class _First(_Wide):
    """The same where the inputs are the data: products with all of it are formed once for an update."""

    knows_coordinates = True

    def start(self, data: Tensor) -> None:
        super().start(data)
        self._products = times_transposed(data, self.weight)  # X Wᵀ
        self._along = data if self.projector is None else mm(data, self.columns)  # X M

    def product(self, inputs: Tensor, rows: slice | None) -> Tensor:
        if self._at is not None:
            return times_transposed(inputs, self._at)
        output = self._products if rows is None else self._products[rows]
        for term in self._terms:
            if term.inner is None:
                term.inner = mm(self._along, term.weighed.t())
            output = addmm(output, term.inner if rows is None else term.inner[rows], term.left)
        return output

    def along(self, rows: slice | None) -> Tensor:
        return self._along if rows is None else self._along[rows]

    def term(self, rows: slice | None) -> _Term:
        if self._terms and self._terms[-1].rows == rows:  # the same data once more
            return self._terms[-1]
        return super().term(rows)


class _Term:
    """One summand δᵀR of v: the samples it comes from, δ, X_D M, and X_D M diag(η1 λ), of which R is the product with
    Mᵀ.
    """

    left: Tensor

    def __init__(self, rows: slice | None, along: Tensor, weighed: Tensor) -> None:
        self.rows, self.along, self.weighed = rows, along, weighed
        self.lengths = torch.linalg.vector_norm(weighed, dim=1)  # ‖R_n‖, as M has orthonormal columns
        self.inner: Tensor | None = None
        self.right: Tensor | None = None
