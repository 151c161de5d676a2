"""Test results and predictions. Tasks with the same samples in different pixel orders are tested together.

Where a network begins with a linear layer, the columns of its weight can be permuted instead of the samples
(X[:, order] Wᵀ = X W'ᵀ with W'[:, order] = W): the samples are then prepared once, and one product serves many tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from steppe.data.collate import Pair, as_nest
from steppe.data.samples import PixelPermutation, TensorSamples
from steppe.data.task import Task, check_head
from steppe.data.tensors import check_dense
from steppe.errors import DataError, UsageError
from steppe.fast.linear_chain import LinearChain
from steppe.learning.input_kind import InputKind, Kind, check_scaled_alike, difference, kind_of
from steppe.learning.scoring import Accuracy, Best, Metric, check_accuracy_defined, start_score
from steppe.learning.task_checks import most_outputs
from steppe.methods.base import Method
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.runtime.devices import to_device
from steppe.runtime.session import yield_point
from steppe.runtime.signals import signals_unblocked
from steppe.tensors.nest import Nest, leaves, named_leaves, nest_device, nest_length, split_nest
from steppe.tensors.ragged import Ragged

BATCH = 512  # larger ones fall out of the cache
_AT_ONCE = 2**21  # elements of the first layer's weights, over all orders tested together


class _Test(NamedTuple):
    """A task with permuted samples, and its place among the tasks."""

    place: int
    task: Task
    samples: TensorSamples
    order: Tensor


def results(
    tasks: Sequence[Task],
    network: Network,
    method: Method | None,
    kind: Kind | None,
    metric: Metric | None,
    *,
    grows: bool = False,
) -> list[float]:
    """Return the metric on each task's test data, within its head; without one the accuracy, in percent.

    Call it in eval mode and without gradients. `kind` is that of the inputs trained on; `grows` says whether the
    model's head grows.
    """
    found: dict[int, float] = {}
    chain = _quick_chain(network, method) if metric is None else None
    if chain is not None:
        limit = max(1, _AT_ONCE // chain.weights[0].numel())
        for tests in _by_samples(tasks):
            for start in range(0, len(tests), limit):
                found.update(_in_orders(tests[start : start + limit], network, chain, kind, grows=grows))
    return [
        found[place] if place in found else _alone(task, network, method, kind, metric, grows=grows)
        for place, task in enumerate(tasks)
    ]


def as_inputs(given: object, network: Network) -> Nest:
    """Return inputs to predict as they are stored, in dense tensors."""
    with _blamed():
        x = as_nest(given)
        for leaf in leaves(x):
            check_dense(*(leaf.rows if isinstance(leaf, Ragged) else (leaf,)))
        return x if isinstance(x, Tensor) and x.ndim == 0 else _of_one_length(network.inputs.as_stored(x))


def _of_one_length(x: Nest) -> Nest:
    nest_length(x)
    return x


def predictions(x: Nest, head: range | None, network: Network, method: Method | None, kind: Kind | None) -> Tensor:
    """Return the class predicted for each stored input; call it in eval mode and without gradients."""
    found = [Best(rows, head).places for rows in _rows_to_compare(x, head, network, method, kind)]
    return torch.cat(found).to(nest_device(x))


def probabilities(x: Nest, head: range | None, network: Network, method: Method | None, kind: Kind | None) -> Tensor:
    """Return the softmax of the logits for each stored input, 0 outside the head."""
    found = []
    for rows in _rows_to_compare(x, head, network, method, kind):
        within = torch.softmax(rows if head is None else rows[:, head.start : head.stop], 1)
        found.append(within if head is None else torch.zeros_like(rows))
        if head is not None:
            found[-1][:, head.start : head.stop] = within
    return torch.cat(found).to(nest_device(x))


def outputs(x: Nest, network: Network, kind: Kind | None) -> Tensor:
    """Return the model's output for each stored input."""
    return torch.cat(list(_score_parts(x, network, None, kind))).to(nest_device(x))


def _rows_to_compare(
    x: Nest, head: range | None, network: Network, method: Method | None, kind: Kind | None
) -> Iterator[Tensor]:
    """Yield the scores of stored inputs part by part: a row per sample, a column per class, none of them NaN."""
    for compared in _score_parts(x, network, method, kind):
        if compared.ndim != 2:
            raise UsageError(
                f"predictions need one row of logits per sample, but the model's output has shape "
                f"{tuple(compared.shape)}; use learner.outputs(x)."
            )
        check_head(head, compared.shape[1])
        if bool(compared.isnan().any()):
            raise DataError("the model's output on some of the inputs to predict is NaN; check them.")
        yield compared


def _score_parts(x: Nest, network: Network, method: Method | None, kind: Kind | None) -> Iterator[Tensor]:
    scalar = isinstance(x, Tensor) and x.ndim == 0
    for part in [x] if scalar else split_nest(x, eval_batch_size(network.model, nest_length(x), BATCH)):
        with _blamed():
            found = scores(part, network, method, kind)
        yield found
        yield_point()


@contextmanager
def _blamed() -> Iterator[None]:
    """Say in a DataError raised inside that it is about the inputs to predict."""
    try:
        yield
    except DataError as error:
        raise DataError(f"the inputs to predict {re.sub('^has ', 'have ', str(error))}") from error


