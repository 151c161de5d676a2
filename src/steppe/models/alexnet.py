"""The paper's AlexNet for CIFAR-100 Split: three convolutions, two wide hidden layers, dropout, one BatchNorm, no
biases (6,704,384 parameters with 100 outputs).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from steppe.errors import ModelError
from steppe.models.layers.dropout import dropout, dropout_pool_relu


class AlexNet(nn.Module):
    """AlexNet for square RGB images, with torch's default initialization.

    Args:
        outputs: Logits.
        size: Pixels a side, at least 19.

    Example:
        >>> import torch
        >>> AlexNet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """

    dropout_rates = (0.2, 0.2, 0.5, 0.5, 0.5)
    """Dropout probability after each hidden layer."""

    def __init__(self, outputs: int = 100, size: int = 32) -> None:
        super().__init__()
        side = (((size - 3) // 2 - 2) // 2 - 1) // 2  # 32 → 29 → 14 → 12 → 6 → 5 → 2
        if side < 1:
            raise ModelError(f"size = {size} is too small for the AlexNet; it needs at least 19 pixels a side.")
        self.conv1 = nn.Conv2d(3, 64, 4, bias=False)
        self.norm1: nn.Module = nn.Identity()
        self.conv2 = nn.Conv2d(64, 128, 3, bias=False)
        self.norm2: nn.Module = nn.BatchNorm2d(128)
        self.conv3 = nn.Conv2d(128, 256, 2, bias=False)
        self.norm3: nn.Module = nn.Identity()
        self.hidden1 = nn.Linear(256 * side * side, 2048, bias=False)
        self.norm4: nn.Module = nn.Identity()
        self.hidden2 = nn.Linear(2048, 2048, bias=False)
        self.norm5: nn.Module = nn.Identity()
        self.head = nn.Linear(2048, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images, (n, 3, size, size)."""
        x = dropout_pool_relu(self.norm1(self.conv1(x)), self.dropout_rates[0], self.training)
        x = dropout_pool_relu(self.norm2(self.conv2(x)), self.dropout_rates[1], self.training)
        x = dropout_pool_relu(self.norm3(self.conv3(x)), self.dropout_rates[2], self.training)
        x = dropout(relu(self.norm4(self.hidden1(x.flatten(1)))), self.dropout_rates[3], self.training)
        x = dropout(relu(self.norm5(self.hidden2(x))), self.dropout_rates[4], self.training)
        output: Tensor = self.head(x)
        return output
