"""The Gram matrix Σ x xᵀ of the inputs of a model's first layer, over every training sample of all tasks."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.errors import ModelError
from steppe.network.eval_batches import eval_batch_size
from steppe.network.network import Network
from steppe.projection.hooks import capture_inputs, disable_fused_attention, find_data_weights
from steppe.projection.layers import ProjectedWeight
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest, index_nest, nest_length, split_nest

_TOGETHER = 100
"""How many samples are collected before their products are added."""


class InputGram:
    """Sums the products of the first layer's input vectors, and keeps them between tasks as an upper triangle.

    The first layer is the one whose inputs are the data, whatever the weights, so samples need not be kept to know its
    inputs later. Its matrix lies in full only while a task is learned.

    Args:
        network: The network.
        covered: The covered weights.
        rank: How many directions of the matrix to keep between tasks; 0 keeps all, as an upper triangle.
    """

    def __init__(self, network: Network, covered: dict[str, ProjectedWeight], rank: int = 0) -> None:
        self._network, self._covered, self._rank = network, covered, rank
        self._name: str | None = None  # of the weight, found with the first samples
        self._kept: Tensor | None = None  # between tasks: the upper triangle, or V √E of the strongest directions
        self._whole: Tensor | None = None
        self._pending: tuple[Batch, ...] = ()  # stored samples whose products are not yet added

    def add(self, batch: Batch) -> None:
        """Add samples.

        Args:
            batch: The samples, as stored.
        """
        pending = (*self._pending, batch)
        if sum(map(len, pending)) < _TOGETHER:
            self._pending = pending
        else:
            self._flush(pending)

    def grams(self) -> dict[str, Tensor]:
        """The matrix of all samples so far by the name of the weight, (groups, in, in); empty without samples.

        Within a task its lower triangle may differ in the last bits from one that was saved and loaded.

        Returns:
            The matrix.
        """
        if self._pending:
            self._flush(self._pending)
        if self._name is None:
            return {}
        gram = self._matrix()
        assert gram is not None
        return {self._name: gram}

    def pack(self) -> None:
        """Keep only what is needed between tasks."""
        gram = next(iter(self.grams().values()), None)
        if gram is not None and self._whole is not None:
            kept = _strongest(gram, self._rank) if self._rank else _upper(gram)
            self._kept, self._whole = kept, None

    def _flush(self, pending: tuple[Batch, ...]) -> None:
        """Add the products of samples; what is replaced is replaced in one statement, so that an interrupt is safe."""
        x = Batch.union(pending).x
        name = self._find(x) if self._name is None else self._name
        weight, gram = self._covered[name], self._matrix()

        def add(_: ProjectedWeight, layer: torch.nn.Module, inputs: Tensor) -> None:
            nonlocal gram
            columns = weight.rule(layer, inputs)
            gram = columns.mT @ columns if gram is None else torch.baddbmm(gram, columns.mT, columns)

        network = self._network
        with (
            torch.no_grad(),
            network.mode(training=False),
            disable_fused_attention(network.model),
            capture_inputs({name: weight}, add),
        ):
            for part in split_nest(x, eval_batch_size(network.model, nest_length(x), _TOGETHER)):
                network.input_copies.call(network.prepare_inputs(part))
        self._name, self._whole, self._pending = name, gram, ()

    def _find(self, x: Nest) -> str:
        few = index_nest(x, slice(0, eval_batch_size(self._network.model, nest_length(x), 2)))
        names = find_data_weights(self._network, self._covered, few)
        if len(names) != 1:
            raise ModelError(
                f"expected one covered layer whose inputs are the data, got {len(names)}; set first_inputs to buffer."
            )
        return names[0]

    def _matrix(self) -> Tensor | None:
        """The matrix, of which only the upper triangle is exact to the bit after it was saved."""
        if self._whole is not None or self._kept is None:
            return self._whole
        return self._kept @ self._kept.mT if self._rank else _from_upper(self._kept)

    def state_dict(self) -> State:
        """The matrix as it is kept, and samples not yet added.

        Returns:
            The state.
        """
        whole = self._whole
        return {
            "weight": self._name,
            "kept": self._kept if whole is None else None,
            "whole": None if whole is None else _upper(whole),
            "pending": Batch.union(self._pending) if self._pending else None,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If it is of a weight that is not covered.
        """
        name, whole, pending = state["weight"], state["whole"], state["pending"]
        if name is not None and name not in self._covered:
            raise ValueError(f"the weight {name!r} of the Gram matrix is not covered")
        self._name, self._kept = name, state["kept"]
        self._whole = None if whole is None else _from_upper(whole)
        self._pending = () if pending is None else (pending,)

    def memory_bytes(self) -> int:
        """The memory of what is kept between tasks.

        Returns:
            Bytes.
        """
        return 0 if self._kept is None else self._kept.nbytes


def _upper(gram: Tensor) -> Tensor:
    """The upper triangle as one row per group."""
    rows, columns = torch.triu_indices(*gram.shape[1:], device=gram.device)
    return gram[:, rows, columns]


def _from_upper(packed: Tensor) -> Tensor:
    """The symmetric matrix of an upper triangle of n (n + 1) / 2 elements."""
    size = round((2 * packed.shape[1] + 0.25) ** 0.5 - 0.5)
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    gram = packed.new_empty(packed.shape[0], size, size)
    gram[:, rows, columns] = packed
    gram[:, columns, rows] = packed
    return gram


def _strongest(gram: Tensor, rank: int) -> Tensor:
    """V √E of the strongest directions, (groups, in, rank): its product with its transpose is close to the matrix."""
    energy, vectors = torch.linalg.eigh(gram, UPLO="U")  # ascending; the triangle that is saved
    strongest: Tensor = vectors[..., -rank:] * energy[..., -rank:].clamp(min=0).sqrt().unsqueeze(1)
    return strongest.contiguous()  # as it is when it is loaded, for products of other layouts have other bits
