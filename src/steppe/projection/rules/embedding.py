"""Embeddings: the inputs are one-hot vectors, so what they span is a set of rows of the table."""

from __future__ import annotations

from torch import Tensor, nn

from steppe.projection.rules.registry import Layout, register_rule


@register_rule(nn.Embedding, nn.EmbeddingBag, layout=Layout.TABLE)
def embedding_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """The rule of embeddings and bags, of any mode: the indices of the rows that are looked up, without padding."""
    assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    rows = x.reshape(-1)
    if layer.padding_idx is None:
        return rows
    return rows[rows != layer.padding_idx]  # this row is never trained
