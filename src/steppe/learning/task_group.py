"""Tasks that are learned together, usually one, as a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.data.collate import Pair, as_dicts_and_tuples
from steppe.data.samples import TensorSamples
from steppe.data.samples_base import Samples
from steppe.data.task import Task
from steppe.errors import DataError
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.runtime.rng import Streams
from steppe.runtime.session import yield_point
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest, clone_nest, map_nest, named_leaves, nest_to_device
from steppe.tensors.ragged import Ragged


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
        return [{"head": task.head, "samples": task.train.count, "digest": task.train.digest()} for task in self.tasks]

    def count_batches(self, size: int) -> int | None:
        """Return the number of batches per epoch; None if it is not known."""
        if len(self.tasks) == 1:
            with self.tasks[0].error_context("training"):
                return self.tasks[0].train.count_batches(size)
        return -(-sum(len(task.train) for task in self.tasks) // size)

    def batches(
        self, size: int, streams: Streams, outputs: int | None, network: Network, skip: int = 0
    ) -> Iterator[Batch]:
        """Iterate over every sample once, in batches of all tasks mixed, augmented, on the device.

        Args:
            size: Samples per batch.
            streams: The learner's random streams; the order is drawn at once.
            outputs: How many outputs the model has; None if targets need not be class numbers.
            network: The network to learn them.
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
            return self._mixed(picks, streams, outputs, network)
        with self.tasks[0].error_context("training"):
            pairs = self.tasks[0].train.batches(size, order, skip)
        return self._single(pairs, streams, outputs, network)

    def _single(
        self, pairs: Iterator[Pair], streams: Streams, outputs: int | None, network: Network
    ) -> Iterator[Batch]:
        while True:
            with self.tasks[0].error_context("training"):
                pair = next(pairs, None)
            if pair is None:
                return
            yield self._part(0, pair, streams, outputs, network)

    def _mixed(
        self, picks: Sequence[Tensor], streams: Streams, outputs: int | None, network: Network
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
                parts.append(self._part(number, pair, streams, outputs, network))
            yield Batch.union(parts)

    def _part(self, number: int, pair: Pair, streams: Streams, outputs: int | None, network: Network) -> Batch:
        """Samples of one task as a batch."""
        task = self.tasks[number]
        x, y = pair
        with task.error_context("training"):
            _check_labels(task, task.train, y, outputs)
            x = network.inputs.as_stored(x)
        x, y = nest_to_device(x, network.device), nest_to_device(y, network.device)
        if task.augment is not None:
            x = _augment(task, x, streams.generator("augmentation"))
        return Batch.of_task(x, y, self.first + number)

    def require_mixable(self) -> None:
        """Raise DataError for one of several tasks whose samples cannot be shuffled together with the others'."""
        for task in self.tasks if len(self.tasks) > 1 else ():
            with task.error_context("training"):
                task.train.require_indexable()

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
                    for x, y in task.val.batches(eval_batch_size(network.model, task.val.count, size), None):
                        _check_labels(task, task.val, y, outputs)
                        batch = network.prepare(Batch.of_task(x, y, self.first + number))
                        total += network.loss(batch).double() * len(y)
                        count += len(y)
                        yield_point()
                    if count == before:
                        raise DataError("yields no batch (drop_last with too few samples?).")
        return float(total) / count


def _check_labels(task: Task, samples: Samples, y: Any, outputs: int | None) -> None:
    """Check a batch's class numbers, unless targets are something else. Those of tensors were all checked before."""
    if outputs is not None and not isinstance(samples, TensorSamples):
        task.check_labels(y, outputs)


def _augment(task: Task, x: Nest, generator: torch.Generator) -> Nest:
    """A new variant of a batch of the task's inputs."""
    assert task.augment is not None
    own = x if isinstance(task.train, TensorSamples) else clone_nest(x)  # a DataLoader's batch may belong to the user
    varied = task.augment(own, generator)
    if (differs := _difference(varied, x)) is not None:
        raise DataError(
            f"{task.name}: `augment` returned {differs[0]} for inputs {differs[1]}; it must return a tensor with one "
            "variant of each, of the same shape and type and on the same device, because replay keeps the variants."
        )
    return map_nest(lambda leaf: leaf.detach(), as_dicts_and_tuples(varied))  # replay would keep its graph


def _difference(varied: Any, x: Nest) -> tuple[str, str] | None:
    """Describe how variants differ from their inputs: what they are, and what the inputs are."""
    if isinstance(x, (Tensor, Ragged)):
        return _leaf_difference(varied, x)
    parts, inputs = dict(named_leaves(varied)), dict(named_leaves(x))
    if parts.keys() != inputs.keys():
        return f"the parts {', '.join(map(repr, parts))}", f"with the parts {', '.join(map(repr, inputs))}"
    differences = (_leaf_difference(parts[name], leaf) for name, leaf in inputs.items())
    return next((found for found in differences if found is not None), None)


def _leaf_difference(varied: object, x: Tensor | Ragged) -> tuple[str, str] | None:
    if not isinstance(varied, type(x)):
        return type(varied).__name__, f"of shape {tuple(x.shape)}"
    assert isinstance(varied, (Tensor, Ragged))
    if varied.shape != x.shape:
        return f"a tensor of shape {tuple(varied.shape)}", f"of shape {tuple(x.shape)}"
    for own, its, words in ((varied.dtype, x.dtype, "of type"), (varied.device, x.device, "on")):
        if own != its:
            return f"a tensor {words} {own}", f"{words} {its}"
    if isinstance(varied, Ragged) or isinstance(x, Ragged):
        return None
    return None if varied.layout == x.layout else (f"a {varied.layout} tensor", f"that are {x.layout}")
