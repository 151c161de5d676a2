"""Which of the model's parameters learn: the trainable ones, except those that are temporarily frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from steppe.errors import ModelError, short_repr
from steppe.fast.factored import ParamDict

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers whose parameters are scales and shifts."""


class Weights:
    """The trainable parameters of a model, and what is frozen while a task is learned.

    Attributes:
        trainable: Every parameter with `requires_grad`, by name, as the model was when the learner was created.
        device: Their device.
        dtype: Their dtype, float32 or float64.
        frozen: Names of trainable parameters that are temporarily frozen (scales and shifts of norm layers).
        frozen_statistics: Norm layers that use their running statistics in training too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.trainable = _find_trainable(model)
        first = next(iter(self.trainable.values()))
        self.device, self.dtype = first.device, first.dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise ModelError(f"expected float32 or float64 weights, got {self.dtype}; convert them with model.float().")
        self._is_partial = len(self.trainable) != sum(1 for _ in model.parameters())
        self.frozen: frozenset[str] = frozenset()
        self.frozen_statistics: list[nn.Module] = []

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters of the model are frozen, temporarily or permanently."""
        return bool(self.frozen) or self._is_partial

    @property
    def learnable(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that are not frozen."""
        if not self.frozen:
            return self.trainable
        return {name: p for name, p in self.trainable.items() if name not in self.frozen}

    def freeze_norms(self, frozen: bool = True) -> None:
        """Freeze the scales and shifts of normalization layers, or unfreeze them.

        While they are frozen their gradients are 0. Running statistics still move.
        """
        layers = self._model.modules() if frozen else ()
        norm_ids = {id(p) for module in layers if isinstance(module, NORMS) for p in module.parameters()}
        self.set_frozen(name for name, p in self.trainable.items() if id(p) in norm_ids)

    def set_frozen(self, names: Iterable[str]) -> None:
        """Freeze exactly the parameters with these names."""
        self.frozen = frozenset(names)

    def freeze_statistics(self, frozen: bool = True) -> None:
        """Let batch normalization use its running statistics unchanged in training too, or let them move again."""
        layers = self._model.modules() if frozen else ()
        self.frozen_statistics = [m for m in layers if isinstance(m, nn.modules.batchnorm._NormBase)]

    def with_zero_frozen(self, gradient: ParamDict) -> ParamDict:
        """Complete a gradient in the learnable parameters with zeros for the frozen ones."""
        return {name: gradient[name] if name in gradient else torch.zeros_like(p) for name, p in self.trainable.items()}

    def like_weights(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return saved tensors that belong to some of the weights.

        Raises:
            ValueError: A name is unknown, or a shape differs.
        """
        for name, tensor in saved.items():
            if name not in self.trainable or tensor.shape != self.trainable[name].shape:
                raise ValueError(f"there is no weight {short_repr(name)} of shape {tuple(tensor.shape)}")
        return dict(saved)


def _find_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    lazy = nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer
    if any(isinstance(tensor, lazy) for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError("the model has uninitialized lazy layers; run one forward pass through it first.")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ModelError("the model has no trainable parameter; set requires_grad on the parameters to train.")
    for name, parameter in trainable.items():
        _check_learnable(name, parameter)
    return trainable


def _check_learnable(name: str, weight: nn.Parameter) -> None:
    if weight.is_complex():
        raise ModelError(
            f"the weight {name!r} is {weight.dtype}, but methods need real numbers; store its real and imaginary "
            "parts as a real weight (torch.view_as_real), or freeze it (requires_grad_(False))."
        )
    if weight.is_inference():
        raise ModelError(
            f"the weight {name!r} was created under torch.inference_mode and cannot be trained; create the model "
            "outside of it."
        )
