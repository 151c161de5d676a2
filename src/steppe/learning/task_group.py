"""Tasks that are learned together, usually one, as a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.data.samples import Pair, Samples, TensorSamples
from steppe.data.task import Task
from steppe.errors import DataError
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.runtime.devices import to_device
from steppe.runtime.rng import Streams
from steppe.runtime.session import yield_point
from steppe.tensors.batch import Batch


class TaskGroup:
    """Tasks that are learned together, shuffled.

    Args:
        tasks: The tasks.
        first: The number of the first of them among all tasks of the learner, from 0.
    """

    def __init__(self, tasks: Sequence[Task], first: int) -> None:
        self.tasks, self.first = list(tasks), first

    @property
    def name(self) -> str:
        """The task's name, or the first and the last of several."""
        names = [task.name for task in self.tasks]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, together"

    @cached_property
    def described(self) -> list[State]:
        """What distinguishes each task from another of the same name, without reading its data."""
        return [{"head": task.head, "samples": len(task.train), "digest": task.train.digest()} for task in self.tasks]

    def count_batches(self, size: int) -> int:
        """Return the number of batches per epoch."""
        if len(self.tasks) == 1:
            with self.tasks[0].error_context("training"):
                return self.tasks[0].train.count_batches(size)
        return -(-sum(len(task.train) for task in self.tasks) // size)

    def batches(
        self, size: int, streams: Streams, outputs: int | None, device: torch.device, skip: int = 0
    ) -> Iterator[Batch]:
        """Iterate over every sample once, in batches of all tasks mixed, augmented, on the device.

        Args:
            size: Samples per batch.
            streams: The learner's random streams; the order is drawn at once.
            outputs: How many outputs the model has; None if targets need not be class numbers.
            device: The device of the model.
            skip: How many batches to leave out at the beginning.

        Returns:
            An iterator over the batches.

        Raises:
            DataError: A label is outside its task's head.
        """
        order = streams.generator("order")
        if len(self.tasks) > 1:
            count = sum(len(task.train) for task in self.tasks)
            picks = torch.split(torch.randperm(count, generator=order, device="cpu"), size)[skip:]
            return self._mixed(picks, streams, outputs, device)
        with self.tasks[0].error_context("training"):
            pairs = self.tasks[0].train.batches(size, order, skip)
        return self._single(pairs, streams, outputs, device)

    def _single(
        self, pairs: Iterator[Pair], streams: Streams, outputs: int | None, device: torch.device
    ) -> Iterator[Batch]:
        while True:
            with self.tasks[0].error_context("training"):
                pair = next(pairs, None)
            if pair is None:
                return
            yield self._part(0, pair, streams, outputs, device)

    def _mixed(
        self, picks: Sequence[Tensor], streams: Streams, outputs: int | None, device: torch.device
    ) -> Iterator[Batch]:
        lengths = torch.tensor([len(task.train) for task in self.tasks], device="cpu")
        owner = torch.repeat_interleave(torch.arange(len(self.tasks), device="cpu"), lengths)
        start = lengths.cumsum(0) - lengths
        for pick in picks:
            owners = owner[pick]
            parts = []
            for number in torch.unique(owners).tolist():
                with self.tasks[number].error_context("training"):
                    pair = self.tasks[number].train.take(pick[owners == number] - start[number])
                parts.append(self._part(number, pair, streams, outputs, device))
            yield Batch.union(parts)

    def _part(self, number: int, pair: Pair, streams: Streams, outputs: int | None, device: torch.device) -> Batch:
        """Samples of one task as a batch."""
        task = self.tasks[number]
        x, y = pair
        with task.error_context("training"):
            _check_labels(task, task.train, y, outputs)
        x, y = to_device(x, device), to_device(y, device)
        if task.augment is not None:
            x = _augment(task, x, streams.generator("augmentation"))
        return Batch(x, y, torch.full_like(y, self.first + number))

    def require_validation(self) -> None:
        """Raise DataError for a task without validation data."""
        for task in self.tasks:
            if task.val is None:
                raise DataError(
                    f"{task.name}: `patience` needs validation data; create the task with "
                    "val=(inputs, labels), or use patience=0."
                )

    @torch.no_grad()
    def validation_loss(self, network: Network, outputs: int | None, size: int = 1024) -> float:
        """Return the mean loss over the tasks' validation data, in eval mode; every sample counts the same."""
        total, count = torch.zeros((), dtype=torch.float64, device=network.device), 0
        with network.mode(training=False):
            for number, task in enumerate(self.tasks):
                assert task.val is not None
                before = count
                with task.error_context("validation"):
                    for x, y in task.val.batches(eval_batch_size(network.model, len(task.val), size), None):
                        _check_labels(task, task.val, y, outputs)
                        batch = network.prepare(Batch(x, y, torch.full_like(y, self.first + number)))
                        total += network.loss(batch).double() * len(y)
                        count += len(y)
                        yield_point()
                    if count == before:
                        raise DataError("yields no batch (drop_last with too few samples?).")
        return float(total) / count


def _check_labels(task: Task, samples: Samples, y: Tensor, outputs: int | None) -> None:
    """Check a batch's class numbers, unless targets are something else. Those of tensors were all checked before."""
    if outputs is not None and not isinstance(samples, TensorSamples):
        task.check_labels(y, outputs)


def _augment(task: Task, x: Tensor, generator: torch.Generator) -> Tensor:
    """A new variant of a batch of the task's inputs."""
    assert task.augment is not None
    own = x if isinstance(task.train, TensorSamples) else x.clone()  # a DataLoader's batch may belong to the user
    varied = task.augment(own, generator)
    if (differs := _difference(varied, x)) is not None:
        raise DataError(
            f"{task.name}: `augment` returned {differs[0]} for inputs {differs[1]}; it must return a tensor with one "
            "variant of each, of the same shape and type and on the same device, because replay keeps the variants."
        )
    return varied.detach()  # replay would keep its graph


def _difference(varied: object, x: Tensor) -> tuple[str, str] | None:
    """Describe how variants differ from their inputs: what they are, and what the inputs are."""
    if not isinstance(varied, Tensor):
        return type(varied).__name__, f"of shape {tuple(x.shape)}"
    if varied.shape != x.shape:
        return f"a tensor of shape {tuple(varied.shape)}", f"of shape {tuple(x.shape)}"
    for own, its, words in ((varied.dtype, x.dtype, "of type"), (varied.device, x.device, "on")):
        if own != its:
            return f"a tensor {words} {own}", f"{words} {its}"
    return None if varied.layout == x.layout else (f"a {varied.layout} tensor", f"that are {x.layout}")
