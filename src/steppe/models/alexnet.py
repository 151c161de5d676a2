"""The paper's AlexNet for CIFAR-100 Split: three convolutions, two wide hidden layers, dropout, one BatchNorm, no
biases (6,704,384 parameters with 100 outputs).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from steppe.errors import ModelError
from steppe.models.dropout import dropout


class AlexNet(nn.Module):
    """For square RGB images of `size` pixels a side; torch's default initialisation."""

    def __init__(self, outputs: int = 100, size: int = 32) -> None:
        super().__init__()
        side = (((size - 3) // 2 - 2) // 2 - 1) // 2  # 32 → 29 → 14 → 12 → 6 → 5 → 2
        if side < 1:
            raise ModelError(f"size = {size}: images are too small for the AlexNet, which needs 19 pixels a side.")
        self.conv1 = nn.Conv2d(3, 64, 4, bias=False)
        self.conv2 = nn.Conv2d(64, 128, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(128)
        self.conv3 = nn.Conv2d(128, 256, 2, bias=False)
        self.hidden1 = nn.Linear(256 * side * side, 2048, bias=False)
        self.hidden2 = nn.Linear(2048, 2048, bias=False)
        self.head = nn.Linear(2048, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images, (n, 3, size, size)."""
        # ReLU before dropout or after pooling gives the same, bit for bit; there it has a quarter of the numbers.
        x = relu(max_pool2d(self._dropped(self.conv1(x), 0.2), 2))
        x = relu(max_pool2d(self._dropped(self.norm2(self.conv2(x)), 0.2), 2))
        x = relu(max_pool2d(self._dropped(self.conv3(x), 0.5), 2))
        x = self._dropped(relu(self.hidden1(x.flatten(1))), 0.5)
        x = self._dropped(relu(self.hidden2(x)), 0.5)
        output: Tensor = self.head(x)
        return output

    def _dropped(self, x: Tensor, share: float) -> Tensor:
        return dropout(x, share, self.training)
