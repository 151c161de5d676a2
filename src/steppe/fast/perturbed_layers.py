"""The layers of a perturbed chain, each with its own way of computing with W + v.

The inputs of the first layer are the data, which an update sees several times: X Wᵀ and X M are computed once for all
of D ∪ N. A wide weight is not copied. Its perturbation v is kept as a sum of terms δᵀR with R = X_D M diag(η1 λ) Mᵀ, so
that X (W + v)ᵀ = X Wᵀ + Σ (X Rᵀ) δ. A small weight is copied and moved, which costs less than the detour.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, addmm, mm, mv

from steppe.fast.factored import FactoredGrad, columnwise_dot, to_dense
from steppe.fast.linear_chain import Link, weight_gradient
from steppe.fast.matmul import times_transposed


class Projector(Protocol):
    """What a layer needs from a projector P = M diag(λ) Mᵀ."""

    @property
    def columns(self) -> Tensor:
        """M, (in, k); P itself, (in, in), if the projector holds that."""
        ...

    @property
    def rows(self) -> Tensor | None:
        """Mᵀ; None if the projector holds P itself."""
        ...

    @property
    def importance(self) -> Tensor:
        """λ."""
        ...


class PerturbedLayer(ABC):
    """A link of the chain with what the last pass saw: its inputs X, outputs, and the gradient δ in X Wᵀ.

    Args:
        link: The link.
        weight: Its weight W.
        projector: The projector of the weight, if it has one.
        steps: η1 λ, one per basis direction, refreshed before each update; None without a projector.
        scratch: Memory of the weight's shape.
        lr: η1.
        bound: The largest absolute value of an element of a step of v.
    """

    knows_coordinates = False
    """Whether the coordinates of the gradient are known anyway."""
    inputs: Tensor
    outputs: Tensor
    slope: Tensor
    bias: Tensor | None

    def __init__(
        self,
        link: Link,
        weight: Tensor,
        projector: Projector | None,
        steps: Tensor | None,
        scratch: Tensor,
        lr: Tensor,
        bound: float,
    ) -> None:
        self.link, self.weight, self.scratch, self.lr, self.bound = link, weight, scratch, lr, bound
        self.projector, self.back_rows = projector, None if projector is None else projector.rows
        self.steps = lr if steps is None or self.back_rows is None else steps  # P has λ in it
        if projector is not None:
            self.columns = projector.columns
        self.activation = link.activation

    def spread(self, weighted: Tensor) -> Tensor:
        """From coordinates in the basis back to inputs; a projection by P itself is one already."""
        return weighted if self.back_rows is None else mm(weighted, self.back_rows)

    def finish(self, product: Tensor) -> Tensor:
        """Add the bias and apply the activation; the product may be needed again."""
        if self.bias is not None:
            product = product + self.bias
        return product if self.activation is None else self.activation.forward(product)

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


class SmallLayer(PerturbedLayer):
    """A small weight: W + v is formed."""

    def start(self, data: Tensor) -> None:
        self._at, self._transposed = self.weight, self.weight.t()
        self._path: list[Tensor | FactoredGrad] = []  # G_k M of each step

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
            self._path.append(FactoredGrad(self.slope, along))
            step = mm(self.slope.t(), self.spread(along * self.steps))
        else:
            along = mm(g, self.columns)
            self._path.append(along)
            step = self.spread(along * self.steps)
        self._at = torch.add(self._at, step.clamp_(-self.bound, self.bound), out=self.scratch)
        self._transposed = self._at.t()

    def gradient(self) -> Tensor | FactoredGrad:
        return weight_gradient(self.slope, self.inputs)

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        return gradient @ self.columns

    def alignment(self, along: Tensor | FactoredGrad) -> Tensor:
        return columnwise_dot(self._path, along)


class WideLayer(PerturbedLayer):
    """A wide weight: v is kept as terms that are added to outputs. Terms cannot be clamped, so W + v is formed once a
    step needs that.
    """

    def start(self, data: Tensor) -> None:
        self._at: Tensor | None = None  # W + v, once it is formed
        self._terms: list[_Term] = []

    def product(self, inputs: Tensor, rows: slice | None) -> Tensor:
        if self._at is not None:
            return times_transposed(inputs, self._at)
        output = times_transposed(inputs, self.weight)
        for term in self._terms:  # X Rᵀ = (X M) (X_D M diag(η1 λ))ᵀ
            seen = self.inputs if self.back_rows is None else self.along(rows)
            output = addmm(output, times_transposed(seen, term.weighted), term.left)
        return output

    def along(self, rows: slice | None) -> Tensor:
        """X M, or X without a basis."""
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
        # |Σ_n δ_ni R_nj| ≤ Σ_n |δ_ni| ‖R_n‖, which is mostly far below the limit.
        if self._at is None and float(mv(slope.abs().t(), term.lengths).amax()) > self.bound:
            self._at = self.scratch.copy_(self.weight)
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
        """The term of v that this step belongs to."""
        along = self.along(rows)
        return _Term(rows, along, along * self.steps)

    def _right(self, term: _Term) -> Tensor:
        """R."""
        if term.right is None:
            term.right = self.spread(term.weighted)
        return term.right

    def gradient(self) -> Tensor | FactoredGrad:
        return FactoredGrad(self.slope, self.inputs)

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        return FactoredGrad(self.slope, self.along(None))

    def alignment(self, along: Tensor | FactoredGrad) -> Tensor:
        return columnwise_dot([FactoredGrad(term.left, term.along) for term in self._terms], along)


class FirstLayer(WideLayer):
    """A wide weight whose inputs are the data: products with all rows are computed once per update."""

    knows_coordinates = True

    def start(self, data: Tensor) -> None:
        super().start(data)
        self._products = times_transposed(data, self.weight)  # X Wᵀ
        self._along = data if self.projector is None else mm(data, self.columns)  # X M, or X P
        self._seen = data if self.back_rows is None else self._along

    def product(self, inputs: Tensor, rows: slice | None) -> Tensor:
        if self._at is not None:
            return times_transposed(inputs, self._at)
        output = self._products if rows is None else self._products[rows]
        for term in self._terms:
            if term.inner is None:
                term.inner = mm(self._seen, term.weighted.t())
            output = addmm(output, term.inner if rows is None else term.inner[rows], term.left)
        return output

    def along(self, rows: slice | None) -> Tensor:
        return self._along if rows is None else self._along[rows]

    def term(self, rows: slice | None) -> _Term:
        if self._terms and self._terms[-1].rows == rows:  # the same data again
            return self._terms[-1]
        return super().term(rows)


class _Term:
    """One term δᵀR of v, with R = X_D M diag(η1 λ) Mᵀ.

    Args:
        rows: The rows of the data that it comes from.
        along: X_D M.
        weighted: X_D M diag(η1 λ).
    """

    left: Tensor
    """δ."""

    def __init__(self, rows: slice | None, along: Tensor, weighted: Tensor) -> None:
        self.rows, self.along, self.weighted = rows, along, weighted
        self.lengths = torch.linalg.vector_norm(weighted, dim=1)  # ‖R_n‖, as M has orthonormal columns
        self.inner: Tensor | None = None
        self.right: Tensor | None = None
