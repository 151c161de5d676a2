"""The networks of the suite: small ones of each kind that people train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def convnet(channels: int, side: int, outputs: int, width: int = 12) -> nn.Module:
    """Two convolutions without normalization."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, 48),
        nn.ReLU(),
        nn.Linear(48, outputs),
    )


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def resnet(channels: int, outputs: int, width: int = 8) -> nn.Module:
    """Two residual blocks with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _Residual(width, width, 1),
        _Residual(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, outputs),
    )


class _Attention(nn.Module):
    """Attention and a hidden layer, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, tokens, width))
        output: Tensor = x + self.down(gelu(self.hidden(self.norm2(x))))
        return output


class Transformer(nn.Module):
    """Two blocks of attention over patches of an image, or over characters; then the mean of all tokens."""

    def __init__(self, tokens: int, outputs: int, *, patch: int = 0, width: int = 32) -> None:
        super().__init__()
        self.patch = patch
        self.embed: nn.Module = nn.Conv2d(3, width, patch, stride=patch) if patch else nn.Embedding(128, width)
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.Sequential(_Attention(width, 4), _Attention(width, 4))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = (x.flatten(2).transpose(1, 2) if self.patch else x) + self.position
        logits: Tensor = self.head(self.blocks(x).mean(1))
        return logits


def conv1d(outputs: int, width: int = 16) -> nn.Module:
    """Two convolutions over time."""
    return nn.Sequential(
        nn.Conv1d(1, width, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Conv1d(width, width, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(4 * width, outputs),
    )


class Recurrent(nn.Module):
    """A GRU, and a layer on its last state."""

    def __init__(self, inputs: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(x)[0][:, -1])
        return logits
