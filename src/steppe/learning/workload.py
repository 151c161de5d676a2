"""What a learner needs from the process: a number of threads, and perhaps torch's global generators."""

from __future__ import annotations

from collections.abc import Sequence

from steppe.data.samples import TensorSamples
from steppe.data.task import Task
from steppe.errors import UsageError, short_repr
from steppe.learning.input_kind import Kind, kind_of
from steppe.methods.base import Method
from steppe.network.network import Network
from steppe.runtime.rng import preserve_global_rng
from steppe.runtime.threads import choose_num_threads, count_multiplications
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, clone_nest, nest_length

_TINY = 2**20
"""Multiplications that take no longer than changing the number of threads and back, about 0.1 ms."""


class Workload:
    """Estimates what a learner's work needs.

    Attributes:
        chosen: The number of threads that the user chose, if any.
    """

    def __init__(self, network: Network, chosen: int | None) -> None:
        self._network, self.chosen = network, chosen
        self._multiplications: dict[Kind, int] = {}  # per sample, by its kind

    def forget(self) -> None:
        """Count anew, because the model has changed."""
        self._multiplications.clear()

    def threads(self, stored: Nest, batch_size: int) -> int:
        """Return how many threads suit batches of this size of samples like the stored ones."""
        return self.chosen or choose_num_threads(self.count(stored), batch_size)

    def is_tiny(self, stored: Nest, count: int) -> bool:
        """Whether the forward of so many samples takes less time than changing the number of threads."""
        return self.chosen is None and self.count(stored) * count <= _TINY

    def count(self, stored: Nest) -> int:
        """Return how many multiplications a sample like the stored ones takes; counted once per shape."""
        kind, model = kind_of(stored), self._network.model
        if kind not in self._multiplications:
            with preserve_global_rng(self._network.device), self._network.mode(training=False):
                prepared = clone_nest(self._network.prepare_inputs(stored))  # the model may work in place
                self._multiplications[kind] = count_multiplications(
                    model, lambda: call_model(model, prepared), nest_length(stored)
                )
        return self._multiplications[kind]

    def draws(self, method: Method | None, tasks: Sequence[Task] = ()) -> bool:
        """Whether anything involved may draw from torch's global generators.

        Args:
            method: The method, if there is one yet.
            tasks: The tasks whose data are read.

        Returns:
            False if the model is a chain of linear layers, the data are tensors, and all other code is steppe's.
        """
        network, chain = self._network, self._network.chain
        if not network.output_loss.is_cross_entropy:  # a user's loss may draw
            return True
        plain_inputs = network.inputs.scales_bytes or network.inputs.is_elementwise  # a user's transform may draw
        plain_model = chain is not None and chain.untouched
        return not (plain_model and plain_inputs and _is_ours(method) and all(map(_is_plain, tasks)))


def _is_plain(task: Task) -> bool:
    """Whether a task's data are tensors that no code of the user transforms."""
    parts = [part for part in (task.train, task.test, task.val) if part is not None]
    return task.augment is None and all(type(part) is TensorSamples and _is_ours(part.view) for part in parts)


def _is_ours(thing: object) -> bool:
    own = thing if hasattr(thing, "__qualname__") else type(thing)
    return thing is None or own.__module__.split(".")[0] == "steppe"


def validate_threads(threads: object) -> int | None:
    """Return the number of threads, or None.

    Raises:
        UsageError: It is not a positive integer.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise UsageError(f"threads: expected a positive integer or None, got {short_repr(threads)}.")
    return threads
