"""The LeNet of GPM's code for CIFAR-100 Superclass: the paper's with local response normalization after ReLU instead of
BatchNorm before it (3,036,500 parameters with 100 outputs).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from steppe.models.layers.response_norm import ResponseNorm
from steppe.models.lenet import LeNet


class GPMLeNet(LeNet):
    """LeNet with local response normalization, with He's uniform initialization.

    Args:
        outputs: Logits.
        size: Pixels a side.
    """

    def __init__(self, outputs: int = 100, size: int = 32) -> None:
        super().__init__(outputs, size)
        self.norm1, self.norm2 = (ResponseNorm(channels, 4, 0.001 / 9, 0.75, 1.0) for channels in (20, 50))
        for weight in self.parameters():
            nn.init.kaiming_uniform_(weight, nonlinearity="relu")

    def _features(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.norm1(relu(self.conv1(x))), 3, stride=2, padding=1)
        return max_pool2d(self.norm2(relu(self.conv2(x))), 3, stride=2, padding=1)
