"""What a learner is given, refused where it cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from steppe.checkpoint.tree import State
from steppe.data.samples import DatasetSamples, TensorSamples
from steppe.data.task import Task
from steppe.errors import (
    DataError,
    DivergedError,
    LayerDivergedError,
    ModelError,
    ShapesDifferError,
    SteppeError,
    UsageError,
    one_line,
    short_repr,
    unknown_name,
)
from steppe.learning.input_kind import Kind, check_scaled_alike
from steppe.learning.output_checks import check_gradient, no_logits
from steppe.learning.task_group import TaskGroup
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.single_sample import accepts_single_sample, single_sample_error
from steppe.network.eval_batches import min_eval_batch
from steppe.network.module_state import is_frozen
from steppe.network.network import Network
from steppe.runtime.devices import check_device
from steppe.runtime.rng import preserve_global_rng
from steppe.settings import TrainingConfig
from steppe.tensors.batch import Batch

_NONE = type(None)
_MOST_CUTS = 100_000  # of the step sizes in a task
_MODAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)  # layers that train and eval mode tell apart


def check_arguments(
    model: object, method: object, seed: object, device: object, prepare: object, exclude: Sequence[str]
) -> None:
    """Refuse arguments of another kind than a learner is made of."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}: give a torch.nn.Module.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{f'the layer {name!r}' if name else 'the model'} was made by torch.jit.script or torch.jit.trace, of "
                "whose layers and weights methods see too little: give the module that it was made from."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ModelError(
                f"the layer {name!r} has sparse gradients, which methods cannot use: give it sparse=False."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name!r} is on the device 'meta', with a shape and no values: give it values first "
                "(model.to_empty(device='cpu'), then load or make its weights)."
            )
    if not isinstance(method, MethodConfig):
        raise UsageError(f"method is {short_repr(method)}: give a method's settings, such as steppe.FSDGPM().")
    if type(seed) is not int:
        raise UsageError(f"seed = {short_repr(seed)}: give a whole number.")
    if prepare is not None and not callable(prepare):
        raise UsageError(f"prepare is {short_repr(prepare)}: give a function from stored inputs to the model's.")
    if not isinstance(exclude, (list, tuple)):
        raise UsageError(f"exclude is {short_repr(exclude)}: give a list of names, such as ['head'].")
    check_device(next((p.device for p in model.parameters()), None) if device is None else device)


