"""Checks on what a learner is created with, and on the model while it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from steppe.checkpoint.tree import State
from steppe.data.padding import Padding
from steppe.errors import (
    DivergedError,
    ModelError,
    UsageError,
    short_repr,
    unknown_name,
)
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.optimizer_descent import OptimizerDescent
from steppe.network.module_state import is_frozen
from steppe.network.network import Network
from steppe.network.optimizer_choice import OptimizerChoice, OptimizerFactory, SchedulerFactory
from steppe.runtime.devices import check_device

_MODAL = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
)  # layers that behave differently in train and eval mode


def check_arguments(
    model: object, method: object, seed: object, device: object, input_transform: object, exclude: Sequence[str]
) -> None:
    """Raise an error for arguments that a learner cannot be created with."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{f'the layer {name!r}' if name else 'the model'} was created by torch.jit.script or torch.jit.trace, "
                "which hide its layers; pass the original module."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ModelError(f"the layer {name!r} has sparse gradients, which are not supported; set sparse=False.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name!r} is on the device 'meta' and has no values; initialize it first "
                "(model.to_empty(device='cpu'), then load or initialize its weights)."
            )
    if not isinstance(method, MethodConfig):
        raise UsageError(f"method must be a method's settings, such as steppe.FSDGPM(), got {short_repr(method)}.")
    if type(seed) is not int:
        raise UsageError(f"seed = {short_repr(seed)} is not an int.")
    if input_transform is not None and not callable(input_transform):
        raise UsageError(f"input_transform must be a function, got {short_repr(input_transform)}.")
    if not isinstance(exclude, (list, tuple)):
        raise UsageError(f"exclude must be a list of names, such as ['head'], got {short_repr(exclude)}.")
    check_device(next((p.device for p in model.parameters()), None) if device is None else device)


def choose_optimizer(
    optimizer: OptimizerFactory | None, scheduler: SchedulerFactory | None, *, keep_state: bool
) -> OptimizerChoice | None:
    """Return the user's choice of an optimizer; None if there is none."""
    if optimizer is not None:
        return OptimizerChoice(optimizer, scheduler, keep_state)
    if scheduler is not None or keep_state:
        raise UsageError(
            f"{'scheduler' if scheduler is not None else 'keep_optimizer_state'} needs an optimizer; pass "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.01), or another."
        )
    return None


def check_supported(method: MethodConfig, *, loss: bool, optimizer: bool) -> None:
    """Raise UsageError if the method cannot learn with a loss or an optimizer of the user's."""
    name = type(method).__name__
    if loss and not method.takes_any_loss:
        raise UsageError(
            f"{name} works with class numbers and cross-entropy only; leave out loss, or use another method."
        )
    if optimizer and not method.takes_any_optimizer:
        raise UsageError(f"{name} takes its own steps; leave out optimizer, or use another method.")


def check_uses_optimizer(method: Method, network: Network) -> None:
    """Raise UsageError for a method that would ignore the user's optimizer."""
    if network.optimizer is not None and not isinstance(method.descent, OptimizerDescent):
        raise UsageError(
            f"{type(method).__name__} does not take its steps with the learner's optimizer; let it use "
            "make_descent(network, lr, momentum), or leave out optimizer."
        )


def check_schedule(network: Network) -> None:
    """Raise UsageError if both a scheduler and validation would change the learning rates."""
    if network.optimizer is not None and network.optimizer.scheduler is not None:
        raise UsageError(
            "both patience and the scheduler would change the learning rates; use patience=0, or leave out scheduler."
        )


def check_padding(padding: object) -> None:
    """Raise UsageError for anything but a `Padding` or None."""
    if padding is not None and not isinstance(padding, Padding):
        raise UsageError(f"padding must be a steppe.Padding, such as steppe.Padding(0), got {short_repr(padding)}.")


