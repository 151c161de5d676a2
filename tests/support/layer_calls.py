"""A case for each kind of layer that does more with its weights than multiply the rows of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

F64: dict[str, Any] = {"dtype": torch.float64}


class Call(NamedTuple):
    """A layer, and the arguments of its call."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, **F64)


def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Call:
    return Call(layer, args, kwargs)


def packed(size: int, *lengths: int) -> Any:
    return pack_sequence([randn(length, size) for length in lengths], enforce_sorted=False)


def attention(**settings: Any) -> nn.Module:
    layer = nn.MultiheadAttention(24, 2, **settings, **F64)
    for name, parameter in layer.named_parameters():
        if "bias" in name:  # they are 0 initially
            nn.init.normal_(parameter)
    return layer


def selfish(layer: nn.Module, x: Tensor, **kwargs: Any) -> Call:
    return Call(layer, (x, x, x), kwargs)


PADDED = torch.tensor([[False, False, False, True], [False] * 4])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(4, **F64)

TRANSPOSED: dict[str, Callable[[], Call]] = {
    "transposed 1d": lambda: call(nn.ConvTranspose1d(3, 4, 3, **F64), randn(2, 3, 2)),
    "transposed 1d on one sample": lambda: call(nn.ConvTranspose1d(3, 4, 3, bias=False, **F64), randn(3, 2)),
    "transposed 1d, all at once": lambda: call(
        nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2, **F64), randn(1, 6, 3)
    ),
    "transposed 1d, much padding": lambda: call(nn.ConvTranspose1d(8, 2, 3, padding=3, **F64), randn(1, 8, 7)),
    "transposed 1d, size given": lambda: call(
        nn.ConvTranspose1d(6, 2, 3, stride=3, **F64), randn(1, 6, 2), output_size=[8]
    ),
    "transposed 2d": lambda: call(nn.ConvTranspose2d(8, 3, (2, 3), **F64), randn(1, 8, 2, 3)),
    "transposed 2d, stride, padding": lambda: call(
        nn.ConvTranspose2d(4, 3, (3, 4), stride=(1, 2), padding=(1, 2), **F64), randn(1, 4, 3, 3)
    ),
    "transposed 2d, groups, dilation": lambda: call(
        nn.ConvTranspose2d(8, 6, (2, 3), dilation=(3, 2), groups=2, **F64), randn(1, 8, 2, 1)
    ),
    "transposed 2d, shape given": lambda: call(
        nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1, **F64), randn(1, 4, 2, 2), [2, 3, 5, 4][-2:]
    ),
    "transposed 3d": lambda: call(
        nn.ConvTranspose3d(6, 4, (2, 1, 2), stride=(2, 1, 1), padding=(1, 0, 0), groups=2, **F64), randn(1, 6, 2, 2, 1)
    ),
}
RECURRENT: dict[str, Callable[[], Call]] = {
    "rnn": lambda: call(nn.RNN(12, 16, **F64), randn(3, 2, 12)),
    "rnn, relu, no bias": lambda: call(nn.RNN(12, 16, nonlinearity="relu", bias=False, **F64), randn(3, 2, 12)),
    "gru": lambda: call(nn.GRU(12, 16, **F64), randn(3, 2, 12), randn(1, 2, 16)),
    "gru, deep, both ways": lambda: call(
        nn.GRU(12, 10, num_layers=2, bidirectional=True, batch_first=True, **F64), randn(2, 3, 12)
    ),
    "gru, packed, both ways": lambda: call(
        nn.GRU(12, 14, num_layers=2, bidirectional=True, **F64), packed(12, 2, 4, 1), hx=randn(4, 3, 14)
    ),
    "gru on one sequence": lambda: call(nn.GRU(12, 16, batch_first=True, **F64), randn(4, 12), randn(1, 16)),
    "lstm": lambda: call(nn.LSTM(12, 16, **F64), randn(3, 2, 12)),
    "lstm, state given": lambda: call(nn.LSTM(12, 16, **F64), randn(3, 2, 12), (randn(1, 2, 16), randn(1, 2, 16))),
    "lstm, projected, deep, both ways": lambda: call(
        nn.LSTM(12, 16, num_layers=2, proj_size=9, bidirectional=True, batch_first=True, **F64), randn(2, 3, 12)
    ),
    "lstm, packed": lambda: call(nn.LSTM(12, 16, num_layers=2, batch_first=True, **F64), packed(12, 3, 1, 2)),
    "lstm on one sequence": lambda: call(
        nn.LSTM(12, 16, proj_size=8, **F64), randn(4, 12), (randn(1, 8), randn(1, 16))
    ),
}
CELLS: dict[str, Callable[[], Call]] = {
    "rnn cell": lambda: call(nn.RNNCell(6, 8, **F64), randn(3, 6), randn(3, 8)),
    "gru cell": lambda: call(nn.GRUCell(6, 8, **F64), randn(3, 6), hx=randn(3, 8)),
    "gru cell on one sample": lambda: call(nn.GRUCell(6, 8, **F64), randn(6), randn(8)),
    "lstm cell": lambda: call(nn.LSTMCell(6, 8, **F64), randn(3, 6), (randn(3, 8), randn(3, 8))),
}
ATTENTION: dict[str, Callable[[], Call]] = {
    "attention": lambda: selfish(attention(), randn(4, 2, 24)),
    "attention, batch first": lambda: selfish(attention(batch_first=True), randn(2, 4, 24)),
    "attention on one sequence": lambda: selfish(attention(batch_first=True, bias=False), randn(4, 24)),
    "attention, padded": lambda: selfish(attention(batch_first=True), randn(2, 4, 24), key_padding_mask=PADDED),
    "attention, causal": lambda: selfish(
        attention(batch_first=True), randn(2, 4, 24), need_weights=False, attn_mask=CAUSAL, is_causal=True
    ),
    "attention, both masks": lambda: selfish(
        attention(), randn(4, 2, 24), key_padding_mask=PADDED, attn_mask=CAUSAL.isinf()
    ),
    "attention to others": lambda: call(attention(), randn(3, 2, 24), randn(5, 2, 24), value=randn(5, 2, 24)),
    "attention, other sizes": lambda: call(
        attention(kdim=11, vdim=15, batch_first=True), randn(2, 3, 24), randn(2, 5, 11), randn(2, 5, 15)
    ),
    "attention, additional keys": lambda: selfish(attention(add_bias_kv=True, add_zero_attn=True), randn(3, 2, 24)),
}
TABLES: dict[str, Callable[[], Call]] = {
    "embedding": lambda: call(nn.Embedding(9, 4, **F64), torch.tensor([[3, 1, 3], [7, 0, 1]])),
    "embedding, padding": lambda: call(nn.Embedding(9, 4, padding_idx=0, **F64), torch.tensor([3, 0, 0, 8])),
    "embedding, bounded": lambda: call(nn.Embedding(9, 4, max_norm=1.0, **F64), torch.tensor([3, 1, 5])),
    "bag": lambda: call(nn.EmbeddingBag(9, 4, **F64), torch.tensor([[3, 1, 3], [7, 0, 1]])),
    "bag, weighed": lambda: call(
        nn.EmbeddingBag(9, 4, mode="sum", padding_idx=2, **F64),
        torch.tensor([3, 1, 2, 7]),
        torch.tensor([0, 3]),
        per_sample_weights=randn(4),
    ),
    "bag, largest": lambda: call(
        nn.EmbeddingBag(9, 4, mode="max", **F64), torch.tensor([3, 1, 2, 7]), torch.tensor([0, 1])
    ),
}
CALLS = {**TRANSPOSED, **RECURRENT, **CELLS, **ATTENTION, **TABLES}
