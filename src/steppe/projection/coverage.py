"""Which of a model's weights a gradient memory covers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor, nn

from steppe.errors import ModelError
from steppe.network.linear_hooks import factorable
from steppe.network.network import Network
from steppe.projection.hooks import last_weight, output_weight, used_outside
from steppe.projection.layers import ProjectedWeight, coverable_weights, linear_inputs, projected_weights
from steppe.projection.true_inputs import misread_weights
from steppe.runtime.contexts import without_fused_rnn
from steppe.runtime.warn import warn_user


def coverage(network: Network, x: Tensor, exclude: tuple[str, ...], *, multi_head: bool) -> dict[str, ProjectedWeight]:
    """The weights that a gradient memory covers, seen with prepared inputs: all that a rule covers but those named, and
    in multi-head learning the head. Weights that no rule covers, and those of layers that do something else with them
    than their rule says, are named in a warning; one that the model also uses outside of its layer is refused, because
    only a part of its gradient could be projected.
    """
    covered = projected_weights(network.model, exclude)
    known = coverable_weights(network.model)
    if multi_head:
        with network.mode(training=False):
            head = output_weight(network.model, known, x)
            last = last_weight(network.model, known, x)
        named = any(_within(name, entry) for name in _uncovered(network, known) for entry in exclude)
        if head is None and known and (not exclude or (last in covered and not named)):
            raise ModelError(
                "the model is learnt with several heads, but no single layer gives its output: name the head's layers, "
                "or weights that belong to no layer, with exclude=(...). "
                f"The last layer that its forward runs has the weight {last!r}."
                if last is not None
                else "the model is learnt with several heads, but calls of its layers cannot be seen, so that the head "
                "is not found: give the model as it was before torch.compile (model._orig_mod), or name the head's "
                "layers with exclude=(...)."
            )
        covered = {name: weight for name, weight in covered.items() if name != head}
    with network.mode(training=False):
        _refuse_used_outside(used_outside(network.model, covered, x))
        misread = misread_weights(network.model, covered, x)
    _warn_uncovered(network, known.keys() - misread)
    covered = {name: weight for name, weight in covered.items() if name not in misread}
    linear = {name: weight.layers for name, weight in covered.items() if weight.rule is linear_inputs}
    with network.mode(training=False), without_fused_rnn(network.model):
        factored = factorable(network.model, linear, x)
    return {name: replace(weight, factorable=name in factored) for name, weight in covered.items()}


def warn_shared_head(name: str, head: range | None, heads: Sequence[range | None], outputs: int) -> None:
    """Say that a task's head has rows of an earlier one's, where the first task had a head and the last layer is
    therefore left uncovered.
    """
    if not heads or heads[0] is None:
        return
    everything = range(outputs)
    mine = everything if head is None else head
    for place, earlier in enumerate(everything if other is None else other for other in heads):
        if mine.start < earlier.stop and earlier.start < mine.stop:
            warn_user(
                f"{name}: its head, rows {mine.start} to {mine.stop - 1} of the output, has rows of task {place + 1}, "
                "which nothing protects: where tasks have heads the last layer is not covered, for each should have "
                "rows of its own. Where they share rows, leave `head` out of all tasks, from the first on: the last "
                "layer is then covered too.",
            )
            return


def _refuse_used_outside(names: Sequence[str]) -> None:
    for name in names:
        raise ModelError(
            f"the weight {name!r} is used outside of calls of its layer, where a gradient memory does not see what it "
            f"meets: its gradient cannot be projected. Call the layer, or leave it out with exclude=({name!r},)."
        )


def _uncovered(network: Network, known: Collection[str]) -> list[str]:
    """The matrices that have no rule and no other reason to pass through."""
    embedded = {
        id(p)
        for module in network.model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for p in module.parameters()
    }
    return [name for name, p in network.trainable.items() if p.ndim > 1 and name not in known and id(p) not in embedded]


def _within(name: str, entry: str) -> bool:
    """Whether a weight is the one that an entry names, or of the module."""
    return name == entry or name.startswith(entry + ".")


def _warn_uncovered(network: Network, known: Collection[str]) -> None:
    left = _uncovered(network, known)
    if left:
        warn_user(
            "these weights belong to layers that a gradient memory cannot cover, and will be learnt without "
            f"protection: {', '.join(left)}",
        )
