"""All weights and buffers of a model: snapshots in memory, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from steppe.checkpoint.tree import State, as_names
from steppe.network.module_state import (
    buffers_of,
    empty_buffers,
    load_tensors,
    non_persistent_buffers,
    restore_tensors,
    tensors_of,
)


class ModelTensors:
    """Saves and restores a model's weights and buffers.

    Lazy buffers, which the model creates or fills by itself, are saved too, but a model may lack them when it is
    loaded; see `module_state`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        for module, name, buffer in buffers_of(model):
            if 0 in buffer.stride():  # expanded: its elements share memory and could not be restored
                setattr(module, name, buffer.clone())
        self._lazy = empty_buffers(model)

    @property
    def lazy(self) -> frozenset[str]:
        """Names of the lazy buffers; the model may register more at any time."""
        self._lazy |= non_persistent_buffers(self._model)
        return self._lazy

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of all weights and buffers."""
        return {name: tensor.detach().clone() for name, tensor in tensors_of(self._model).items()}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Set all weights and buffers to those of a snapshot."""
        restore_tensors(self._model, snapshot, self.lazy)

    def state_dict(self) -> State:
        """Return weights and buffers, and which of these are lazy."""
        return {"weights": tensors_of(self._model), "self_made": sorted(self.lazy)}

    def load_state_dict(self, state: State) -> None:
        """Load weights and buffers; other names or shapes are an error."""
        lazy = frozenset(as_names(state.get("self_made")) or ())  # older states have no such entry
        load_tensors(self._model, state["weights"], lazy)
        self._lazy |= lazy
