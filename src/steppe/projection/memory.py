"""The gradient memory of a network: one soft projector per covered weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.errors import ModelError
from steppe.fast.factored import FactoredGrad, Gradient, ParamDict
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.projection.collect import Collected, collect_inputs
from steppe.projection.extend_basis import ExtendedBasis, extend_basis
from steppe.projection.importance import ImportanceRule
from steppe.projection.layers import ProjectedWeight
from steppe.projection.layouts import make_projector
from steppe.projection.projector import SoftProjector
from steppe.projection.row_counts import RowCounts
from steppe.runtime.session import yield_point
from steppe.runtime.warn import Caution
from steppe.tensors.nest import Nest, nest_length, split_nest

_SATURATED = 0.99
"""The importance from which a direction counts as frozen."""


class GradientMemory:
    """Soft projectors of a network's weights; gradients of weights without a projector pass through unchanged.

    The memory is empty until the first `rebuild` (FS-DGPM: new bases) or `extend` (GPM: growing bases).

    Args:
        rule: How λ starts and moves.
        covered: The weights to project, by parameter name, from `projected_weights` or `find_covered_weights`.

    Raises:
        ModelError: If the rule is dynamic and the weights differ in type or device.

    Example:
        >>> import torch
        >>> from steppe.network.network import Network
        >>> from steppe.projection.importance import Ones
        >>> from steppe.projection.layers import projected_weights
        >>> from steppe.projection.memory import GradientMemory
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> memory = GradientMemory(Ones(), projected_weights(model))
        >>> inputs = torch.randn(10, 1) * torch.tensor([1.0, 1.0, 0.0, 0.0])  # all along one direction
        >>> memory.rebuild(Network(model), inputs, threshold=0.99)
        []
        >>> memory.ranks()
        {'weight': {'rank': 1, 'of': 4}}
        >>> outside = memory.project_out({"weight": torch.ones(2, 4)})
        >>> bool((outside["weight"] @ inputs.T).abs().max() < 1e-5)
        True
    """

    def __init__(self, rule: ImportanceRule, covered: Mapping[str, ProjectedWeight] = MappingProxyType({})) -> None:
        self.rule, self.covered = rule, dict(covered)  # learners can be deep-copied, a mapping proxy cannot
        self.linear = {name: weight.layers for name, weight in covered.items() if weight.factorable}
        if rule.dynamic:  # fail before anything is learned
            own = {name: weight.parameter for name, weight in covered.items()}
            _require_one_kind({name: (p.dtype, p.device) for name, p in own.items()})
        self.projectors = {}

    @property
    def covered(self) -> Mapping[str, ProjectedWeight]:
        """The weights to project, by parameter name."""
        return self._covered

    @covered.setter
    def covered(self, covered: Mapping[str, ProjectedWeight]) -> None:
        self._covered = covered
        self._normalized = [(weight, weight.norm) for weight in covered.values() if weight.norm is not None]

    @property
    def projectors(self) -> Mapping[str, SoftProjector]:
        """The projectors by parameter name; assign a whole new mapping to change them."""
        return self._projectors

    @projectors.setter
    def projectors(self, projectors: Mapping[str, SoftProjector]) -> None:
        # The importances of all weights are one tensor with a view per projector, so that one call updates them all.
        kinds = {name: (p.importance.dtype, p.importance.device) for name, p in projectors.items()}
        if len(set(kinds.values())) > 1:
            if self.rule.dynamic:
                _require_one_kind(kinds)
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
        """The coordinates G M of a gradient along the bases.

        Args:
            gradient: The gradient by parameter name.

        Returns:
            G M for every weight with a projector.
        """
        return {name: p.coordinates(gradient[name]) for name, p in self._projectors.items()}

    def project_onto(self, gradient: Gradient, known: Gradient | None = None) -> Gradient:
        """The component of a gradient within the memory: G M diag(λ) Mᵀ.

        Args:
            gradient: The gradient by parameter name.
            known: G M of the weights for which it is already known.

        Returns:
            The component; gradients of weights without a projector unchanged.
        """
        return self._projected(gradient, known, lambda projector, g, c: projector.project_onto(g, c))

    def project_out(self, gradient: Gradient, known: Gradient | None = None) -> Gradient:
        """The component of a gradient outside the memory: G − G M diag(λ) Mᵀ.

        Args:
            gradient: The gradient by parameter name.
            known: G M of the weights for which it is already known.

        Returns:
            The component; gradients of weights without a projector unchanged.
        """
        return self._projected(gradient, known, lambda projector, g, c: projector.project_out(g, c))

    def _projected(
        self,
        gradient: Gradient,
        known: Gradient | None,
        project: Callable[[SoftProjector, Tensor | FactoredGrad, Tensor | FactoredGrad | None], Tensor | FactoredGrad],
    ) -> Gradient:
        parts = dict(gradient)
        for name, projector in self._projectors.items():
            parts[name] = project(projector, gradient[name], None if known is None else known.get(name))
        return parts

    @property
    def limit_step(self) -> Callable[[ParamDict], ParamDict] | None:
        """What a step must be passed through, beyond being projected: None if it is nothing.

        A function of the change of each weight, which returns the changes to make. It projects the change of weights
        that are computed from several parameters, as with weight normalization.
        """
        return self._limit_step if self._normalized and self._projectors else None

    def _limit_step(self, changes: ParamDict) -> ParamDict:
        limited = dict(changes)
        for weight, norm in self._normalized:
            if weight.name in self._projectors:
                names, parameters = (weight.name, weight.scale_name), (weight.parameter, weight.scale)
                v, g = (p + changes[name] for p, name in zip(parameters, names, strict=True))
                kept = norm.limit(parameters, (v, g), self._projectors[weight.name])
                limited.update({n: new - p for n, p, new in zip(names, parameters, kept, strict=True)})
        return limited

    def ranks(self) -> dict[str, dict[str, int]]:
        """The size of the bases.

        Returns:
            For each weight with a projector, the rank of its basis and the largest possible one.
        """
        return {name: {"rank": p.rank, "of": p.max_rank} for name, p in self.projectors.items()}

    def saturated(self) -> set[str]:
        """The weights that can no longer learn, because their bases hold every direction and freeze it.

        Returns:
            Their names. A dynamic λ counts as freezing, since it starts at 1 and stays close to it.
        """
        return {
            name
            for name, p in self.projectors.items()
            if p.rank == p.max_rank and (self.rule.dynamic or bool((p.active_importance >= _SATURATED).all()))
        }

    def importance_distributions(self) -> dict[str, dict[str, float | list[float]]]:
        """The distribution of λ over the directions of each basis.

        Returns:
            For each weight with a projector, the mean of λ and its deciles, minimum and maximum included.
        """
        distributions: dict[str, dict[str, float | list[float]]] = {}
        for name, projector in self.projectors.items():
            values = projector.active_importance.double()
            deciles = torch.quantile(values, torch.linspace(0, 1, 11, dtype=values.dtype, device=values.device))
            distributions[name] = {"mean": float(values.mean()), "deciles": deciles.tolist()}
        return distributions

    def update_importances(self, gradient: Tensor | None) -> None:
        """Update λ by the rule.

        Args:
            gradient: ∂L/∂λ of all weights, concatenated; None leaves λ unchanged.
        """
        if gradient is not None:
            self.rule.update(self.importance, gradient)

    def rebuild(self, network: Network, x: Nest, threshold: float, chunk: int = 64) -> list[str]:
        """UpdateGPM: replace the bases by those of the covered layers' inputs on stored samples, and reinitialize λ.

        Args:
            network: The network.
            x: The samples, as stored.
            threshold: The share of the inputs' energy that each basis holds (ε).
            chunk: How many samples to process at a time.

        Returns:
            Remarks on weights that can no longer learn.

        Raises:
            LayerDivergedError: If a layer's inputs are not finite.
        """
        thresholds = dict.fromkeys(self.covered, threshold)
        with network.mode(training=False):
            representations = collect_inputs(network.model, self.covered, thresholds, _forwards(network, x, chunk))
        return self.rebuild_from(representations, thresholds)

    def rebuild_from(self, representations: Mapping[str, Collected], thresholds: Mapping[str, float]) -> list[str]:
        """Replace the bases by those of collected inputs, and reinitialize λ.

        Args:
            representations: The covered layers' inputs, from `collect_inputs`.
            thresholds: The share of the inputs' energy that each weight's basis holds (ε).

        Returns:
            Remarks on weights that can no longer learn.
        """
        before, projectors = self.saturated(), {}
        for name, representation in representations.items():
            yield_point()
            kept = representation.leading(thresholds[name])
            if kept is None:  # a layer that the forward did not use
                continue
            if kept.values.shape[-1] > 0:  # no direction if all inputs of the layer were zero
                projectors[name] = self._make_projector(name, kept.vectors, self.rule.initial(kept.values))
        self.projectors = projectors
        return self._saturation_remarks(before)

    def extend(
        self, network: Network, x: Nest, thresholds: Mapping[str, float], *, first: bool, chunk: int = 64
    ) -> list[str]:
        """GPM's update: extend the bases by what they miss of the covered layers' inputs on stored samples.

        λ accumulates: the rule's values for this task are added to the old ones, up to 1.

        Args:
            network: The network.
            x: The samples, as stored.
            thresholds: The share of the inputs' energy that each weight's basis holds (ε).
            first: Whether this is the first task, whose bases leave out the direction that crosses the threshold.
            chunk: How many samples to process at a time.

        Returns:
            Remarks on weights that can no longer learn, and on weights left without a basis.

        Raises:
            LayerDivergedError: If a layer's inputs are not finite.
        """
        with network.mode(training=False):
            representations = collect_inputs(network.model, self.covered, thresholds, _forwards(network, x, chunk))
        return self.extend_from(representations, thresholds, first=first)

    def extend_from(
        self,
        representations: Mapping[str, Collected],
        thresholds: Mapping[str, float],
        *,
        first: bool,
    ) -> list[str]:
        """Extend the bases by what they miss of collected inputs; see `extend`.

        Args:
            representations: The covered layers' inputs, from `collect_inputs`.
            thresholds: The share of the inputs' energy that each weight's basis holds (ε).
            first: Whether bases leave out the direction that crosses the threshold.

        Returns:
            Remarks on weights that can no longer learn, and on weights left without a basis.
        """
        before, projectors, remarks = self.saturated(), dict(self.projectors), []
        for name, representation in representations.items():
            yield_point()
            old = projectors.get(name)
            growth = _extend(representation, None if old is None else old.basis, thresholds[name], first=first)
            if growth is None:
                continue
            if growth.basis.shape[-1] == 0:
                if bool((representation.energy() > 0).any()):
                    remarks.append(_empty_basis_remark(name, thresholds[name]))
                continue
            importance = self.rule.initial(growth.strengths)
            if old is not None:
                importance[:, : old.basis.shape[-1]] += old.importance * old.mask
            projectors[name] = self._make_projector(name, growth.basis, importance.clamp(max=1))
        self.projectors = projectors
        return [*remarks, *self._saturation_remarks(before)]

    def _saturation_remarks(self, before: Collection[str]) -> list[str]:
        """Remarks on the weights that are saturated and were not before, so that each gets one remark only."""
        saturated = self.saturated()
        return [
            Caution(
                f"the basis of {name!r} holds all {p.max_rank} directions of its inputs, so this weight can no longer "
                "learn. For the next model, lower the threshold or its step per task, soften the projection (method "
                f"sgp, or importance='spectral'), widen the layer, or leave it unprotected with exclude=({name!r},)."
            )
            for name, p in self.projectors.items()
            if name in saturated and name not in before
        ]

    def _make_projector(self, name: str, basis: Tensor, importance: Tensor) -> SoftProjector:
        """A projector in the weight's precision, but at least float32: half is too little for orthonormal bases."""
        weight = self.covered[name]
        dtype = torch.promote_types(weight.parameter.dtype, torch.float32)
        kept = basis.to(dtype) if basis.is_floating_point() else basis
        return make_projector(weight.layout, weight.parameter, kept.contiguous(), importance.to(dtype))

    def state_dict(self) -> State:
        """The bases and importances. The rule is not included; the method restores its step size.

        Returns:
            The state.
        """
        return {name: [p.basis, p.importance] for name, p in self.projectors.items()}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If it has a basis of a weight that is not covered, or importances of another shape.
        """
        projectors = {}
        for name, (basis, importance) in state.items():
            if name not in self.covered:
                raise ValueError(f"there is a basis of {name!r}, but the weight is not covered")
            weight = self.covered[name]
            projectors[name] = make_projector(weight.layout, weight.parameter, basis, importance)
        self.projectors = projectors

    def memory_bytes(self) -> dict[str, int]:
        """The memory of bases and importances.

        Returns:
            Bytes by kind.
        """
        return {
            "bases": sum(p.basis.nbytes for p in self.projectors.values()),
            "importances": sum(p.importance.nbytes for p in self.projectors.values()),
        }


def _require_one_kind(kinds: Mapping[str, tuple[torch.dtype, torch.device]]) -> None:
    """Reject covered weights of several types or on several devices, since λ of all of them is one tensor."""
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise ModelError(
                "the covered weights are of several types, or on several devices "
                f"({first!r} is {_describe_kind(kinds[first])}, {name!r} {_describe_kind(kind)}), but their "
                "importances are updated together: make the weights alike (model.float()), leave some out with "
                "exclude=(...), or set importance to ones or spectral."
            )


def _describe_kind(kind: tuple[torch.dtype, torch.device]) -> str:
    return f"{kind[0]} on {kind[1]}"


def _forwards(network: Network, x: Nest, chunk: int) -> Iterator[object]:
    """Run the model on stored samples x, a chunk each time."""
    for part in split_nest(x, eval_batch_size(network.model, nest_length(x), chunk)):
        yield network.input_copies.call(network.prepare_inputs(part))


def _extend(representation: Collected, old: Tensor | None, threshold: float, *, first: bool) -> ExtendedBasis | None:
    """The extended basis; None if nothing was collected."""
    if isinstance(representation, RowCounts):
        return representation.extend(old, threshold, first=first)
    return extend_basis(representation, old, threshold, first=first)


def _empty_basis_remark(name: str, threshold: float) -> str:
    """The remark on a weight that is left without a basis."""
    return (
        f"the basis of {name!r} is empty, so this weight is not protected: a single direction holds more than the "
        f"threshold's share of its inputs, {threshold:g}, and the first task leaves out the direction that crosses the "
        "threshold. Raise the threshold, or center the inputs around 0."
    )
