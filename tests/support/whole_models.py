"""Small models like users', with few enough inputs per layer to leave room to learn after a task.

Additive parameters that no gradient memory covers, such as biases, are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from torch.nn.utils.rnn import pack_padded_sequence

F64: dict[str, Any] = {"dtype": torch.float64}
WORDS, SAMPLES = 60, 3
Data = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Transformer encoder layers over embedded words and positions, some of them padding."""

    def __init__(self, norm_first: bool, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 48, padding_idx=0)
        self.places = nn.Embedding(30, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 64, batch_first=True, norm_first=norm_first)
        self.encode = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.encode(h, src_key_padding_mask=x == 0)[:, 0])


class Translator(nn.Module):
    """A decoder layer that attends to an encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 48)
        self.model = nn.Transformer(48, 2, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        return self.head(self.model(h, h[:, :2])[:, -1])


class Recurrent(nn.Module):
    """Embedded words through a recurrent layer, then a linear classifier of its last states."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 24, padding_idx=0)
        self.recurrent = kind(24, 40, num_layers=2, dropout=0.2, batch_first=True, **settings)
        self.packed = packed
        size = settings.get("proj_size", 40) * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(size, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.words(x)
        if self.packed:
            h = pack_padded_sequence(h, (x != 0).sum(1), batch_first=True, enforce_sorted=False)
            _, state = self.recurrent(h)
            state = state[0] if isinstance(state, tuple) else state
            directions = 2 if self.recurrent.bidirectional else 1
            return self.head(state[-directions:].transpose(0, 1).flatten(1))
        return self.head(self.recurrent(h)[0][:, -1])


class Cells(nn.Module):
    """A custom recurrence with torch's cells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(10, 30), nn.GRUCell(30, 30)
        self.head = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, h = None, None
        for step in x.unbind(1):
            state = self.first(step, state)
            h = self.second(state[0], h)
        return self.head(h)


class Autoencoder(nn.Module):
    """Images through two convolutions and back through two transposed ones; every pixel is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(2, 12, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(12, 40, 3), nn.GELU()
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(40, 24, 3, groups=2),
            nn.GELU(),
            nn.ConvTranspose2d(24, 2, 3, stride=2, padding=1, output_padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)).flatten(1)


class SelfAttention(nn.Module):
    """With separate linear layers for queries, keys and values."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attention = softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        return self.output((attention @ v).transpose(1, 2).flatten(2))


class Bert(nn.Module):
    """Like BERT: embeddings of words, positions and segments, attention, a feed-forward part, a pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.segments = nn.Embedding(WORDS, 48), nn.Embedding(30, 48), nn.Embedding(3, 48)
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(3))
        self.attention = SelfAttention(48, 4)
        self.up, self.down, self.pooler = nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, 48)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        h = self.norms[0](self.words(x) + self.places(places) + self.segments(1 * (places > 2)))
        h = self.norms[1](h + self.dropout(self.attention(h)))
        h = self.norms[2](h + self.dropout(self.down(nn.functional.gelu(self.up(h)))))
        return self.head(torch.tanh(self.pooler(h[:, 0])))


def normalized(old: bool) -> nn.Module:
    """A perceptron with weight norm, in torch's old or new form, with the norms of rows, columns and whole weights."""
    norm: Any = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
    model = nn.Sequential(
        norm(nn.Linear(12, 20)), nn.Tanh(), norm(nn.Linear(20, 16), dim=1), nn.Tanh(), norm(nn.Linear(16, 4), dim=None)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.where(torch.rand(parameter.shape) < 0.5, -1.5, 1.0))  # scales below 0 too
    return model


class NormalizedMix(nn.Module):
    """Weight norm on convolutions, transposed and grouped ones, and on a recurrent weight."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.down = norm(nn.Conv1d(24, 24, 2, groups=2))
        self.up = norm(nn.ConvTranspose1d(24, 24, 2, groups=2), dim=1)
        self.recurrent = norm(norm(nn.LSTM(24, 40, batch_first=True), "weight_hh_l0"), "weight_ih_l0")
        self.head = nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(torch.tanh(self.down(x))).mT
        return self.head(self.recurrent(h)[0][:, -1])


def bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(WORDS, 16, mode="mean"), nn.Tanh(), nn.Linear(16, 4))


def sentences(task: int) -> Data:
    """Sentences that share some words between tasks; the first sentence is shorter, if 0 is padding."""
    generator = torch.Generator().manual_seed(task)
    x = torch.randint(1, WORDS, (SAMPLES, 4), generator=generator)
    x[0, 3] = 0
    return x, torch.arange(SAMPLES)


def numbers(*shape: int) -> Callable[[int], Data]:
    def make(task: int) -> Data:
        generator = torch.Generator().manual_seed(task)
        return torch.randn(SAMPLES, *shape, generator=generator, **F64), torch.arange(SAMPLES)

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Data]]] = {
    "encoder layer": (lambda: Encoder(norm_first=False), sentences),
    "encoder layer, norm first": (lambda: Encoder(norm_first=True), sentences),
    "encoder of two layers": (lambda: Encoder(norm_first=False, layers=2), sentences),
    "encoder and decoder": (Translator, sentences),
    "gru": (lambda: Recurrent(nn.GRU), sentences),
    "gru, both ways, packed": (lambda: Recurrent(nn.GRU, packed=True, bidirectional=True), sentences),
    "lstm": (lambda: Recurrent(nn.LSTM), sentences),
    "lstm, projected, packed": (lambda: Recurrent(nn.LSTM, packed=True, proj_size=30), sentences),
    "rnn": (lambda: Recurrent(nn.RNN), sentences),
    "cells": (Cells, numbers(3, 10)),
    "autoencoder": (Autoencoder, numbers(2, 6, 6)),
    "bert": (Bert, sentences),
    "weight norm": (lambda: normalized(old=False), numbers(12)),
    "weight norm, old form": (lambda: normalized(old=True), numbers(12)),
    "weight norm elsewhere": (NormalizedMix, numbers(24, 3)),
    "bag of words": (bag, sentences),
}


def build(name: str) -> nn.Module:
    """One of the models, in float64, with nonzero, frozen biases."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    for path, parameter in model.named_parameters():
        if "bias" in path:
            nn.init.normal_(parameter, std=0.1)
            parameter.requires_grad_(False)
    return model