def validate_exclude(exclude: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Return the excluded layers and weights; the model must have all of them."""
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for entry in exclude:
        if entry not in known:
            raise UsageError(f"exclude names {entry!r}, which is not a layer or weight of the model.")
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
    """Return the precision to train in; within the user's own torch.autocast that is its type."""
    if precision != "float32" or not torch.is_autocast_enabled(device.type):
        return precision
    dtype = torch.get_autocast_dtype(device.type)
    if dtype != torch.bfloat16:
        raise UsageError(f"torch.autocast to {dtype} is not supported; use learn(..., precision='bfloat16') instead.")
    return "bfloat16"


def check_precision(precision: str, dtype: torch.dtype) -> None:
    """Raise UsageError for a precision that is no faster with weights of this type."""
    if precision != "float32" and dtype != torch.float32:
        raise UsageError(
            f"precision = {precision!r} needs float32 weights, got {dtype}; convert them with model.float(), or leave "
            "precision out."
        )


def check_finite(weights: Mapping[str, Tensor], when: str) -> None:
    """Raise DivergedError if a weight is not finite."""
    for weight, parameter in weights.items():
        if not bool(torch.isfinite(parameter).all()):
            raise DivergedError(
                f"the weight {weight!r} is no longer finite {when}; lower the learning rate, and start from a learner "
                "that was saved before, or from a new one."
            )


def check_state_matches(
    state: State,
    settings: MethodConfig,
    seed: int,
    exclude: Sequence[str],
    head: str | None,
    *,
    has_input_transform: bool,
    padding: Padding | None,
    grow: bool,
    has_loss: bool,
) -> None:
    """Raise UsageError for the state of a learner that was created with other arguments."""
    own = type(settings).__name__, settings.as_dict(), seed, list(exclude), head
    saved = state["settings"]["kind"], state["settings"]["values"], state["seed"], state["exclude"], state.get("head")
    if (own[0], *own[2:]) != (saved[0], *saved[2:]) or not settings.equals(saved[1]):
        raise UsageError(f"the state was saved with {saved}, but this learner has {own}; use the same arguments.")
    if bool(state.get("grow", False)) != grow:  # older states have no such entry
        raise UsageError(f"the learner was saved with grow={not grow}; use the same.")
    if state.get("prepared", has_input_transform) != has_input_transform:  # older states have no such entry
        raise UsageError(
            "the learner was saved with its own `input_transform`, which a file cannot hold; pass the same function."
            if state["prepared"]
            else "the learner was saved without `input_transform`; leave it out."
        )
    saved_padding, own_padding = state.get("padding"), None if padding is None else padding.as_dict()
    if saved_padding != own_padding:
        raise UsageError(
            f"the learner was saved with padding = {saved_padding}, but this one has {own_padding}; use the same."
        )
    if bool(state.get("loss", False)) != has_loss:
        raise UsageError(
            "the learner was saved without a loss of its own; leave `loss` out."
            if has_loss
            else "the learner was saved with its own `loss`, which a file cannot hold; pass the same function."
        )


def has_extra_state(model: nn.Module) -> bool:
    """Whether the model has state beside weights and buffers, which a file would not hold."""
    return any(type(module).get_extra_state is not nn.Module.get_extra_state for module in model.modules())


def check_unchanged(model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Raise ModelError if weights were replaced, moved, frozen or added since the learner was created."""
    now = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if now.get(name) is not parameter:
            raise ModelError(
                f"the weight {name!r} was replaced after the learner was created, and would not be trained; change the "
                "model before, or create a new learner."
            )
        if parameter.device != device:
            raise ModelError(
                f"the weight {name!r} was moved from {device} to {parameter.device} after the learner was created; "
                f"move the model before, or create the learner with device={str(parameter.device)!r}."
            )
        if not parameter.requires_grad:
            raise ModelError(
                f"the weight {name!r} was frozen after the learner was created; "
                "freeze weights before, or create a new learner."
            )
    for name, parameter in now.items():
        if parameter.requires_grad and name not in parameters:
            raise ModelError(
                f"the weight {name!r} was added or unfrozen after the learner was created, and would not be trained; "
                "add all outputs and weights before, or create a new learner."
            )


def check_trainable(saved: Sequence[str] | None, model: nn.Module) -> None:
    """Raise ModelError if other weights are frozen than when the learner was saved; None: unknown."""
    if saved is None:
        return
    trained, now = set(saved), dict(model.named_parameters())
    unfrozen = [name for name, weight in now.items() if weight.requires_grad and name not in trained]
    frozen = [name for name, weight in now.items() if not weight.requires_grad and name in trained]
    if unfrozen:
        raise ModelError(
            f"the weight {_first(unfrozen)} was frozen when the learner was saved, but is trainable now; freeze it "
            "with requires_grad_(False) before loading."
        )
    if frozen:
        raise ModelError(
            f"the weight {_first(frozen)} was trainable when the learner was saved, but is frozen now; unfreeze it "
            "with requires_grad_(True) before loading."
        )


def frozen_eval_layers(model: nn.Module) -> list[str]:
    """Return the layers of frozen parts in eval mode that behave differently in it; they stay in it in training."""
    parts = [module for module in model.modules() if not module.training and is_frozen(module)]
    inside = {id(layer) for part in parts for layer in part.modules()}
    return [name for name, layer in model.named_modules() if id(layer) in inside and isinstance(layer, _MODAL)]


def check_frozen_eval_layers(saved: Sequence[str] | None, model: nn.Module) -> None:
    """Raise ModelError if frozen layers are in another mode than when the learner was saved; None: unknown."""
    if saved is None:
        return
    before, now = set(saved), set(frozen_eval_layers(model))
    in_train = [name for name, _ in model.named_modules() if name in before - now]
    in_eval = [name for name, _ in model.named_modules() if name in now - before]
    if in_train:
        raise ModelError(
            f"the frozen layer {_first(in_train)} was in eval mode when the saved learner was trained, but is in train "
            "mode now; put the frozen part in eval mode with part.eval()."
        )
    if in_eval:
        raise ModelError(
            f"the frozen layer {_first(in_eval)} was in train mode when the saved learner was trained, but is in eval "
            "mode now; put it in train mode with layer.train()."
        )


def _first(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} (and {len(names) - 1} more)"
