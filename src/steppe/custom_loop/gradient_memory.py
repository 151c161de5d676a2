"""The gradient projection memory as an object of its own, for any training loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.custom_loop.batches import Forward, as_batches, call_on_batch, copied, first_samples
from steppe.custom_loop.coverage import find_unprotectable
from steppe.custom_loop.distributed import broadcast_tensors, group_of
from steppe.custom_loop.make_rule import make_rule
from steppe.custom_loop.projected_optimizer import ProjectedOptimizer, StepLimit
from steppe.errors import DataError, UsageError, short_repr
from steppe.learning.checks import validate_exclude
from steppe.network.module_state import in_mode
from steppe.projection.collect_inputs import collect_inputs
from steppe.projection.importance import ImportanceRule, Ridge
from steppe.projection.layers import ProjectedWeight, projected_weights, require_covered
from steppe.projection.memory import GradientMemory, Projector
from steppe.runtime.warn import warn_user
from steppe.tensors.nest import Nest

_Value = TypeVar("_Value")


class GradientProjectionMemory:
    """The directions in which a model's weights must not move, because that would change what it does on earlier tasks.

    At the end of a task, `update` computes the bases of the layers' inputs. Around any optimizer, `wrap` keeps every
    step outside their span. The memory covers the weights of all layers that have a rule; `uncovered` names the rest.

    Args:
        model: The model; a `DistributedDataParallel` or compiled one is unwrapped.
        threshold: The share of the inputs' energy that each basis holds (ε): one number, or one per covered weight.
        importance: How strongly directions are held (λ): "ones" (fully), "spectral" (by their singular values),
            "ridge" (by their share of the energy, every direction, whatever the threshold; needs `rebuild=True`),
            "sigmoid" (learned; see `FlatSharpness`), or a rule object.
        exclude: Names of layers and weights that learn freely, such as the heads of a multi-head model.
        freeze_uncovered: After the first update, keep trainable weights that are not covered (biases, normalization, …)
            as they are, except excluded ones. With λ = 1 and threshold 1, nothing then moves the outputs on the inputs
            that the memory was updated with.
        importance_lr: The learning rate η2 of λ, for "sigmoid".
        temperature: The temperature, for "sigmoid".
        alpha: How slowly λ falls with the singular value, for "spectral".
        ridge: The share of the strongest direction's energy at which λ is about a half, for "ridge".

    Attributes:
        model: The model, unwrapped.
        num_updates: How many updates were made.
        process_group: The processes whose updates all take in what the first one's does: those of a
            `DistributedDataParallel` model. Assign it if the model is distributed later.

    Raises:
        UsageError: An argument is invalid.
        ModelError: The model has no layer that can be covered.

    Example:
        >>> import steppe, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2))
        >>> memory = steppe.GradientProjectionMemory(model, threshold=0.95)
        >>> optimizer = memory.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
        >>> for task in range(2):
        ...     batches = [(torch.randn(10, 16), torch.arange(10) % 2) for _ in range(5)]
        ...     for x, y in batches:
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        ...     memory.update(batches, max_samples=5)
        >>> list(memory.ranks())
        ['0.weight', '2.weight']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: float | Mapping[str, float] = 0.97,
        importance: str | ImportanceRule = "ones",
        exclude: Sequence[str] = (),
        freeze_uncovered: bool = False,
        importance_lr: float = 0.01,
        temperature: float = 10.0,
        alpha: float = 25.0,
        ridge: float = 0.01,
    ) -> None:
        self.model = _unwrapped(model)
        self.process_group = group_of(model)
        self._exclude = _validated_exclude(exclude, self.model)
        covered = projected_weights(self.model, self._exclude)
        require_covered(covered)
        self.threshold = _validated_threshold(threshold, covered)
        rule = make_rule(importance, lr=importance_lr, temperature=temperature, alpha=alpha, ridge=ridge)
        self.freeze_uncovered = freeze_uncovered
        self.num_updates = 0
        # Half precision is too little for orthonormal bases, and an optimizer's step need not be in the weights' type.
        self._memory = GradientMemory(rule, covered, least_precision=torch.float32)
        self.version = 0
        """Changes with the bases."""
        self._warn_unprotected()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "process_group": self.process_group is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = dist.group.WORLD if state["process_group"] else None  # as DistributedDataParallel does
        vars(self).update(state, process_group=group)

    @property
    def projectors(self) -> Mapping[str, Projector]:
        """The soft projector of each weight that has a basis, by parameter name."""
        return self._memory.projectors

    @property
    def rule(self) -> ImportanceRule:
        """How λ starts and moves; assign another one to change its learning rate."""
        return self._memory.rule

    @rule.setter
    def rule(self, rule: ImportanceRule) -> None:
        self._memory.rule = rule

    def update(
        self,
        batches: Iterable[Nest] | Nest,
        forward: Forward | None = None,
        *,
        rebuild: bool = False,
        threshold: float | Mapping[str, float] | None = None,
        below_threshold: bool = False,
        max_samples: int | None = None,
    ) -> None:
        """Take in the inputs of a task's samples, at the end of the task.

        The model runs once on every batch, in eval mode and without gradients. It keeps its modes. If anything fails,
        the memory stays as it was. With a `DistributedDataParallel` model, call it in all processes; all of them then
        have the memory of the first one's batches.

        Args:
            batches: An iterable of batches, such as a `DataLoader`, or one batch. By default all of them are used.
            forward: `forward(model, batch)` runs the model on a batch; its result is not used. By default a dictionary
                is passed as keywords without "labels", a pair passes its first part, and anything else is passed as it
                is; tensors are moved to the model's device.
            rebuild: Replace the bases (FS-DGPM) instead of extending them (GPM). The batches must then be samples of
                all tasks so far, from a replay buffer.
            threshold: The threshold of this update; by default the memory's.
            below_threshold: When extending, leave out the direction that crosses the threshold, as GPM and SGP do on
                their first task. A basis may then be empty.
            max_samples: Stop after so many samples; the batches should come in random order. By default all are used.

        Raises:
            UsageError: An argument is invalid.
            DataError: There are no batches.
            ModelError: A covered weight is used in a way that cannot be protected.
            LayerDivergedError: The inputs of a layer are not finite.
        """
        call = call_on_batch if forward is None else forward
        if not callable(call):
            raise UsageError(f"forward must be a function of the model and a batch, got {short_repr(forward)}.")
        if max_samples is not None and (type(max_samples) is not int or max_samples < 1):
            raise UsageError(f"max_samples = {short_repr(max_samples)} is invalid; pass a number above 0.")
        if isinstance(self.rule, Ridge) and not rebuild:
            raise UsageError(
                "importance='ridge' weighs directions by their energy over all tasks: pass rebuild=True, with samples "
                "of all tasks so far from a replay buffer."
            )
        stream = iter(first_samples(as_batches(batches), max_samples))
        with torch.inference_mode(False), in_mode(self.model, training=False):
            first = next(stream, None)
            if first is None:
                raise DataError("the memory cannot be updated without samples: `batches` is empty.")
            memory = copy.copy(self._memory)
            memory.covered = self._find_covered(call, first)
            thresholds = self._thresholds(self.threshold if threshold is None else threshold, memory.covered)
            inputs = collect_inputs(self.model, memory.covered, thresholds, self._forwards(call, first, stream))
        if rebuild:
            all_directions = isinstance(self.rule, Ridge)
            remarks = memory.rebuild_from(inputs, dict.fromkeys(thresholds) if all_directions else thresholds)
        else:
            remarks = memory.extend_from(inputs, thresholds, first=below_threshold)
        if self.process_group is not None:
            memory.covered = projected_weights(self.model, self._exclude)
            weights = {name: weight.parameter for name, weight in memory.covered.items()}
            memory.load_state_dict(broadcast_tensors(memory.state_dict(), weights, self.process_group))
        self._memory, self.num_updates, self.version = memory, self.num_updates + 1, self.version + 1
        for remark in remarks:
            warn_user(remark)

    def _forwards(self, forward: Forward, first: Nest, rest: Iterator[Nest]) -> Iterator[None]:
        """Run the model on a batch each time."""
        with torch.no_grad():
            forward(self.model, copied(first))
            yield
            for batch in rest:
                forward(self.model, copied(batch))
                yield

    def _find_covered(self, forward: Forward, batch: Nest) -> dict[str, ProjectedWeight]:
        """The weights that this update covers: those that are trainable now, and used as their rules assume."""
        covered = projected_weights(self.model, self._exclude)
        require_covered(covered)
        misread = [n for n in find_unprotectable(self.model, covered, forward, batch) if n not in self.projectors]
        if misread:
            warn_user(
                "these weights are used in another way than a gradient memory assumes, or not at all, and will be "
                f"learned without protection: {', '.join(misread)}"
            )
        return {name: weight for name, weight in covered.items() if name not in misread}

    def _thresholds(
        self, threshold: float | Mapping[str, float], covered: Mapping[str, ProjectedWeight]
    ) -> dict[str, float]:
        threshold = _validated_threshold(threshold, projected_weights(self.model, self._exclude))
        return {name: threshold[name] if isinstance(threshold, Mapping) else threshold for name in covered}

    def wrap(self, optimizer: Optimizer, *, project: str = "step") -> ProjectedOptimizer:
        """Keep every step of an optimizer outside the memory.

        Args:
            optimizer: Any `torch.optim.Optimizer` over parameters of the model. Use the returned one in its place.
            project: What to project. "step": the step, whatever the optimizer makes of the gradient (weight decay,
                momentum, Adam, …). "gradient": the gradient before the step, as in the papers; exact for SGD without
                weight decay whose momentum is cleared between tasks, not for others. "both": both, for optimizers that
                learn from their own steps, such as L-BFGS.

        Returns:
            The optimizer whose steps are projected.

        Raises:
            UsageError: It is not an optimizer, is wrapped already, or has parameters that are not the model's.
        """
        return ProjectedOptimizer(optimizer, self, project=project)

    def update_importances(self, gradient: Mapping[str, Tensor]) -> None:
        """Update λ by the rule, if the rule is dynamic.

        Args:
            gradient: ∂L/∂λ by parameter name, (groups, k); 0 for weights that are missing.
        """
        if self._memory and self.rule.dynamic:
            parts = [
                gradient[name].reshape(-1) if name in gradient else torch.zeros_like(p.importance).reshape(-1)
                for name, p in self.projectors.items()
            ]
            self._memory.update_importances(torch.cat(parts))

    @property
    def limit_step(self) -> StepLimit | None:
        """What the change of weights with weight normalization must be passed through; None if there are none."""
        return self._memory.limit_step

    def normalized(self) -> list[str]:
        """The directions and scales of weights with weight normalization, which are projected together.

        Returns:
            Their names.
        """
        weights = [weight for weight in self._memory.covered.values() if weight.norm is not None]
        return [name for weight in weights for name in (weight.name, weight.scale_name)]

    def ranks(self) -> dict[str, dict[str, int]]:
        """The size of the bases.

        Returns:
            For each weight with a basis, its rank and the largest possible one.
        """
        return self._memory.ranks()

    def saturated(self) -> set[str]:
        """The weights that can no longer learn, because every direction of their inputs is held.

        Returns:
            Their names.
        """
        return self._memory.saturated()

    def uncovered(self) -> list[str]:
        """The trainable weights that the memory does not protect: excluded ones, biases, and layers without a rule.

        Returns:
            Their names.
        """
        covered = {*self._memory.covered, *self.normalized()}
        return [name for name, p in self.model.named_parameters() if p.requires_grad and name not in covered]

    def frozen(self) -> list[str]:
        """The weights that steps leave as they are: with `freeze_uncovered`, the uncovered ones that are not excluded.

        Returns:
            Their names.
        """
        return self._not_excluded() if self.freeze_uncovered and self.num_updates else []

    def _not_excluded(self) -> list[str]:
        """The uncovered weights that the user has not excluded."""
        excluded = [(entry, f"{entry}.") for entry in self._exclude]
        return [n for n in self.uncovered() if not any(n == e or n.startswith(inside) for e, inside in excluded)]

    def _warn_unprotected(self) -> None:
        """Name the matrices that are not covered; that biases and scales are not, the documentation says."""
        weights = dict(self.model.named_parameters())
        matrices = [name for name in self._not_excluded() if weights[name].ndim > 1]
        if matrices and not self.freeze_uncovered:
            warn_user(
                f"these weights are not protected: {', '.join(matrices)}. A gradient memory has no rule for their "
                "layers; name them in exclude=(...) to let them learn freely, or pass freeze_uncovered=True."
            )

    def memory_bytes(self) -> dict[str, int]:
        """The memory of bases and importances.

        Returns:
            Bytes by kind.
        """
        return self._memory.memory_bytes()

    def state_dict(self) -> State:
        """The bases and importances, to save with `torch.save` or `safetensors`; not the arguments.

        Returns:
            The state; its tensors are the memory's own.
        """
        return {"updates": self.num_updates, "bases": self._memory.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`, of a memory of the same model.

        Raises:
            UsageError: It is a state of something else.
        """
        memory = copy.copy(self._memory)
        memory.covered = projected_weights(self.model, self._exclude)
        try:
            updates = int(state["updates"])
            memory.load_state_dict(self._fitting(state["bases"]))
        except INVALID_STATE_ERRORS as error:
            raise UsageError(
                f"this is not a state of a memory of this model ({type(error).__name__}: {error}); pass what "
                "`state_dict` returned, and the same model and `exclude`."
            ) from error
        self._memory, self.num_updates, self.version = memory, updates, self.version + 1

    def _fitting(self, bases: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Copies of saved bases and importances, on the devices and in the number types of the weights."""
        weights = dict(self.model.named_parameters())
        for name, (basis, *_) in bases.items():
            if basis.ndim == 3 and weights[name].numel() % (basis.shape[0] * basis.shape[1]):
                raise ValueError(f"the basis of {name!r} does not fit the weight")
        return {name: [_like(weights[name], part) for part in parts] for name, parts in bases.items()}


def _like(weight: Tensor, part: Any) -> Any:
    """A copy of a saved tensor for a weight; row numbers stay integers."""
    if not isinstance(part, Tensor):
        return part
    dtype = torch.promote_types(weight.dtype, torch.float32) if part.is_floating_point() else part.dtype
    return part.detach().to(weight.device, dtype, copy=True)


def _unwrapped(model: object) -> nn.Module:
    """The user's own module within those of torch that wrap it."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return _unwrapped(model.module)
    original = getattr(model, "_orig_mod", None)  # of torch.compile
    return model if original is None else _unwrapped(original)


def _validated_exclude(exclude: object, model: nn.Module) -> tuple[str, ...]:
    if isinstance(exclude, str) or not isinstance(exclude, Sequence):
        raise UsageError(f"exclude must be a list of names, such as ['head'], got {short_repr(exclude)}.")
    return validate_exclude(exclude, model)


def _validated_threshold(threshold: _Value, covered: Mapping[str, ProjectedWeight]) -> _Value:
    if isinstance(threshold, Mapping):
        if threshold.keys() != covered.keys():
            raise UsageError(f"threshold must name every covered weight, {', '.join(covered)}; got {list(threshold)}.")
        values = list(threshold.values())
    else:
        values = [threshold]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise UsageError(f"threshold = {short_repr(value)} is out of range; it must be above 0 and at most 1.")
    return threshold
