"""The AlexNet of GPM's code for CIFAR-100 Split: the paper's with BatchNorm after every hidden layer, by each batch's
own statistics, in tests too (6,713,216 parameters with 100 outputs).
"""

from __future__ import annotations

from torch import nn

from steppe.models.alexnet import AlexNet


class GPMAlexNet(AlexNet):
    """AlexNet with BatchNorm throughout, with torch's default initialization.

    Predictions depend on the rest of the batch, which should have all classes of one task.

    Args:
        outputs: Logits.
        size: Pixels a side, at least 19.
    """

    def __init__(self, outputs: int = 100, size: int = 32) -> None:
        super().__init__(outputs, size)
        self.norm1, self.norm2, self.norm3 = (
            nn.BatchNorm2d(channels, track_running_stats=False) for channels in (64, 128, 256)
        )
        self.norm4, self.norm5 = (nn.BatchNorm1d(2048, track_running_stats=False) for _ in range(2))
