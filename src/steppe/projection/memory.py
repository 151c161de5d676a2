"""The gradient memory of a whole network: one soft projector per covered weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from steppe.network import Network
from steppe.projection.basis import Representation, leading
from steppe.projection.capture import captured_inputs
from steppe.projection.importance import ImportanceRule, Importances
from steppe.projection.layers import CoveredWeight, linear_inputs
from steppe.projection.projector import SoftProjector
from steppe.types import Direction, Gradient, Outer, multiplied


class GradientMemory:
    """Empty until the first `rebuild`; a parameter without a projector passes through unchanged."""

    def __init__(self, rule: ImportanceRule, covered: Mapping[str, CoveredWeight] = MappingProxyType({})) -> None:
        self.rule, self.covered = rule, covered
        self.linear = {name: weight.layers for name, weight in covered.items() if weight.rule is linear_inputs}
        self.projectors: dict[str, SoftProjector] = {}

    def __bool__(self) -> bool:
        return bool(self.projectors)

    def coordinates(self, gradient: Gradient) -> Gradient:
        """G M for every covered weight."""
        return {name: p.coordinates(gradient[name]) for name, p in self.projectors.items()}

    def within(self, gradient: Gradient, known: Gradient | None = None) -> Direction:
        """The part of a gradient within the memory, softly: G M diag(λ) Mᵀ; `known` may hold G M."""
        return self._parts(gradient, known, SoftProjector.within)

    def outside(self, gradient: Gradient, known: Gradient | None = None) -> Direction:
        """The part of a gradient outside the memory, softly: G − G M diag(λ) Mᵀ."""
        return self._parts(gradient, known, SoftProjector.outside)

    def _parts(
        self,
        gradient: Gradient,
        known: Gradient | None,
        part: Callable[[SoftProjector, Tensor | Outer, Tensor | Outer | None], Tensor],
    ) -> Direction:
        known = known or {}
        covered = {name: part(p, gradient[name], known.get(name)) for name, p in self.projectors.items()}
        return {name: covered[name] if name in covered else multiplied(g) for name, g in gradient.items()}

    @property
    def importances(self) -> Importances:
        """λ of every covered weight."""
        return {name: p.importance for name, p in self.projectors.items()}

    @importances.setter
    def importances(self, values: Importances) -> None:
        self.projectors = {name: p.with_importance(values[name]) for name, p in self.projectors.items()}

    def move_importances(self, gradient: Importances) -> None:
        """One update of λ by the rule."""
        if gradient:
            self.importances = self.rule.moved(self.importances, gradient)

    def rebuild(self, network: Network, x: Tensor, threshold: float, chunk: int = 64) -> None:
        """UpdateGPM: new bases from the covered layers' inputs on stored samples x, replacing the old ones; λ starts
        anew.
        """
        representations = {name: Representation() for name in self.covered}
        with (
            torch.no_grad(),
            network.mode(training=False),
            captured_inputs(self.covered, lambda name, columns: representations[name].add(columns)),
        ):
            for part in torch.split(x, chunk):
                network.model(network.prepare_inputs(part))
        self.projectors = {}
        for name, representation in representations.items():
            spectrum = representation.spectrum()
            if spectrum is None:  # a layer the forward never used
                continue
            kept = leading(spectrum, threshold)
            if kept.values.shape[-1] > 0:
                dtype = network.parameters[name].dtype
                self.projectors[name] = SoftProjector(
                    kept.vectors.to(dtype).contiguous(), self.rule.initial(kept.values).to(dtype)
                )

    def bytes_held(self) -> int:
        """Memory of bases and importances."""
        return sum(p.basis.nbytes + p.importance.nbytes for p in self.projectors.values())
