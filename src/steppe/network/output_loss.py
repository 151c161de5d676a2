"""Cross-entropy and its gradient in the logits, in closed form: ∂L/∂z = (softmax(z) − one-hot(y)) / n."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from steppe.network.heads import Heads
from steppe.network.scratch import Scratch
from steppe.tensors.batch import Batch


class OutputLoss:
    """Mean cross-entropy over a batch, each sample on its own task's head, given the model's output."""

    def __init__(self, heads: Heads, scratch: Scratch) -> None:
        self._heads, self._scratch = heads, scratch
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}  # by n: 1/n, and a column of −1/n

    def loss_and_slope(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient in the output."""
        log_softmax = torch.log_softmax(self._heads.mask(output, batch.task), 1)
        return nll_loss(log_softmax, batch.y), self._minus_labels(log_softmax.exp_(), batch)

    def slope(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the gradient alone."""
        return self._minus_labels(torch.softmax(self._heads.mask(output, batch.task), 1), batch)

    def _minus_labels(self, softmax: Tensor, batch: Batch) -> Tensor:
        """(softmax − one-hot) / n, in place."""
        count = softmax.shape[0]
        if count not in self._factors:
            with torch.inference_mode(False):
                column = torch.full((count, 1), -1 / count, dtype=softmax.dtype, device=softmax.device)
            self._factors[count] = self._scratch.scalar(1 / count), column
        factor, column = self._factors[count]
        return softmax.mul_(factor).scatter_add_(1, batch.y.unsqueeze(1), column)
