"""Gradient clipping: the factor that brings a norm below a bound."""

from __future__ import annotations

from torch import Tensor


def clip_ratio(norm: float, bound: float) -> float:
    """The factor that scales a vector down to a norm of at most `bound`.

    Args:
        norm: The norm of the vector.
        bound: The largest norm allowed.

    Returns:
        The factor, at most 1.

    Example:
        >>> round(clip_ratio(4.0, 2.0), 3), clip_ratio(1.0, 2.0)
        (0.5, 1.0)
    """
    factor = bound / (norm + 1e-6)
    return factor if factor < 1.0 else 1.0


def clip_ratio_tensor(norm: Tensor, bound: float) -> Tensor:
    """`clip_ratio` of a norm on its device, without waiting for it."""
    return (bound / (norm + 1e-6)).clamp(max=1.0)
