"""What is learnt at one go: one task, or several shuffled together, as a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from steppe.task import Task
from steppe.types import Batch


class Curriculum:
    """Tasks that are learnt together; `first` is the place of the first of them in the order of learning."""

    def __init__(self, tasks: Sequence[Task], first: int) -> None:
        self.tasks, self.first = list(tasks), first

    @property
    def name(self) -> str:
        """The task's name, or the first and the last of several."""
        names = [task.name for task in self.tasks]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, together"

    def count_batches(self, size: int) -> int:
        """How many batches one pass takes."""
        if len(self.tasks) == 1:
            return self.tasks[0].train.count_batches(size)
        return -(-sum(len(task.train) for task in self.tasks) // size)

    def batches(self, size: int, order: torch.Generator, outputs: int) -> Iterator[Batch]:
        """Every sample once, in batches of all tasks mixed; labels outside a task's head are refused."""
        if len(self.tasks) == 1:
            task = self.tasks[0]
            pairs = task.train.batches(size, order)
            while True:
                with task.blamed("training"):
                    pair = next(pairs, None)
                if pair is None:
                    return
                x, y = pair
                task.check_labels(y, outputs)
                yield Batch(x, y, torch.full_like(y, self.first))
        lengths = torch.tensor([len(task.train) for task in self.tasks])
        owner = torch.repeat_interleave(torch.arange(len(self.tasks)), lengths)
        start = lengths.cumsum(0) - lengths
        for pick in torch.split(torch.randperm(int(lengths.sum()), generator=order), size):
            owners = owner[pick]
            parts = [
                self._part(number, pick[owners == number] - start[number], outputs)
                for number in torch.unique(owners).tolist()
            ]
            yield Batch.union(parts)

    def _part(self, number: int, indices: torch.Tensor, outputs: int) -> Batch:
        task = self.tasks[number]
        with task.blamed("training"):
            x, y = task.train.take(indices)
        task.check_labels(y, outputs)
        return Batch(x, y, torch.full_like(y, self.first + number))
