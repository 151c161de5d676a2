"""The loss given the model's output: cross-entropy with its gradient in closed form, or a loss of the user's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from steppe.errors import SteppeError, UsageError, one_line, short_repr
from steppe.network.heads import Heads, within_head
from steppe.network.scratch import Scratch
from steppe.tensors.batch import Batch

Loss = Callable[[Tensor, Any], Tensor]
"""Maps the model's output and the target of the same samples to one number: the mean loss."""


class OutputLoss(ABC):
    """The mean loss over a batch, each sample on its own task's head, given the model's output."""

    is_cross_entropy = False
    """Whether targets are class numbers and outputs are logits."""

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss, differentiable in the output."""

    @abstractmethod
    def loss_and_slope(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient in the output, which the caller may overwrite."""

    def call(self, output: Tensor, target: Any) -> Tensor:
        """Return the loss on one head, given the columns of the head only."""
        return cross_entropy(output, target)

    @abstractmethod
    def slope(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the gradient alone."""


class CrossEntropy(OutputLoss):
    """Cross-entropy of logits, and its gradient in closed form: ∂L/∂z = (softmax(z) − one-hot(y)) / n."""

    is_cross_entropy = True

    def __init__(self, heads: Heads, scratch: Scratch) -> None:
        self._heads, self._scratch = heads, scratch
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}  # by n: 1/n, and a column of −1/n

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits = self._heads.mask(output, batch.task)
        if batch.shares is None:
            return cross_entropy(logits, batch.y)
        return torch.dot(cross_entropy(logits, batch.y, reduction="none"), batch.shares.rows)

    def loss_and_slope(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        log_softmax = torch.log_softmax(self._heads.mask(output, batch.task), 1)
        if batch.shares is None:
            return nll_loss(log_softmax, batch.y), self._minus_labels(log_softmax.exp_(), batch)
        loss = torch.dot(nll_loss(log_softmax, batch.y, reduction="none"), batch.shares.rows)
        return loss, self._minus_labels(log_softmax.exp_(), batch)

    def slope(self, output: Tensor, batch: Batch) -> Tensor:
        return self._minus_labels(torch.softmax(self._heads.mask(output, batch.task), 1), batch)

    def _minus_labels(self, softmax: Tensor, batch: Batch) -> Tensor:
        """(softmax − one-hot) / n, or times each sample's share, in place."""
        if batch.shares is not None:
            column = batch.shares.rows.unsqueeze(1)
            return softmax.mul_(column).scatter_add_(1, batch.y.unsqueeze(1), -column)
        count = softmax.shape[0]
        if count not in self._factors:
            with torch.inference_mode(False):
                column = torch.full((count, 1), -1 / count, dtype=softmax.dtype, device=softmax.device)
            self._factors[count] = self._scratch.scalar(1 / count), column
        factor, column = self._factors[count]
        return softmax.mul_(factor).scatter_add_(1, batch.y.unsqueeze(1), column)


class UserLoss(OutputLoss):
    """A loss of the user's, differentiated by autograd.

    It is called with whole batches: the current samples together with the replayed ones. Where tasks have heads, it is
    called once per head in the batch, with the head's columns only, and the results are averaged over the samples.

    Args:
        function: The loss.
        heads: The heads of the tasks.

    Raises:
        UsageError: The function is not a loss that can be called, or it has parameters to train.
    """

    def __init__(self, function: Loss, heads: Heads) -> None:
        self._function, self._heads = check_loss(function), heads

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        if batch.shares is not None:
            split, (first, rest) = batch.shares.split, batch.shares.parts
            weighted = [(first, slice(0, split)), (rest, slice(split, len(batch)))]
            terms = [
                weight * self.loss(output[part], batch[part]) for weight, part in weighted if part.start < part.stop
            ]
            return torch.stack(terms).sum()
        if not self._heads.any_restricted:
            return self.call(output, batch.y)
        if output.ndim != 2:  # the model's output changed its shape since it was checked
            raise UsageError(f"heads need one row of outputs per sample, (n, outputs), got {tuple(output.shape)}.")
        tasks = torch.unique(batch.task).tolist()  # waits for the device: which rows belong together depends on data
        ranges = self._heads.ranges
        groups = {ranges[task]: [other for other in tasks if ranges[other] == ranges[task]] for task in tasks}
        if len(groups) == 1:
            return self.call(*within_head(output, batch.y, next(iter(groups))))
        total = output.new_zeros(())
        for head, members in groups.items():
            rows = torch.isin(batch.task, torch.tensor(members, device=batch.task.device)).nonzero().squeeze(1)
            part = self.call(*within_head(output[rows], batch.y[rows], head))
            total = total + part * (len(rows) / len(batch))
        return total

    def loss_and_slope(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = output.detach().clone().requires_grad_()  # a clone, because it may come from inference mode
            loss = self.loss(leaf, batch)
            (slope,) = torch.autograd.grad(loss, [leaf])
        return loss.detach(), slope.contiguous()  # the gradient of a plain sum is expanded: its elements share memory

    def slope(self, output: Tensor, batch: Batch) -> Tensor:
        return self.loss_and_slope(output, batch)[1]

    def call(self, output: Tensor, target: Any) -> Tensor:
        try:
            loss = self._function(output, target)
        except (SteppeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            given = f"an output of shape {tuple(output.shape)} and a target {_described(target)}"
            raise UsageError(f"`loss` failed on {given}: {type(error).__name__}: {one_line(error)}") from error
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.ndim != 0:
            what = (
                f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
                if isinstance(loss, Tensor)
                else short_repr(loss)
            )
            raise UsageError(
                f"`loss` must return the mean loss as a tensor with a single number and no dimensions, got {what}."
            )
        if output.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                "`loss` has no gradient in the model's output; compute it from the output with torch operations, "
                "without detach(), item(), NumPy or rounding."
            )
        return loss


def check_loss(loss: object) -> Any:
    """Return a loss of the user's; raise UsageError if it cannot be one."""
    if isinstance(loss, type):
        raise UsageError(f"loss is the class {loss.__name__}; pass an instance, loss={loss.__name__}(...).")
    if not callable(loss):
        raise UsageError(f"loss must be a function of output and target, got {short_repr(loss)}.")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise UsageError(
            "loss has trainable parameters, which would not be trained; make them part of the model, or freeze them "
            "with loss.requires_grad_(False)."
        )
    return loss


def _described(target: object) -> str:
    if isinstance(target, Tensor):
        return f"of shape {tuple(target.shape)} and type {target.dtype}"
    return f"of type {type(target).__name__}"
