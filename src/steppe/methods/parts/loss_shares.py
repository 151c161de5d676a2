"""Weights of the current and the replayed samples in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.network.network import Network
from steppe.tensors.batch import Batch


class LossShares:
    """The share of each sample of D ∪ N in the loss: 2 · weight / |D ∪ N|.

    With as many replayed as current samples the loss is `current` · L_D + `replay` · L_N. With a half each it is the
    plain mean, however many there are.

    Args:
        current: The weight of the current samples.
        replay: The weight of the replayed samples.
        network: The network, for device and number type.

    Example:
        >>> import torch
        >>> from steppe.methods.parts.loss_shares import LossShares
        >>> from steppe.network.network import Network
        >>> from steppe.tensors.batch import Batch
        >>> shares = LossShares(0.5, 1.0, Network(torch.nn.Linear(1, 1)))
        >>> y = torch.arange(4)
        >>> shares.of(Batch(y, y, y), current=2).share
        tensor([0.2500, 0.2500, 0.5000, 0.5000])
    """

    def __init__(self, current: float, replay: float, network: Network) -> None:
        self._current, self._replay, self._network = current, replay, network
        self._rows: dict[tuple[int, int], Tensor] = {}  # by |D ∪ N| and |D|

    def of(self, union: Batch, current: int) -> Batch:
        """A batch with its shares.

        Args:
            union: D ∪ N, D first.
            current: The number of samples in D.

        Returns:
            The batch, unchanged if it is the mean.
        """
        if self._current == self._replay == 0.5:
            return union
        sizes = len(union), current
        if sizes not in self._rows:
            with torch.inference_mode(False):
                row = torch.full((sizes[0],), 2 * self._replay / sizes[0], dtype=torch.float64, device="cpu")
                row[:current] = 2 * self._current / sizes[0]
                self._rows[sizes] = row.to(self._network.device, self._network.dtype)
        return union.with_shares(self._rows[sizes])
