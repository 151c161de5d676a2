"""The paper's LeNet for CIFAR-100 Superclass: two convolutions with BatchNorm, two hidden layers, no biases
(3,036,640 parameters with 100 outputs).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from steppe.models.layers.batch_norm import FoldedBatchNorm2d


class LeNet(nn.Module):
    """LeNet for square RGB images, with torch's default initialization.

    Args:
        outputs: Logits.
        size: Pixels a side.
    """

    def __init__(self, outputs: int = 100, size: int = 32) -> None:
        super().__init__()
        side = (size + 3) // 4  # each pooling halves, rounded up
        self.conv1 = nn.Conv2d(3, 20, 5, padding=2, bias=False)
        self.norm1: nn.Module = FoldedBatchNorm2d(20)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2, bias=False)
        self.norm2: nn.Module = FoldedBatchNorm2d(50)
        self.hidden1 = nn.Linear(50 * side * side, 800, bias=False)
        self.hidden2 = nn.Linear(800, 500, bias=False)
        self.head = nn.Linear(500, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images, (n, 3, size, size)."""
        x = relu(self.hidden1(self._features(x).flatten(1)))
        x = relu(self.hidden2(x))
        output: Tensor = self.head(x)
        return output

    def _features(self, x: Tensor) -> Tensor:
        # ReLU and pooling commute bit for bit; after pooling there is a quarter of the values.
        x = relu(max_pool2d(self.norm1(self.conv1(x)), 3, stride=2, padding=1))
        return relu(max_pool2d(self.norm2(self.conv2(x)), 3, stride=2, padding=1))
