"""Models as they are written for tokenizers' output, and tasks for them: samples of dictionaries and sequences."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from steppe import Task

WORDS, LENGTH, OUTPUTS = 20, 6, 4


class ModelOutput(dict[str, Any]):
    """A dictionary with attributes, as Hugging Face's models return."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Returned:
    """An object with logits."""

    loss: None
    logits: Tensor


class TextModel(nn.Module):
    """Embeds words, averages those that the mask leaves, and classifies; returns its output in the form wanted."""

    def __init__(self, form: str = "output") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden = nn.Embedding(WORDS, 8), nn.Linear(8, 12)
        self.classifier = nn.Linear(12, OUTPUTS)
        self.form = form

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, lengths: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = mask.to(self.table.weight.dtype).unsqueeze(-1)
        count = kept.sum(1) if lengths is None else lengths.unsqueeze(1)
        mean = (self.table(input_ids) * kept).sum(1) / count
        logits = self.classifier(self.hidden(mean).relu())
        forms = {"output": ModelOutput(logits=logits), "tuple": (logits, mean), "tensor": logits}
        return forms[self.form] if self.form in forms else Returned(None, logits)


def texts(count: int, first: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, masks and labels `first` or `first` + 1; each label has words of its own."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=generator) + first
    ids = torch.randint(4, (count, LENGTH), generator=generator) + 4 * y.unsqueeze(1) + 1
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return ids * mask, mask, y


def dict_task(number: int, *, head: bool = False, kind: type = dict, count: int = 24) -> Task:
    first = 2 * number

    def part(seed: int) -> tuple[Any, Tensor]:
        ids, mask, y = texts(count, first, seed)
        return kind(input_ids=ids, attention_mask=mask), y

    return Task(part(number), part(50 + number), val=part(90 + number), head=heads(number, head), name=f"task {number}")


def heads(number: int, head: bool) -> range | None:
    return range(2 * number, 2 * number + 2) if head else None


def sequences(count: int, first: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """The words of each text without padding."""
    ids, mask, y = texts(count, first, seed)
    return [row[: int(keep.sum())] for row, keep in zip(ids, mask, strict=True)], y


def ragged_task(number: int, *, head: bool = False, count: int = 24) -> Task:
    first = 2 * number
    rows = heads(number, head)
    return Task(
        sequences(count, first, number),
        sequences(count, first, 50 + number),
        val=sequences(count, first, 90 + number),
        head=rows,
        name=f"task {number}",
    )


class Rows(Dataset[Any]):
    """Dictionaries with their label, as Hugging Face's datasets yield them: lists of different lengths."""

    def __init__(self, count: int, first: int, seed: int) -> None:
        self.ids, self.y = sequences(count, first, seed)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place: int) -> dict[str, Any]:
        ids = self.ids[place].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": int(self.y[place])}


class Tokens(UserDict[str, Any]):
    """A tokenizer's output."""


class Stream(IterableDataset[Any]):
    """Samples one after another, of dictionaries with labels; `sized` knows how many."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.walks = rows, 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return iter([self.rows[place] for place in range(len(self.rows))])


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class OnePass(IterableDataset[Any]):
    """Its own iterator, which can be read once."""

    def __init__(self, rows: Rows) -> None:
        self.left = iter([rows[place] for place in range(len(rows))])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.left)