def scores(x: Nest, network: Network, method: Method | None, kind: Kind | None) -> Tensor:
    """The scores that prediction compares, for stored inputs; raises a DataError if the model rejects their kind."""
    if kind is None:
        return _compared(x, network, method)
    x = network.inputs.as_stored(x)
    check_scaled_alike(x, kind, network)
    own = kind_of(x)
    if [part.name for part in own] != [part.name for part in kind]:
        unlike, trained = difference(own, kind) or ("", "")
        raise DataError(f"have {unlike}, but the model was trained on {trained}; pass the same.")
    for leaf, part, trained_on in zip(_sorted_leaves(x), own, kind, strict=True):
        if len(part.shape) != len(trained_on.shape) or leaf.ndim == 0:
            raise _shape_error(leaf, trained_on)
    try:
        return _compared(x, network, method)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        for leaf, part, trained_on in zip(_sorted_leaves(x), own, kind, strict=True):
            if part.shape != trained_on.shape:
                raise _shape_error(leaf, trained_on) from error
        for part, trained_on in zip(own, kind, strict=True):
            if part.dtype != trained_on.dtype:
                raise DataError(
                    f"are {part.dtype}, which the model does not accept; it was trained on {trained_on.dtype}."
                ) from error
        raise


def _sorted_leaves(x: Nest) -> list[Tensor | Ragged]:
    """The leaves in the order of a `Kind`."""
    return [leaf for _, leaf in sorted(named_leaves(x), key=lambda item: item[0])]


def _shape_error(leaf: Tensor | Ragged, trained: InputKind) -> DataError:
    where = f" in {trained.name!r}" if trained.name else ""
    return DataError(
        f"have shape {tuple(leaf.shape)}{where}, which the model does not accept; it was trained on samples of shape "
        f"{trained.shape}."
    )


def _compared(x: Nest, network: Network, method: Method | None) -> Tensor:
    prepared = network.prepare_inputs(x)
    return network.outputs(prepared) if method is None else method.scores(prepared)


def _alone(
    task: Task, network: Network, method: Method | None, kind: Kind | None, metric: Metric | None, *, grows: bool
) -> float:
    if task.test is None:
        raise DataError(f"{task.name}: there is no test data; create the task with test=(inputs, labels).")
    score = start_score(metric, task, network)
    for x, y in _test_batches(task, network):
        with task.error_context("test"):
            found = scores(x, network, method, kind)
        if metric is None:
            check_accuracy_defined(task, found, y)
            _check(task, y, found.shape[1], grows=grows)
        elif found.ndim == 2:
            task.check_head(found.shape[1])
        score.add(found, network.inputs.prepare_targets(y))
        yield_point()
    return score.result()


def _test_batches(task: Task, network: Network) -> Iterator[Pair]:
    assert task.test is not None
    batches, given = iter(task.test.batches(eval_batch_size(network.model, task.test.count, BATCH), None)), 0
    while True:
        with task.error_context("test"):
            with signals_unblocked():
                pair = next(batches, None)
            if pair is None and given == 0:
                raise DataError("yields no batch (drop_last with too few samples?).")
        if pair is None:
            return
        given += len(pair[1])
        yield pair


def _check(task: Task, y: Tensor, outputs: int, *, grows: bool) -> None:
    """Raise DataError for a head that the model does not have, and for labels outside the head.

    Where the model's head grows, classes that it has not seen yet may be among the labels; they count as wrong.
    """
    task.check_head(outputs)
    with task.error_context("test"):
        task.check_labels(y, most_outputs(y, outputs) if grows else outputs)


def _in_orders(
    tests: Sequence[_Test], network: Network, chain: LinearChain, kind: Kind | None, *, grows: bool
) -> dict[int, float]:
    """Accuracies on tasks with the same samples, by place."""
    x, count = tests[0].samples.x, len(tests[0].samples)
    if kind is not None:
        with tests[0].task.error_context("test"):
            check_scaled_alike(x, kind, network)
    first = chain.first_weights([test.order for test in tests])
    for test in tests:
        _check(test.task, test.samples.y, chain.weights[-1].shape[0], grows=grows)
    labels = [to_device(test.samples.y, network.device) for test in tests]
    counts = [Accuracy(test.task, network.device) for test in tests]
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        outputs = chain.outputs_for(network.prepare_inputs(x[part]), first)
        for row, output in enumerate(outputs):
            counts[row].add(output, labels[row][part])
        yield_point()
    return {test.place: right.result() for test, right in zip(tests, counts, strict=True)}


def _quick_chain(network: Network, method: Method | None) -> LinearChain | None:
    """The network as a chain of linear layers, if inputs are prepared elementwise and its outputs are the scores."""
    chain = network.chain if network.output_loss.is_cross_entropy else None
    if chain is None or not network.inputs.is_elementwise or not chain.untouched:
        return None
    return chain if method is None or type(method).scores is Method.scores else None


def _by_samples(tasks: Sequence[Task]) -> list[list[_Test]]:
    """The tasks with permuted samples, grouped by their samples."""
    found: dict[object, list[_Test]] = {}
    for place, task in enumerate(tasks):
        test = task.test
        if (
            type(test) is TensorSamples
            and type(test.view) is PixelPermutation
            and isinstance(test.x, Tensor)
            and test.x.ndim == 2
        ):  # not a user's subclass
            same = test.x.data_ptr(), test.x.shape, test.x.stride(), test.x.dtype, test.x.device
            found.setdefault(same, []).append(_Test(place, task, test, test.view.order))
    return list(found.values())
