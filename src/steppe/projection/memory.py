"""The gradient memory of a network: one soft projector per covered weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.fast.factored import FactoredGrad, Gradient, ParamDict
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.projection.basis import Representation
from steppe.projection.collect_inputs import Collected, collect_inputs, extend_directions, select_directions
from steppe.projection.importance import ImportanceRule
from steppe.projection.layers import Layout, ProjectedWeight
from steppe.projection.layouts import make_projector
from steppe.projection.matrix_projector import MATRIX, MatrixProjector, check_matrix, matrix_of
from steppe.projection.memory_remarks import empty_basis_remark, require_one_kind, saturation_remark
from steppe.projection.projector import SoftProjector
from steppe.runtime.session import yield_point
from steppe.tensors.nest import Nest, nest_length, split_nest

_SATURATED = 0.99
"""The importance from which a direction counts as frozen."""

Projector = SoftProjector | MatrixProjector


class GradientMemory:
    """Soft projectors of a network's weights; gradients of weights without a projector pass through unchanged.

    The memory is empty until the first `rebuild` (FS-DGPM: new bases) or `extend` (GPM: growing bases).

    Args:
        rule: How λ starts and moves.
        covered: The weights to project, by parameter name, from `projected_weights` or `find_covered_weights`.
        least_precision: Of the bases, which otherwise have the precision of their weights.

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

    def __init__(
        self,
        rule: ImportanceRule,
        covered: Mapping[str, ProjectedWeight] = MappingProxyType({}),
        *,
        least_precision: torch.dtype | None = None,
    ) -> None:
        self.least_precision = least_precision
        self.rule, self.covered = rule, dict(covered)  # learners can be deep-copied, a mapping proxy cannot
        self.linear = {name: weight.layers for name, weight in covered.items() if weight.factorable}
        if rule.dynamic:  # fail before anything is learned
            require_one_kind({name: (w.parameter.dtype, w.parameter.device) for name, w in covered.items()})
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
    def projectors(self) -> Mapping[str, Projector]:
        """The projectors by parameter name; assign a whole new mapping to change them."""
        return self._projectors

    @projectors.setter
    def projectors(self, projectors: Mapping[str, Projector]) -> None:
        # The importances of all weights are one tensor with a view per projector, so that one call updates them all.
        kinds = {name: (p.importance.dtype, p.importance.device) for name, p in projectors.items()}
        if len(set(kinds.values())) > 1:
            if self.rule.dynamic:
                require_one_kind(kinds)
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
        project: Callable[[Projector, Tensor | FactoredGrad, Tensor | FactoredGrad | None], Tensor | FactoredGrad],
    ) -> Gradient:
        parts = dict(gradient)
        for name, projector in self._projectors.items():
            parts[name] = project(projector, gradient[name], None if known is None else known.get(name))
        return parts

    @property
    def limit_step(self) -> Callable[[ParamDict], ParamDict] | None:
        """What a step must be passed through, beyond being projected: None if it is nothing.

        It takes the change of each weight and returns the changes to make, of weights with weight normalization.
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

    def rebuild(
        self,
        network: Network,
        x: Nest,
        threshold: float | None,
        chunk: int = 64,
        *,
        rules: Mapping[str, ImportanceRule] = MappingProxyType({}),
        grams: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> list[str]:
        """UpdateGPM: replace the bases by those of the covered layers' inputs on stored samples, and reinitialize λ.

        Args:
            network: The network.
            x: The samples, as stored.
            threshold: The share of the inputs' energy that each basis holds (ε); None keeps every direction, for rules
                that give those with little energy little importance.
            chunk: How many samples to process at a time.
            rules: Rules of single weights, where they differ.
            grams: Gram matrices of the inputs, (groups, in, in), of weights for which they are known.

        Returns:
            Remarks on weights that can no longer learn.

        Raises:
            LayerDivergedError: If a layer's inputs are not finite.
        """
        covered = {name: weight for name, weight in self.covered.items() if name not in grams}
        lowest = dict.fromkeys(covered, threshold or 0.0)
        with network.mode(training=False):
            collected = collect_inputs(network.model, covered, lowest, _forwards(network, x, chunk))
        known = {name: Representation.of_gram(gram) for name, gram in grams.items()}
        representations = {name: known[name] if name in known else collected[name] for name in self.covered}
        return self.rebuild_from(representations, dict.fromkeys(self.covered, threshold), rules=rules)

    def rebuild_from(
        self,
        representations: Mapping[str, Collected],
        thresholds: Mapping[str, float | None],
        *,
        rules: Mapping[str, ImportanceRule] = MappingProxyType({}),
    ) -> list[str]:
        """Replace the bases by those of collected inputs, and reinitialize λ.

        Args:
            representations: The covered layers' inputs, from `collect_inputs`.
            thresholds: The share of the inputs' energy that each weight's basis holds (ε); None keeps every direction.
            rules: Rules of single weights, where they differ.

        Returns:
            Remarks on weights that can no longer learn.
        """
        before, projectors = self.saturated(), {}
        for name, representation in representations.items():
            yield_point()
            threshold = thresholds[name]
            kept = select_directions(representation, threshold)
            if kept is None:  # a layer that the forward did not use
                continue
            if kept.values.shape[-1] > 0:  # no direction if all inputs of the layer were zero
                importance = rules.get(name, self.rule).initial(kept.values)
                is_fixed = threshold is None and not self.rule.dynamic
                projectors[name] = self._make_projector(name, kept.vectors, importance, is_fixed=is_fixed)
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
        self, representations: Mapping[str, Collected], thresholds: Mapping[str, float], *, first: bool
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
            assert old is None or isinstance(old, SoftProjector)
            basis = None if old is None else old.basis
            growth = extend_directions(representation, basis, thresholds[name], first=first)
            if growth is None:
                continue
            if growth.basis.shape[-1] == 0:
                if bool((representation.energy() > 0).any()):
                    remarks.append(empty_basis_remark(name, thresholds[name]))
                continue
            importance = self.rule.initial(growth.strengths)
            if old is not None:
                importance[:, : old.basis.shape[-1]] += old.importance * old.mask
            projectors[name] = self._make_projector(name, growth.basis, importance.clamp(max=1))
        self.projectors = projectors
        return [*remarks, *self._saturation_remarks(before)]

    def _saturation_remarks(self, before: Collection[str]) -> list[str]:
        """Remarks on the weights that are saturated and were not before, so that each gets one remark only."""
        new = self.saturated() - set(before)
        return [saturation_remark(name, p.max_rank) for name, p in self.projectors.items() if name in new]

    def _make_projector(self, name: str, basis: Tensor, importance: Tensor, *, is_fixed: bool = False) -> Projector:
        """A projector in the memory's precision; P itself, if λ is fixed and that pays."""
        weight = self.covered[name]
        own = weight.parameter.dtype
        dtype = torch.promote_types(own, self.least_precision or own)
        kept = (basis.to(dtype) if basis.is_floating_point() else basis).contiguous()
        if is_fixed and weight.layout is Layout.ROWS and 2 * kept.shape[2] > kept.shape[1]:
            return MatrixProjector(matrix_of(kept, importance.to(dtype)), importance.to(dtype))
        return make_projector(weight.layout, weight.parameter, kept, importance.to(dtype))

    def state_dict(self) -> State:
        """The bases and importances. The rule is not included; the method restores its step size.

        Returns:
            The state.
        """
        return {name: p.state_dict() for name, p in self.projectors.items()}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If it has a basis of a weight that is not covered, or importances of another shape.
        """
        projectors: dict[str, Projector] = {}
        for name, (basis, importance, *mark) in state.items():
            if name not in self.covered:
                raise ValueError(f"there is a basis of {name!r}, but the weight is not covered")
            weight = self.covered[name]
            if mark == [MATRIX]:
                projectors[name] = MatrixProjector(*check_matrix(basis, importance))
            else:
                projectors[name] = make_projector(weight.layout, weight.parameter, basis, importance)
        self.projectors = projectors

    def memory_bytes(self) -> dict[str, int]:
        """The memory of bases and importances.

        Returns:
            Bytes by kind.
        """
        return {
            "bases": sum(p.nbytes for p in self.projectors.values()),
            "importances": sum(p.importance.nbytes for p in self.projectors.values()),
        }


def _forwards(network: Network, x: Nest, chunk: int) -> Iterator[object]:
    """Run the model on stored samples x, a chunk each time."""
    for part in split_nest(x, eval_batch_size(network.model, nest_length(x), chunk)):
        yield network.input_copies.call(network.prepare_inputs(part))
