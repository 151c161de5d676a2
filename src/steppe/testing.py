"""Test accuracies. Tasks that see the same samples, each in its own order of their numbers, are tested together.

Where a network begins with a linear layer, the columns of its weight can be put in order instead of the samples
(X[:, order] Wᵀ = X W'ᵀ with W'[:, order] = W): the samples are then prepared once for all, and one product serves many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steppe.data.samples import Reordering, TensorSamples
from steppe.errors import DataError
from steppe.linear_chain import LinearChain
from steppe.methods.base import Method
from steppe.network import Network
from steppe.task import Task

_BATCH = 512  # larger ones fall out of the cache
_AT_ONCE = 2**21  # elements of the first layer's weights, in all orders that are tested together


def accuracies(tasks: Sequence[Task], network: Network, method: Method | None) -> list[float]:
    """Test accuracy on each task, in percent, within its head; to be called in eval mode and without gradients."""
    found = [0.0] * len(tasks)
    chain = _quick_chain(network, method)
    together = {} if chain is None else _by_samples(tasks)
    for places in together.values():
        assert chain is not None
        limit = max(1, _AT_ONCE // chain.weights[0].numel())
        for some in (places[start : start + limit] for start in range(0, len(places), limit)):
            for place, accuracy in zip(some, _in_orders([tasks[p] for p in some], network, chain), strict=True):
                found[place] = accuracy
    for place in set(range(len(tasks))).difference(*together.values()):
        found[place] = _alone(tasks[place], network, method)
    return found


def predicted(scores: Tensor, head: range | None) -> Tensor:
    """The output row with the highest score, within the head if there is one."""
    if head is None:
        return scores.max(1).indices  # what argmax gives, in a seventh of the time
    return scores[:, head.start : head.stop].max(1).indices + head.start


def scores(x: Tensor, network: Network, method: Method | None) -> Tensor:
    """What prediction compares, from stored inputs."""
    prepared = network.prepare_inputs(x)
    return network.outputs(prepared) if method is None else method.scores(prepared)


def _alone(task: Task, network: Network, method: Method | None) -> float:
    if task.test is None:
        raise DataError(f"{task.name}: there is no test data; give the task test=(inputs, labels).")
    right = torch.zeros((), dtype=torch.int64, device=network.device)
    total = 0
    with task.blamed("test"):
        for x, y in task.test.batches(_BATCH, None):
            right += (predicted(scores(x, network, method), task.head) == y.to(network.device)).sum()
            total += len(y)
        if total == 0:
            raise DataError("gave no batch (a DataLoader that drops its last?).")
    return 100.0 * int(right) / total


def _in_orders(tasks: Sequence[Task], network: Network, chain: LinearChain) -> list[float]:
    """Accuracies on tasks that see the same samples in some order."""
    tests = [task.test for task in tasks if isinstance(task.test, TensorSamples)]
    first = chain.first_weights([test.view.order for test in tests if isinstance(test.view, Reordering)])
    labels = [test.y.to(network.device) for test in tests]
    right = torch.zeros(len(tasks), dtype=torch.int64, device=network.device)
    for start in range(0, len(tests[0]), _BATCH):
        part = slice(start, start + _BATCH)
        x = network.prepare_inputs(tests[0].x[part])
        outputs = chain.outputs_for(x, first)
        for place, (task, output) in enumerate(zip(tasks, outputs, strict=True)):
            right[place] += (predicted(output, task.head) == labels[place][part]).sum()
    return [100.0 * count / len(tests[0]) for count in right.tolist()]


def _quick_chain(network: Network, method: Method | None) -> LinearChain | None:
    """The network as a chain of linear layers, if orders of numbers make no difference to anything before it and its
    outputs are what prediction compares.
    """
    chain = network.chain
    if chain is None or not network.prepares_elements or not chain.untouched:
        return None
    return chain if method is None or type(method).scores is Method.scores else None


def _by_samples(tasks: Sequence[Task]) -> dict[object, list[int]]:
    """The places of the tasks that see samples in an order of their numbers, by what these samples are."""
    found: dict[object, list[int]] = {}
    for place, task in enumerate(tasks):
        test = task.test
        if isinstance(test, TensorSamples) and isinstance(test.view, Reordering) and test.x.ndim == 2:
            same = test.x.data_ptr(), test.x.shape, test.x.stride(), test.x.dtype, test.x.device
            found.setdefault(same, []).append(place)
    return found
