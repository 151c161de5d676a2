"""A model's output layer that gets more outputs while the model is in use."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from steppe.errors import ModelError, UsageError
from steppe.runtime.rng import Streams


class GrowingHead:
    """The linear layer that computes a model's logits, one row of its weight per class.

    The parameters stay the same objects; only their data is replaced. The initial values of a row depend on the seed
    and on the row's number alone, so that growing in several steps gives the same bits as growing at once.

    Args:
        model: The model.
        head: The name of the layer, or of its weight.
        streams: The learner's random streams, whose seed decides the values of new rows.

    Raises:
        ModelError: The layer cannot grow.

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> head = GrowingHead(nn.Sequential(layer), "0", Streams(0))
        >>> head.resize(5)
        >>> layer(torch.ones(1, 4)).shape
        torch.Size([1, 5])
    """

    def __init__(self, model: nn.Module, head: str, streams: Streams) -> None:
        self.layer, self.name = _find_layer(model, head)
        self._streams = streams

    @property
    def rows(self) -> int:
        """How many outputs the layer has."""
        return self.layer.out_features

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The layer's parameters, by their names in the model."""
        prefix = f"{self.name}." if self.name else ""
        return {f"{prefix}{own}": p for own, p in self.layer.named_parameters()}

    @torch.no_grad()
    def resize(self, rows: int) -> None:
        """Give the layer so many outputs. Rows that remain keep their bits; it can be repeated after an exception."""
        for name, parameter in self.parameters.items():
            data = self.extend(name, parameter.detach()[:rows], rows)
            parameter.grad = None
            parameter.data = data
        self.layer.out_features = rows

    def extend(self, name: str, values: Tensor, rows: int) -> Tensor:
        """Return a copy of earlier values of a parameter, with the initial values of the rows that they lack.

        Args:
            name: The parameter's name in the model.
            values: Its values when the layer had fewer outputs.
            rows: The number of outputs.

        Returns:
            The values, with so many rows.
        """
        own = name.rpartition(".")[2]
        added = [self._new_row(row)[own] for row in range(len(values), rows)]
        with torch.inference_mode(False):
            return torch.cat([values, torch.stack(added).to(values)]) if added else values.clone()

    def _new_row(self, row: int) -> dict[str, Tensor]:
        """The initial values of an output, distributed like those of a new `nn.Linear`."""
        generator = torch.Generator().manual_seed(self._streams.derive_seed(f"output {row}"))
        width, bound = self.layer.in_features, 1 / math.sqrt(max(self.layer.in_features, 1))
        values = torch.rand(width + 1, generator=generator, dtype=torch.float64, device="cpu").mul(2).sub(1).mul(bound)
        return {"weight": values[:width], "bias": values[width]}

    def fit(self, name: str, tensor: Tensor, fill: float = 0.0) -> Tensor:
        """Return a tensor of a parameter's earlier shape with the parameter's shape of now.

        Args:
            name: The parameter's name in the model.
            tensor: Anything with one entry per element of the parameter, such as its momentum.
            fill: The value of new rows.

        Returns:
            The tensor with the layer's number of rows; itself if it is not the layer's, or has them already.
        """
        if name not in self.parameters or len(tensor) == self.rows:
            return tensor
        with torch.inference_mode(False):
            added = torch.full((self.rows - len(tensor), *tensor.shape[1:]), fill, dtype=tensor.dtype)
            return torch.cat([tensor, added.to(tensor.device)])


def _find_layer(model: nn.Module, head: str) -> tuple[nn.Linear, str]:
    """The linear layer of this name, and its name in the model."""
    layers = dict(model.named_modules())
    name = head if head in layers else head.rpartition(".")[0]
    layer = layers.get(name)
    if not isinstance(layer, nn.Linear):
        inside = [each for each, module in layers.items() if each.startswith(f"{name}.") and type(module) is nn.Linear]
        remedy = f"name the layer itself, such as head={inside[-1]!r}" if inside else "name the torch.nn.Linear"
        raise ModelError(f"head = {head!r} is a {type(layer).__name__}, and grow=True needs a linear layer; {remedy}.")
    own = dict(layer.named_parameters())
    if not own.keys() <= {"weight", "bias"} or own.get("weight") is not layer.weight or list(layer.buffers()):
        raise ModelError(
            f"the layer {name!r} computes its weight from other parameters, so it cannot grow; use a plain "
            "torch.nn.Linear (remove weight_norm and other parametrizations from it)."
        )
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    if any(uses.count(id(p)) > 1 for p in own.values()):
        raise ModelError(f"the layer {name!r} shares a weight with another layer, so it cannot grow; untie them.")
    if not all(p.requires_grad for p in own.values()):
        raise ModelError(f"the layer {name!r} is frozen, so new classes could not be learned; unfreeze it.")
    return layer, name


def validate_grow(grow: object, head: str | None) -> bool:
    """Return whether the head grows.

    Raises:
        UsageError: It is not a bool, or the head has no name.
    """
    if not isinstance(grow, bool):
        raise UsageError(f"grow must be True or False, got {grow!r}.")
    if grow and head is None:
        raise UsageError("grow=True needs head='...', the name of the layer that returns the logits.")
    return grow
