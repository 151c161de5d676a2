"""Sharpness evaluation (the inner loop of Algorithm 1) on a chain of linear layers, sharing work between its passes.

The inputs of the first layer are the data, which an update sees several times: X Wᵀ and X M are computed once for all
of D ∪ N. A wide weight is not copied. Its perturbation v is kept as a sum of terms δᵀR with R = X_D M diag(η1 λ) Mᵀ, so
that X (W + v)ᵀ = X Wᵀ + Σ (X Rᵀ) δ. A small weight is copied and moved, which costs less than the detour.

At a batch size of ten, the number of calls is what takes the time. So what stays the same between updates is created
once, and η1 is multiplied into λ for all layers at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, addmm, mm, mv

from steppe.fast.factored import FactoredGrad, columnwise_dot, to_dense
from steppe.fast.linear_chain import WIDE, LinearChain, Link, weight_gradient
from steppe.fast.matmul import times_transposed
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
    """What a perturbed chain needs of its network."""

    @property
    def scratch(self) -> ScratchMemory:
        """Its scratch memory."""
        ...

    @property
    def output_loss(self) -> LogitsLoss:
        """Its loss in closed form."""
        ...


class Projector(Protocol):
    """What it needs of a projector P = M diag(λ) Mᵀ."""

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
        self.layers: list[_Layer] = []
        for link, weight in zip(chain.links, chain.weights, strict=True):
            # On other devices it costs less to move a weight than to wait for the check whether to clamp.
            small = weight.numel() <= WIDE or samples >= weight.shape[0] or not weight.is_cpu
            kind = _Small if small else _Wide if self.layers else _First
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


class _Layer(ABC):
    """A link of the chain with what the last pass saw: its inputs X, outputs, and the gradient δ in X Wᵀ."""

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


class _Small(_Layer):
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


class _Wide(_Layer):
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


class _First(_Wide):
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
    """One term δᵀR of v, with R = η1 X_D P = X_D M diag(η1 λ) Mᵀ.

    Args:
        rows: The rows of the data that it comes from.
        along: X_D M, or X_D P.
        weighted: X_D M diag(η1 λ), or R.
    """

    left: Tensor
    """δ."""

    def __init__(self, rows: slice | None, along: Tensor, weighted: Tensor) -> None:
        self.rows, self.along, self.weighted = rows, along, weighted
        self.lengths = torch.linalg.vector_norm(weighted, dim=1)  # ‖R_n‖: it is R, or M has orthonormal columns
        self.inner: Tensor | None = None
        self.right: Tensor | None = None
