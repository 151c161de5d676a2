"""The layer rules of a gradient memory: a file per family of layers."""

from steppe.projection.rules import attention, convolution, embedding, linear, recurrent, transposed

__all__ = ["attention", "convolution", "embedding", "linear", "recurrent", "transposed"]
