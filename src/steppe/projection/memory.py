"""The gradient memory of a whole network: one soft projector per covered weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.errors import LayerDivergedError, ModelError
from steppe.network.network import Network
from steppe.projection.basis import Representation, directions, leading
from steppe.projection.extend_basis import grown
from steppe.projection.hooks import attention_in_steps, capture_inputs
from steppe.projection.importance import ImportanceRule
from steppe.projection.layers import ProjectedWeight
from steppe.projection.projector import SoftProjector
from steppe.runtime.session import yield_point
from steppe.tensors.factored import FactoredGrad, Gradient

_FAST = 0.99
"""From this importance on a direction counts as held fast."""


class GradientMemory:
    """Empty until the first `rebuild` or `grow`; a parameter without a projector passes through unchanged."""

    def __init__(self, rule: ImportanceRule, covered: Mapping[str, ProjectedWeight] = MappingProxyType({})) -> None:
        self.rule, self.covered = rule, dict(covered)  # a learner may be copied, a proxy may not
        self.linear = {name: weight.layers for name, weight in covered.items() if weight.factorable}
        if rule.dynamic:  # known before anything is learnt
            own = {name: dict(weight.layers[0].named_parameters())["weight"] for name, weight in covered.items()}
            _refuse_several_kinds({name: (p.dtype, p.device) for name, p in own.items()})
        self.projectors = {}

    @property
    def projectors(self) -> Mapping[str, SoftProjector]:
        """The projector of each weight that has one; to be set as a whole."""
        return self._projectors

    @projectors.setter
    def projectors(self, projectors: Mapping[str, SoftProjector]) -> None:
        # The importances lie in one row of numbers, of which each projector sees its part: one call moves them all.
        kinds = {name: (p.importance.dtype, p.importance.device) for name, p in projectors.items()}
        if len(set(kinds.values())) > 1:
            if self.rule.dynamic:
                _refuse_several_kinds(kinds)
            self._projectors, self.importance = dict(projectors), torch.empty(0, device="cpu")
            return
        rows = [p.importance.reshape(-1) for p in projectors.values()]
        importance = torch.cat(rows) if rows else torch.empty(0, device="cpu")
        parts = torch.split(importance, [row.numel() for row in rows])
        seen = {
            name: p.with_importance(part.view_as(p.importance))
            for (name, p), part in zip(projectors.items(), parts, strict=True)
        }
        self._projectors, self.importance = seen, importance

    def __bool__(self) -> bool:
        return bool(self._projectors)

    def coordinates(self, gradient: Gradient) -> Gradient:
        """G M for every covered weight."""
        return {name: p.coordinates(gradient[name]) for name, p in self._projectors.items()}

    def project_onto(self, gradient: Gradient, known: Gradient | None = None) -> Gradient:
        """The part of a gradient within the memory, softly: G M diag(λ) Mᵀ; `known` may hold G M of some weights."""
        return self._parts(gradient, known, SoftProjector.project_onto)

    def project_out(self, gradient: Gradient, known: Gradient | None = None) -> Gradient:
        """The part of a gradient outside the memory, softly: G − G M diag(λ) Mᵀ."""
        return self._parts(gradient, known, SoftProjector.project_out)

    def _parts(
        self,
        gradient: Gradient,
        known: Gradient | None,
        part: Callable[[SoftProjector, Tensor | FactoredGrad, Tensor | FactoredGrad | None], Tensor | FactoredGrad],
    ) -> Gradient:
        parts = dict(gradient)
        for name, projector in self._projectors.items():
            parts[name] = part(projector, gradient[name], None if known is None else known.get(name))
        return parts

    def ranks(self) -> dict[str, dict[str, int]]:
        """How many directions each covered weight's basis holds, and of how many."""
        return {name: {"rank": p.rank, "of": p.size} for name, p in self.projectors.items()}

    def saturated(self) -> set[str]:
        """The covered weights that have nowhere left to learn in: every direction is in the basis and held fast. λ that
        moves begins at 1 and stays near it.
        """
        return {
            name
            for name, p in self.projectors.items()
            if p.rank == p.size and (self.rule.dynamic or bool((p.held >= _FAST).all()))
        }

    def importance_distributions(self) -> dict[str, dict[str, float | list[float]]]:
        """λ's mean and deciles over the directions that each covered weight's basis holds."""
        found: dict[str, dict[str, float | list[float]]] = {}
        for name, projector in self.projectors.items():
            values = projector.held.double()
            deciles = torch.quantile(values, torch.linspace(0, 1, 11, dtype=values.dtype, device=values.device))
            found[name] = {"mean": float(values.mean()), "deciles": deciles.tolist()}
        return found

    def move_importances(self, gradient: Tensor | None) -> None:
        """One update of λ by the rule, given ∂L/∂λ of all weights in a row; none, where nothing is to move."""
        if gradient is not None:
            self.rule.move(self.importance, gradient)

    def rebuild(self, network: Network, x: Tensor, threshold: float, chunk: int = 64) -> list[str]:
        """UpdateGPM: new bases from the covered layers' inputs on stored samples x, replacing the old ones; λ starts
        anew. Returns remarks on weights that have been closed by it.
        """
        before, projectors = self.saturated(), {}
        thresholds = dict.fromkeys(self.covered, threshold)
        for name, representation in self._represented(network, x, thresholds, chunk).items():
            yield_point()
            spectrum = representation.spectrum()
            if spectrum is None:  # a layer the forward never used
                continue
            kept = leading(spectrum, threshold)
            if kept.values.shape[-1] > 0:  # a layer whose inputs were all zero needs no direction
                projectors[name] = _held(network, name, kept.vectors, self.rule.initial(kept.values))
        self.projectors = projectors
        return self._remarks(before)

    def extend(
        self, network: Network, x: Tensor, thresholds: Mapping[str, float], *, first: bool, chunk: int = 64
    ) -> list[str]:
        """GPM's update: the bases grow by what they miss of the inputs on stored samples x, to each weight's own share
        of energy. λ accumulates: what the rule gives for this task is added to what was there, up to 1. Returns remarks
        on weights that have been closed by it, and on those that it leaves without a basis.
        """
        before, projectors, bare = self.saturated(), dict(self.projectors), []
        for name, representation in self._represented(network, x, thresholds, chunk).items():
            yield_point()
            old = projectors.get(name)
            growth = grown(representation, None if old is None else old.basis, thresholds[name], first=first)
            if growth is None:
                continue
            if growth.basis.shape[-1] == 0:
                if bool((representation.energy() > 0).any()):
                    bare.append(_bare(name, thresholds[name]))
                continue
            importance = self.rule.initial(growth.strengths)
            if old is not None:
                importance[:, : old.basis.shape[-1]] += old.importance * directions(old.basis)
            projectors[name] = _held(network, name, growth.basis, importance.clamp(max=1))
        self.projectors = projectors
        return [*bare, *self._remarks(before)]

    def _remarks(self, before: Collection[str]) -> list[str]:
        """On the weights that are closed and were not before: said once, not after every later task."""
        closed = self.saturated()
        return [
            f"the basis of {name!r} holds all {p.size} directions of its inputs, so that this weight can no longer "
            "learn: a lower threshold would have left it room."
            for name, p in self.projectors.items()
            if name in closed and name not in before
        ]

    def _represented(
        self, network: Network, x: Tensor, thresholds: Mapping[str, float], chunk: int
    ) -> dict[str, Representation]:
        """Every covered layer's inputs on stored samples x, in eval mode."""
        representations = {name: Representation(thresholds[name]) for name in self.covered}
        with (
            torch.no_grad(),
            network.mode(training=False),
            attention_in_steps(network.model),
            capture_inputs(
                self.covered, lambda weight, layer, x: representations[weight.name].add_call(weight, layer, x)
            ),
        ):
            for part in torch.split(x, network.batch_size(len(x), chunk)):
                network.input_copies.call(network.prepare_inputs(part))
                yield_point()
        for name, representation in representations.items():
            if not representation.is_finite():  # as after a last update that went too far: no loss has shown it yet
                raise LayerDivergedError(
                    f"the inputs of the layer with the weight {name!r} are no longer finite, or too large to be "
                    "squared: lower the step size (lr, ascent_lr) or check the data."
                )
        return representations

    def state_dict(self) -> State:
        """Bases and importances; the rule's step size is the business of whoever slows it down."""
        return {name: [p.basis, p.importance] for name, p in self.projectors.items()}

    def load_state_dict(self, state: State) -> None:
        """The same bases and importances again."""
        for name, (basis, importance) in state.items():
            fits = basis.ndim == 3 and importance.shape == (basis.shape[0], basis.shape[2])
            if name not in self.covered or not fits:
                raise ValueError(f"the basis of {name!r} is not one of a covered weight, with its importances")
        self.projectors = {name: SoftProjector(basis, importance) for name, (basis, importance) in state.items()}

    def memory_bytes(self) -> dict[str, int]:
        """Memory of bases and importances."""
        return {
            "bases": sum(p.basis.nbytes for p in self.projectors.values()),
            "importances": sum(p.importance.nbytes for p in self.projectors.values()),
        }


def _refuse_several_kinds(kinds: Mapping[str, tuple[torch.dtype, torch.device]]) -> None:
    """Refuse covered weights of several types, or on several devices, where λ of all of them moves in one row."""
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise ModelError(
                "the covered weights are of several types, or on several devices "
                f"({first!r} is {_named(kinds[first])}, {name!r} {_named(kind)}), and their importances move together: "
                "make the weights alike (model.float()), leave some out with exclude=(...), or set importance to ones "
                "or spectral."
            )


def _named(kind: tuple[torch.dtype, torch.device]) -> str:
    return f"{kind[0]} on {kind[1]}"


def _held(network: Network, name: str, basis: Tensor, importance: Tensor) -> SoftProjector:
    """A basis for a weight, in the weight's precision."""
    dtype = network.trainable[name].dtype
    return SoftProjector(basis.to(dtype).contiguous(), importance.to(dtype))


def _bare(name: str, threshold: float) -> str:
    """A remark on a weight that is left without a basis."""
    return (
        f"the basis of {name!r} is empty, so that nothing holds this weight: a single direction has more than the "
        f"threshold's share of its inputs, {threshold:g}, and the first task leaves out the direction that crosses it; "
        "a higher threshold, or inputs about 0, would mend that."
    )
