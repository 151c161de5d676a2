"""Models like users', and data they can learn: each class of samples is bright in its own positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


def mlp(inputs: int = 8, outputs: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.ReLU(inplace=True), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, outputs)
    )


def convolutional() -> nn.Module:
    """With BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(24, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, 4),
    )


class Table(nn.Module):
    """Weights, but no layer that a gradient memory could cover."""

    def __init__(self, inputs: int = 8) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(inputs, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.scores


class BreaksAt(nn.Module):
    """An MLP whose output is broken in one forward in training, counted from 1."""

    def __init__(self, at: int, broken: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.left, self.broken = mlp(), at, broken

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        output: Tensor = self.inner(x)
        return self.broken(output) if self.left == 0 and self.training else output


class Sequence(nn.Module):
    """Conv1d over a signal, the mean over time, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3, stride=2)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


class Words(nn.Module):
    """An embedding, averaged, then a hidden layer; `tied` shares the table with the head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12 if tied else 4)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.table(x).mean(1))))


class Attention(nn.Module):
    """Self-attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.lift(x.flatten(1, 2))
        return self.head((rows + self.attend(rows, rows, rows)[0]).mean(1))


class Transformer(nn.Module):
    """One encoder layer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 8)
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(self.lift(x.flatten(1, 2))).mean(1))


class Padded(nn.Module):
    """An encoder over sentences of different lengths: a mask hides the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(self.table(x), src_key_padding_mask=x == 12)[:, 0])


def bright(*shape: int) -> Callable[[int, int], Pair]:
    """Data of this shape: class c of 4 is bright in every fourth value, with an offset that depends on the task."""

    def make(n: int, task: int) -> Pair:
        generator = torch.Generator().manual_seed(100 + task)
        x = 0.2 * torch.randn(n, *shape, generator=generator)
        y = torch.arange(n) % 4
        flat = x.view(n, -1)
        for place in range(n):
            flat[place, (int(y[place]) + task) % 4 :: 4] += 1.0
        return x, y

    return make


def sentences(n: int, task: int) -> Pair:
    """Class c consists of the words c, c + 4 and c + 8, shifted by the task."""
    y = torch.arange(n) % 4
    spoken = torch.stack([(y + task) % 4 + 4 * k for k in range(3)], dim=1)
    return spoken, y


def shortened(n: int, task: int) -> Pair:
    """The same, with every other sentence one word shorter."""
    x, y = sentences(n, task)
    x[::2, 2] = 12
    return x, y


@dataclass(frozen=True)
class Own:
    """A model with data that fit it, and the weights that a gradient memory covers in it."""

    build: Callable[[], nn.Module]
    data: Callable[[int, int], Pair]
    covered: frozenset[str]
    newly_covered: frozenset[str] = frozenset()  # what was not yet covered when the golden bits were recorded

    def source(self, n: int = 40, task: int = 0) -> Any:
        return self.data(n, task)


OWN = {
    "mlp": Own(mlp, bright(8), frozenset({"0.weight", "2.weight", "4.weight"})),
    "convolutional": Own(convolutional, bright(1, 4, 4), frozenset({"0.weight", "6.weight", "10.weight"})),
    "sequence": Own(Sequence, bright(1, 8), frozenset({"conv.weight", "head.weight"})),
    "words": Own(
        Words,
        sentences,
        frozenset({"table.weight", "hidden.weight", "head.weight"}),
        newly_covered=frozenset({"table.weight"}),
    ),
    "attention": Own(
        Attention,
        bright(1, 4, 4),
        frozenset({"lift.weight", "attend.in_proj_weight", "attend.out_proj.weight", "head.weight"}),
        newly_covered=frozenset({"attend"}),
    ),
    "transformer": Own(
        Transformer,
        bright(1, 4, 4),
        frozenset(
            {
                "lift.weight",
                "encode.self_attn.in_proj_weight",
                "encode.self_attn.out_proj.weight",
                "encode.linear1.weight",
                "encode.linear2.weight",
                "head.weight",
            }
        ),
        newly_covered=frozenset({"encode.self_attn"}),
    ),
    "padded": Own(
        Padded,
        shortened,
        frozenset(
            {
                "table.weight",
                "encode.layers.0.self_attn.in_proj_weight",
                "encode.layers.0.self_attn.out_proj.weight",
                "encode.layers.0.linear1.weight",
                "encode.layers.0.linear2.weight",
                "head.weight",
            }
        ),
        newly_covered=frozenset({"table", "encode.layers.0.self_attn"}),
    ),
}
