"""Calling a model with a nest of inputs, and finding the tensor in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from steppe.tensors.nest import Nest


def call_model(model: Callable[..., Any], x: Nest) -> Tensor:
    """Return a model's output for prepared inputs, as `find_output` picks it.

    Args:
        model: The model, or another way to call it.
        x: A tensor is passed as `model(x)`, a dictionary as `model(**x)`, a tuple or list as `model(*x)`.

    Returns:
        The output; not a tensor if the model returned none.

    Example:
        >>> import torch
        >>> call_model(lambda ids, mask: {"logits": ids * mask}, {"mask": torch.ones(2), "ids": torch.ones(2)})
        tensor([1., 1.])
    """
    if isinstance(x, Tensor):
        output: Tensor = find_output(model(x))
    else:
        args, kwargs = arguments(x)
        output = find_output(model(*args, **kwargs))
    return output


def arguments(x: Nest) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that stand for a nest: in order, and by name."""
    if isinstance(x, Mapping):
        places = sorted(key for key in x if isinstance(key, int))
        return tuple(x[key] for key in places), {key: x[key] for key in x if not isinstance(key, int)}
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def find_output(returned: Any) -> Any:
    """Return the tensor that a model's return value is about.

    Args:
        returned: A tensor; an object or dictionary with `logits`; or a tuple or list whose first part is one of these.

    Returns:
        The tensor, or what was returned if there is none.

    Example:
        >>> import torch
        >>> find_output((torch.zeros(1), "auxiliary"))
        tensor([0.])
    """
    if isinstance(returned, Tensor):
        return returned
    logits = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(returned, (tuple, list)) and returned:
        found = find_output(returned[0])
        return found if isinstance(found, Tensor) else returned
    return returned
