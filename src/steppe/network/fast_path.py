"""The fast path: where the model is a chain of linear layers, outputs and gradients are computed without autograd."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from steppe.fast.agreement import agree
from steppe.fast.chain_recognition import find_linear_chain
from steppe.fast.factored import Gradient, to_dense
from steppe.fast.linear_chain import LinearChain
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest

_MANY = 128  # samples from which the chain computes outputs faster than the model


class _LossAndGrad(Protocol):
    def __call__(self, batch: Batch, *, as_factors: bool = ...) -> tuple[Tensor, Gradient]: ...


class FastPath:
    """The chain in use, if any. Without one everything works the same, slower."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._chain: LinearChain | None = None

    @property
    def chain(self) -> LinearChain | None:
        """The chain, until something in the model has changed since `enable_if_exact`."""
        if self._chain is not None and not self._chain.intact:
            self._chain = None
        return self._chain

    def enable_if_exact(self, batch: Batch, loss_and_grad: _LossAndGrad) -> None:
        """Use the chain from now on if the model is one and it gives autograd's loss and gradient.

        Args:
            batch: A prepared batch to compare on.
            loss_and_grad: Uses the chain where one is enabled, and autograd elsewhere.
        """
        self._chain = None
        chain = find_linear_chain(self._model)
        x = batch.x
        if chain is None or not isinstance(x, Tensor) or (x.ndim > 2 and not chain.flattens):
            return
        expected = loss_and_grad(batch)
        self._chain = chain
        if not _agree(loss_and_grad(batch, as_factors=True), expected):
            self._chain = None

    def enable(self, enabled: bool) -> None:
        """Use the chain or not, as the saved learner did."""
        self._chain = find_linear_chain(self._model) if enabled else None

    @staticmethod
    def outputs(chain: LinearChain | None, x: Nest) -> Tensor | None:
        """Return the model's output on many prepared inputs, or None where its own forward is faster."""
        if chain is None or len(x) < _MANY or not chain.untouched:
            return None
        return chain.outputs(x.flatten(1))


def _agree(result: tuple[Tensor, Gradient], expected: tuple[Tensor, Gradient]) -> bool:
    """Whether a loss and its gradient are the same but for rounding."""
    (loss, gradient), (true_loss, true_gradient) = result, expected
    return agree(loss, true_loss) and all(agree(to_dense(gradient[n]), to_dense(g)) for n, g in true_gradient.items())
