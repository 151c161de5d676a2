"""Find the weights of a model that a gradient memory covers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from steppe.errors import ModelError
from steppe.fast.linear_hooks import find_factorable
from steppe.network.network import Network
from steppe.projection.hooks import find_head_weight, find_last_weight, find_weights_used_outside
from steppe.projection.layers import ProjectedWeight, coverable_weights, linear_inputs, projected_weights
from steppe.projection.misread_weights import find_misread_weights
from steppe.projection.weights_used_by_value import find_weights_used_by_value
from steppe.runtime.contexts import without_fused_rnn
from steppe.runtime.warn import warn_user
from steppe.tensors.nest import Nest


def find_covered_weights(
    network: Network, x: Nest, exclude: tuple[str, ...], *, multi_head: bool, head: str | None = None
) -> dict[str, ProjectedWeight]:
    """Find the weights that a gradient memory covers: those of layers with a rule, but not a multi-head model's head.

    Warns about weights that cannot be covered: those of layers without a rule, and of layers that use their weight
    differently than their rule assumes.

    Args:
        network: The network.
        x: Prepared inputs to run it on.
        exclude: Names of weights and layers not to cover.
        multi_head: Whether tasks have their own outputs, whose layer is then not covered.
        head: The name of that layer or weight; None to detect it.

    Returns:
        The covered weights, by parameter name.

    Raises:
        ModelError: If the head cannot be identified, or a weight is also used outside its layer, so that only part of
            its gradient could be projected.
    """
    if multi_head and head is not None:
        exclude = (*exclude, head)
    covered = projected_weights(network.model, exclude)
    known = coverable_weights(network.model)
    if multi_head and head is None:
        with network.mode(training=False):
            output = find_head_weight(network.model, known, x)
            last = find_last_weight(network.model, known, x)
        named = any(_matches(name, entry) for name in _uncovered(network, known) for entry in exclude)
        if output is None and known and (not exclude or (last in covered and not named)):
            raise ModelError(
                "the tasks have separate heads, but no single layer computes the model's output: name the head "
                "with head='...', or its layers, or weights that belong to no layer, with exclude=(...). "
                f"The last layer that the forward runs has the weight {last!r}."
                if last is not None
                else "the tasks have separate heads, but the model hides the calls of its layers, so the head cannot "
                "be found: pass the model from before torch.compile (model._orig_mod), or name the head's layers with "
                "exclude=(...)."
            )
        covered = {name: weight for name, weight in covered.items() if name != output}
    with network.mode(training=False):
        _require_called(find_weights_used_outside(network.model, covered, x))
        misread = find_misread_weights(network.model, covered, x)
        understood = {name: weight for name, weight in covered.items() if name not in misread}
        misread += find_weights_used_by_value(network.model, understood, x)
    named_head = [name for name in network.trainable if multi_head and head is not None and _matches(name, head)]
    scales = {
        weight.scale_name
        for name, weight in known.items()
        if weight.norm is not None and weight.parameter.requires_grad and name not in misread
    }
    _warn_uncovered(network, {*(known.keys() - misread), *scales, *named_head})
    covered = {name: weight for name, weight in covered.items() if name not in misread}
    linear = {
        name: weight.layers for name, weight in covered.items() if weight.rule is linear_inputs and weight.norm is None
    }
    with network.mode(training=False), without_fused_rnn(network.model):
        factored = find_factorable(network.model, linear, x)
    return {name: replace(weight, factorable=name in factored) for name, weight in covered.items()}


def warn_shared_head(name: str, head: range | None, heads: Sequence[range | None], outputs: int) -> None:
    """Warn if a task's head overlaps an earlier one's in a multi-head model, whose last layer is not covered.

    Args:
        name: The task's name.
        head: Its head; None for all outputs.
        heads: The heads of the earlier tasks.
        outputs: The number of the model's outputs.
    """
    if not heads or heads[0] is None:
        return
    everything = range(outputs)
    own = everything if head is None else head
    for number, earlier in enumerate((everything if other is None else other for other in heads), start=1):
        if own.start < earlier.stop and earlier.start < own.stop:
            warn_user(
                f"{name}: its head, outputs {own.start} to {own.stop - 1}, overlaps task {number}'s, which is not "
                "protected: with heads, the last layer is not covered, as each task should have its own outputs. If "
                "tasks share outputs, omit `head` in all tasks; the last layer is then covered too.",
            )
            return


def _require_called(names: Sequence[str]) -> None:
    for name in names:
        raise ModelError(
            f"the weight {name!r} is used outside its layer, with inputs that a gradient memory cannot see, so its "
            f"gradient cannot be projected: call the layer, or leave the weight out with exclude=({name!r},)."
        )


def _uncovered(network: Network, known: Collection[str]) -> list[str]:
    """The trainable matrices that are not among the known weights."""
    return [name for name, p in network.trainable.items() if p.ndim > 1 and name not in known]


def _matches(name: str, entry: str) -> bool:
    """Whether an entry names the weight or a module that contains it."""
    return name == entry or name.startswith(entry + ".")


def _warn_uncovered(network: Network, known: Collection[str]) -> None:
    left = _uncovered(network, known)
    if left:
        warn_user(
            "these weights belong to layers that a gradient memory cannot cover, and will be learned without "
            f"protection: {', '.join(left)}",
        )
