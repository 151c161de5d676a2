"""Weights of the current and the replayed samples in the loss."""

from __future__ import annotations

import torch

from steppe.network.network import Network
from steppe.tensors.batch import Batch, Shares


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
        >>> shares.of(Batch(y, y, y), current=2).shares.rows
        tensor([0.2500, 0.2500, 0.5000, 0.5000])
    """

    def __init__(self, current: float, replay: float, network: Network) -> None:
        self._current, self._replay, self._network = current, replay, network
        self._shares: dict[tuple[int, int], Shares] = {}  # by |D ∪ N| and |D|

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
        count = len(union)
        if (count, current) not in self._shares:
            each = 2 * self._current / count, 2 * self._replay / count
            with torch.inference_mode(False):
                rows = torch.full((count,), each[1], dtype=torch.float64, device="cpu")
                rows[:current] = each[0]
                rows = rows.to(self._network.device, self._network.dtype)
            self._shares[count, current] = Shares(rows, current, (each[0] * current, each[1] * (count - current)))
        return union.with_shares(self._shares[count, current])
