"""The paper's network for TinyImageNet: four strided convolutions, two hidden layers, no biases, no normalization
(2,871,520 parameters with 200 outputs).
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import relu

_CHANNELS, _HIDDEN = 160, 640


class FourConv(nn.Module):
    """Four convolutions for square RGB images; weights from N(0, 2 / fan-in).

    Args:
        outputs: Logits.
        size: Pixels a side.
    """

    def __init__(self, outputs: int = 200, size: int = 64) -> None:
        super().__init__()
        side = size
        for _ in range(4):
            side = -(-side // 2)  # each stride halves, rounded up
        self.conv1 = nn.Conv2d(3, _CHANNELS, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(_CHANNELS, _CHANNELS, 3, stride=2, padding=1, bias=False)
        self.conv3 = nn.Conv2d(_CHANNELS, _CHANNELS, 3, stride=2, padding=1, bias=False)
        self.conv4 = nn.Conv2d(_CHANNELS, _CHANNELS, 3, stride=2, padding=1, bias=False)
        self.hidden1 = nn.Linear(_CHANNELS * side * side, _HIDDEN, bias=False)
        self.hidden2 = nn.Linear(_HIDDEN, _HIDDEN, bias=False)
        self.head = nn.Linear(_HIDDEN, outputs, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=math.sqrt(2 / weight[0].numel()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images, (n, 3, size, size)."""
        x = relu(self.conv1(x))
        x = relu(self.conv2(x))
        x = relu(self.conv3(x))
        x = relu(self.conv4(x))
        x = relu(self.hidden1(x.flatten(1)))
        x = relu(self.hidden2(x))
        output: Tensor = self.head(x)
        return output
