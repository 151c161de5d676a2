"""The AlexNet of GPM's own code for CIFAR-100 Split: as the paper's, but with BatchNorm after every hidden layer, which
normalises each batch by itself, in tests too (6,713,216 parameters with 100 outputs).
"""

from __future__ import annotations

from torch import nn

from steppe.models.alexnet import AlexNet


class GPMAlexNet(AlexNet):
    """For square RGB images of `size` pixels a side; torch's default initialisation.

    What it says of an image depends on the others in its batch: these should be of the same task, and of all classes.
    """

    def __init__(self, outputs: int = 100, size: int = 32) -> None:
        super().__init__(outputs, size)
        self.norm1, self.norm2, self.norm3 = (
            nn.BatchNorm2d(channels, track_running_stats=False) for channels in (64, 128, 256)
        )
        self.norm4, self.norm5 = (nn.BatchNorm1d(2048, track_running_stats=False) for _ in range(2))
