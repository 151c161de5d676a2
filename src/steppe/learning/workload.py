"""What a learner's work asks of the process: how many threads, and whether torch's global generators."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from steppe.data.samples import TensorSamples
from steppe.data.task import Task
from steppe.errors import UsageError, short_repr
from steppe.methods.base import Method
from steppe.network.network import Network
from steppe.runtime.rng import preserve_global_rng
from steppe.runtime.threads import choose_num_threads, count_multiplications


class Workload:
    """What a learner's work asks for; `threads` is the number that its user chose."""

    def __init__(self, network: Network, threads: int | None) -> None:
        self._network, self.chosen = network, threads
        self._counted: dict[tuple[int, ...], int] = {}  # multiplications of a sample, by its shape

    def threads(self, stored: Tensor, batch: int) -> int:
        """How many threads suit batches of so many samples like the stored ones."""
        return self.chosen or choose_num_threads(self.count(stored), batch)

    def count(self, stored: Tensor) -> int:
        """How many multiplications a sample like the stored ones takes; looked at once for each shape."""
        shape = tuple(stored.shape[1:])
        if shape not in self._counted:
            with preserve_global_rng(self._network.device), self._network.mode(training=False):
                prepared = self._network.prepare_inputs(stored)
                self._counted[shape] = count_multiplications(self._network.model, prepared)
        return self._counted[shape]

    def draws(self, method: Method | None, tasks: Sequence[Task] = ()) -> bool:
        """Whether anything at work may draw from torch's global generators; not so where the model is a chain of linear
        layers, the data are tensors, and all other code is ours.
        """
        network, chain = self._network, self._network.chain
        still = network.scales_bytes or network.transform_is_elementwise  # a user's `input_transform` may draw
        plain = chain is not None and chain.untouched
        return not (plain and still and _is_ours(method) and all(map(_is_still, tasks)))


def _is_still(task: Task) -> bool:
    """Whether its data are tensors that no code of the user's turns."""
    parts = [part for part in (task.train, task.test, task.val) if part is not None]
    return task.augment is None and all(type(part) is TensorSamples and _is_ours(part.view) for part in parts)


def _is_ours(thing: object) -> bool:
    own = thing if hasattr(thing, "__qualname__") else type(thing)
    return thing is None or own.__module__.split(".")[0] == "steppe"


def checked_threads(threads: object) -> int | None:
    """A number of threads, or None."""
    if threads is not None and (type(threads) is not int or threads < 1):
        raise UsageError(f"threads: expected a whole number from 1 on, or None, got {short_repr(threads)}.")
    return threads
