"""Cross-entropy and its gradient in the logits, in closed form: ∂L/∂z = (softmax(z) − one-hot(y)) / n.

Where samples have different shares in the loss, a sample's share takes the place of 1 / n.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from steppe.network.heads import Heads
from steppe.network.scratch import Scratch
from steppe.tensors.batch import Batch


def batch_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The cross-entropy of a batch from its masked logits: the mean, or the sum weighted by the samples' shares."""
    if batch.share is None:
        return cross_entropy(logits, batch.y)
    return torch.dot(cross_entropy(logits, batch.y, reduction="none"), batch.share)


class OutputLoss:
    """Mean cross-entropy over a batch, each sample on its own task's head, given the model's output."""

    def __init__(self, heads: Heads, scratch: Scratch) -> None:
        self._heads, self._scratch = heads, scratch
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}  # by n: 1/n, and a column of −1/n

    def loss_and_slope(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient in the output."""
        log_softmax = torch.log_softmax(self._heads.mask(output, batch.task), 1)
        if batch.share is None:
            return nll_loss(log_softmax, batch.y), self._minus_labels(log_softmax.exp_(), batch)
        loss = torch.dot(nll_loss(log_softmax, batch.y, reduction="none"), batch.share)
        return loss, self._minus_labels(log_softmax.exp_(), batch)

    def slope(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the gradient alone."""
        return self._minus_labels(torch.softmax(self._heads.mask(output, batch.task), 1), batch)

    def _minus_labels(self, softmax: Tensor, batch: Batch) -> Tensor:
        """(softmax − one-hot) / n, or times each sample's share, in place."""
        if batch.share is not None:
            column = batch.share.unsqueeze(1)
            return softmax.mul_(column).scatter_add_(1, batch.y.unsqueeze(1), -column)
        count = softmax.shape[0]
        if count not in self._factors:
            with torch.inference_mode(False):
                column = torch.full((count, 1), -1 / count, dtype=softmax.dtype, device=softmax.device)
            self._factors[count] = self._scratch.scalar(1 / count), column
        factor, column = self._factors[count]
        return softmax.mul_(factor).scatter_add_(1, batch.y.unsqueeze(1), column)