def validate_exclude(exclude: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Names of layers or weights; refused where the model has none such."""
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for entry in exclude:
        if entry not in known:
            raise UsageError(f"exclude names {entry!r}, which is no layer and no weight of the model.")
    return tuple(exclude)


def validate_head(head: object, model: nn.Module) -> str | None:
    """Return the name of the output layer or of its weight, as `named_parameters` gives it; None if none is given."""
    if head is None:
        return None
    if not isinstance(head, str) or not head:
        raise UsageError(f"head must be the name of a layer or a weight, got {short_repr(head)}.")
    weights = dict(model.named_parameters(remove_duplicate=False))
    layers = dict(model.named_modules(remove_duplicate=False))
    if head not in weights and head not in layers:
        raise unknown_name("layer or weight of the model, given as head,", head, {*weights, *layers} - {""})
    if not any(name == head or name.startswith(f"{head}.") for name in weights):
        raise UsageError(f"head = {head!r} has no weights; pass the name of the layer that returns the logits.")
    names = {id(weight): name for name, weight in model.named_parameters()}  # a tied weight has several
    return names[id(weights[head])] if head in weights else head


def choose_precision(precision: str, device: torch.device) -> str:
    """What to multiply in: within somebody's own autocast, where nothing else is asked for, in that."""
    if precision != "float32" or not torch.is_autocast_enabled(device.type):
        return precision
    dtype = torch.get_autocast_dtype(device.type)
    if dtype != torch.bfloat16:
        raise UsageError(
            f"learning within torch.autocast to {dtype}: give learn(..., precision='bfloat16') instead, or leave it."
        )
    return "bfloat16"


def check_precision(precision: str, dtype: torch.dtype) -> None:
    """Refuse a precision that saves nothing with weights of this type."""
    if precision != "float32" and dtype != torch.float32:
        raise UsageError(
            f"precision = {precision!r}: the model's weights are {dtype}, which nothing is "
            "saved with: make them float32 (model.float()), or leave precision out."
        )


def check_finite(weights: Mapping[str, Tensor], when: str) -> None:
    """Refuse to go on with weights that a task has made infinite, or no numbers at all."""
    for weight, parameter in weights.items():
        if not bool(torch.isfinite(parameter).all()):
            raise DivergedError(
                f"the weight {weight!r} is no longer finite {when}: lower the step size, and begin with a learner that "
                "was saved before, or a new one."
            )


def check_state_matches(
    state: State,
    settings: MethodConfig,
    seed: int,
    exclude: Sequence[str],
    head: str | None,
    *,
    has_input_transform: bool,
) -> None:
    """Raise UsageError for the state of a learner that was created with other arguments."""
    own = type(settings).__name__, settings.as_dict(), seed, list(exclude), head
    saved = state["settings"]["kind"], state["settings"]["values"], state["seed"], state["exclude"], state.get("head")
    if (own[0], *own[2:]) != (saved[0], *saved[2:]) or not settings.equals(saved[1]):
        raise UsageError(f"the state was saved with {saved}, but this learner has {own}; use the same arguments.")
    if state.get("prepared", has_input_transform) != has_input_transform:  # older states have no such entry
        raise UsageError(
            "the learner was saved with its own `input_transform`, which a file cannot hold; pass the same function."
            if state["prepared"]
            else "the learner was saved without `input_transform`; leave it out."
        )


def has_extra_state(model: nn.Module) -> bool:
    """Whether it has a state beside weights and buffers, so that a file could hold only a part of it."""
    return any(type(module).get_extra_state is not nn.Module.get_extra_state for module in model.modules())


def check_unchanged(model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Refuse a model whose weights are not those that it had to be learnt when the learner was made, or elsewhere."""
    now = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if now.get(name) is not parameter:
            raise ModelError(
                f"the weight {name!r} was replaced after the learner was made, and would not be learnt: change the "
                "model before, or make a new learner."
            )
        if parameter.device != device:
            raise ModelError(
                f"the weight {name!r} was moved to {parameter.device} after the learner was made, whose own are on "
                f"{device}: move the model before, or make the learner with device={str(parameter.device)!r}."
            )
        if not parameter.requires_grad:
            raise ModelError(
                f"the weight {name!r} was frozen after the learner was made: "
                "freeze weights before, or make a new learner."
            )
    for name, parameter in now.items():
        if parameter.requires_grad and name not in parameters:
            raise ModelError(
                f"the weight {name!r} was added or unfrozen after the learner was made, and would not be learnt: "
                "give the model all its outputs and weights before, or make a new learner."
            )


def check_trainable(saved: Sequence[str] | None, model: nn.Module) -> None:
    """Refuse a model of which other weights would be learnt than when the learner was saved; None: nobody knows."""
    if saved is None:
        return
    learnt, now = set(saved), dict(model.named_parameters())
    loose = [name for name, weight in now.items() if weight.requires_grad and name not in learnt]
    stuck = [name for name, weight in now.items() if not weight.requires_grad and name in learnt]
    if loose:
        raise ModelError(
            f"the weight {_first(loose)} was frozen when the learner was saved, and would be learnt now: freeze what "
            "was frozen, by requires_grad_(False), before loading."
        )
    if stuck:
        raise ModelError(
            f"the weight {_first(stuck)} was learnt when the learner was saved, and is frozen in the model: unfreeze "
            "what was learnt, by requires_grad_(True), before loading."
        )


def frozen_eval_layers(model: nn.Module) -> list[str]:
    """The layers of frozen parts in eval mode for which the mode matters; they stay in it while the model learns."""
    parts = [module for module in model.modules() if not module.training and is_frozen(module)]
    inside = {id(layer) for part in parts for layer in part.modules()}
    return [name for name, layer in model.named_modules() if id(layer) in inside and isinstance(layer, _MODAL)]


def check_frozen_eval_layers(saved: Sequence[str] | None, model: nn.Module) -> None:
    """Refuse to go on with frozen layers in another mode than they were learnt with; None: nobody knows."""
    if saved is None:
        return
    before, now = set(saved), set(frozen_eval_layers(model))
    moving = [name for name, _ in model.named_modules() if name in before - now]
    resting = [name for name, _ in model.named_modules() if name in now - before]
    if moving:
        raise ModelError(
            f"the frozen layer {_first(moving)} was in eval mode when the saved learner learnt, and is not now, "
            "so that statistics would move or dropout set in: put the frozen part in eval mode (part.eval()) as it was."
        )
    if resting:
        raise ModelError(
            f"the frozen layer {_first(resting)} was in train mode when the saved learner learnt, and is in eval mode "
            "now: put it in train mode (layer.train()) as it was."
        )


def _first(names: Sequence[str]) -> str:
    """The first name, and how many there are beside it."""
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} (and {len(names) - 1} more)"


def validate_task(task: Task, network: Network, earlier: Kind | None) -> tuple[Kind, int]:
    """What the task's inputs are and how many outputs the model has; refuses data that does not fit the model, its
    head or the inputs of earlier tasks.
    """
    x = probe_inputs(task, network)
    kind = (tuple(x.shape[1:]), x.dtype)
    if earlier is not None and kind != earlier:
        raise DataError(
            f"{task.name}: inputs are {x.dtype} of shape {kind[0]}, those of earlier tasks {earlier[1]} of "
            f"shape {earlier[0]}: give all tasks inputs of one kind."
        )
    try:
        with torch.enable_grad(), network.mode(training=False):
            output = network.forward(prepared_copy(network, x))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise DataError(f"{task.name}: inputs of shape {kind[0]} do not fit the model: {one_line(error)}") from error
    if (wrong := no_logits(output, len(x))) is not None:
        raise ModelError(f"the model must give one row of logits per sample, (n, outputs), but gives {wrong}.")
    check_gradient(output, network, x)
    outputs = output.shape[1]
    task.check_head(outputs)
    for words, part in (("training", task.train), ("test", task.test), ("validation", task.val)):
        if part is None:
            continue
        with task.error_context(words):
            first, label = part.first()
            if isinstance(part, TensorSamples):
                task.check_labels(part.y, outputs)
            elif words == "training":  # with which the model is looked at before the others are
                task.check_labels(label, outputs)
        shape = tuple(first.shape[1:])
        if shape != kind[0]:
            raise DataError(
                f"{task.name}: {words} inputs have shape {shape}, training inputs {kind[0]}: give both the same shape."
            )
        with task.error_context(words):
            check_scaled_alike(first, kind, network)
    return kind, outputs


def probe_inputs(task: Task, network: Network) -> Tensor:
    """Stored inputs of the task, as few as the model can be looked at with."""
    with task.error_context("training"):
        x, _ = task.train.first(min_eval_batch(network.model))
    return x if len(x) >= min_eval_batch(network.model) else torch.cat([x, x])


def diagnose(error: Exception, group: TaskGroup, network: Network) -> SteppeError | None:
    """What an error in learning comes from, in words, where more can be told than it tells itself: a model is looked at
    in train mode only after it has failed, as a forward in that mode may leave traces.
    """
    if isinstance(error, ShapesDifferError):
        return DataError(f"{group.name}: {error}")
    if isinstance(error, LayerDivergedError):
        return DivergedError(f"task {group.name!r}: {error}")
    if not isinstance(error, (TypeError, AttributeError, LookupError)):  # what comes of taking it for a tensor
        return None
    before = network.snapshot()
    try:
        x, _ = group.tasks[0].train.first()
        with torch.no_grad(), network.mode(training=True), preserve_global_rng(network.device):
            output = network.model(network.prepare_inputs(torch.cat([x, x])))  # BatchNorm wants two
    except Exception:  # then there is nothing to tell beside what failed first
        return None
    finally:
        network.restore(before)
    wrong = no_logits(output, 2)
    if wrong is None:
        return None
    return ModelError(
        f"in train mode, too, the model must give one row of logits per sample, (n, outputs), but gives {wrong}: "
        "leave auxiliary outputs away (aux_logits=False, say), or let its forward return the logits alone."
    )


def check_last_batch(method: Method, network: Network, group: TaskGroup, size: int) -> None:
    """Refuse a last batch of one sample that the model, in the mode it is in, cannot take by itself, where the method
    would give it so; what a DataLoader will give nobody knows.
    """
    sources = [task.train for task in group.tasks]
    norms = [module for module in network.model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    if not method.uses_bare_batch or not any(norm.training for norm in norms):
        return
    if not all(isinstance(source, (TensorSamples, DatasetSamples)) for source in sources):
        return
    if (sum(map(len, sources)) - 1) % size == 0:
        x, y = sources[0].first()
        if not accepts_single_sample(network, network.prepare(Batch(x, y, torch.full_like(y, group.first)))):
            raise single_sample_error(group.name)


def check_same_task(interrupted: State, group: TaskGroup, training: TrainingConfig) -> None:
    """Refuse to go on with another task, or in another way, than the one that broke off."""
    if interrupted["task"] != group.name or not training.equals(interrupted["training"]):
        raise UsageError(
            f"the learner was saved in the middle of {interrupted['task']!r}, learnt with {interrupted['training']}: "
            f"give it that again, before anything else (this is {group.name!r} with {training.as_dict()})."
        )
    described = interrupted.get("tasks")
    differs = None if described is None else _difference(described, group)
    if differs is not None:
        raise UsageError(
            f"the learner was saved in the middle of {interrupted['task']!r}, and {differs}: give it the same data and "
            "head again, before anything else."
        )


def check_loop_state(loop_state: State) -> None:
    """Refuse, by ValueError, a state in the middle of a task that tells of it what no state tells."""
    if not isinstance(loop_state, dict):
        return
    if (validation := loop_state["validation"]) and validation["cuts"] > _MOST_CUTS:
        raise ValueError(f"step sizes cannot have been cut {validation['cuts']} times")
    for each in loop_state.get("tasks", []):  # older states do not say
        kinds = type(each["head"]), type(each["samples"]), type(each["digest"])
        if any(kind not in known for kind, known in zip(kinds, ((range, _NONE), (int,), (str, _NONE)), strict=True)):
            raise ValueError("the data of the task that it broke off in is not described as data is")


def _difference(saved: Sequence[State], group: TaskGroup) -> str | None:
    """How the tasks differ from those that a state describes; None where they do not, as far as that is known."""
    if len(saved) != len(group.tasks):
        return f"{len(group.tasks)} tasks are given instead of {len(saved)}"
    for task, before, now in zip(group.tasks, saved, group.described, strict=True):
        if before["head"] != now["head"]:
            return f"{task.name!r} has the head {now['head']} now instead of {before['head']}"
        if before["samples"] != now["samples"]:
            return f"{task.name!r} has {now['samples']} training samples now instead of {before['samples']}"
        if None not in (before["digest"], now["digest"]) and before["digest"] != now["digest"]:
            return f"{task.name!r} has other training samples now"
    return None


def prepared_copy(network: Network, x: Tensor) -> Tensor:
    """Return a copy of stored samples as the model takes them.

    Raises:
        UsageError: `input_transform` works in place.
    """
    given = x.to(network.device, copy=True)  # like batches: moving it later would hide what is done to it
    version = given._version
    prepared = network.prepare_inputs(given)
    if given._version != version or not torch.equal(given, x.to(network.device)):  # a NumPy view counts no version
        raise UsageError(
            "`input_transform` changes its input in place, but batches are prepared several times and kept for replay; "
            "return a new tensor, such as (x - 5) / 2 instead of x.sub_(5).div_(2)."
        )
    return prepared


def as_task_list(tasks: Task | Sequence[Task]) -> list[Task]:
    """One task or several as a list; anything else is refused."""
    listed = list(tasks) if isinstance(tasks, Iterable) else [tasks]
    for task in listed:
        if not isinstance(task, Task):
            raise UsageError(
                f"a {type(task).__name__} is given as a task: make one with steppe.Task((inputs, labels), ...)."
            )
    if not listed:
        raise DataError("there is no task: give at least one.")
    return listed
