"""Multi-head attention, which uses its weights inside one function.

    Q = W_q query    K = W_k key    V = W_v value    output = W_o concat_h(softmax(Q_h K_hᵀ / √d) V_h)

`in_proj_weight` holds W_q, W_k and W_v, one below the other: three groups of rows with input vectors of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, pad

from steppe.projection.rules.registry import register_call_rule

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


@register_call_rule(nn.MultiheadAttention, weights=_WEIGHTS)
def attention_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The rule of multi-head attention: query, key and value, and what the heads return."""
    assert isinstance(layer, nn.MultiheadAttention)
    return _inputs(layer, *args, **kwargs)


def _inputs(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> dict[str, Tensor]:
    """The input vectors, from the arguments of the layer's forward."""
    q, k, v = (x.reshape(-1, x.shape[-1]) for x in (query, key, value))
    columns = {"q_proj_weight": q[None], "k_proj_weight": k[None], "v_proj_weight": v[None]}
    if layer.in_proj_weight is not None:
        most = max(len(x) for x in (q, k, v))
        columns = {"in_proj_weight": torch.stack([pad(x, (0, 0, 0, most - len(x))) for x in (q, k, v)])}
    if layer.batch_first and query.ndim == 3:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    heads, _ = multi_head_attention_forward(
        query,
        key,
        value,
        layer.embed_dim,
        layer.num_heads,
        layer.in_proj_weight,
        layer.in_proj_bias,
        layer.bias_k,
        layer.bias_v,
        layer.add_zero_attn,
        0.0,
        torch.eye(layer.embed_dim, dtype=query.dtype, device=query.device),  # in place of W_o
        None,
        training=False,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=layer.in_proj_weight is None,
        q_proj_weight=layer.q_proj_weight,
        k_proj_weight=layer.k_proj_weight,
        v_proj_weight=layer.v_proj_weight,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )
    return {**columns, "out_proj.weight": heads.reshape(1, -1, layer.embed_dim)}
