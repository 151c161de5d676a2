"""A small vision transformer of plain linear layers, for measurements: 8 × 8 patches of 32 × 32 images, two blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Attention and a hidden layer, each behind a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From (n, tokens, width) to the same."""
        n, tokens, width = x.shape
        parts = self.mixed(self.norm1(x)).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.joined(seen)
        output: Tensor = x + self.narrow(gelu(self.wide(self.norm2(x))))
        return output


class VisionTransformer(nn.Module):
    """Patches, a learnt place for each, two blocks, the mean of all tokens, the head."""

    def __init__(self, outputs: int = 100, width: int = 128, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images, (n, 3, 32, 32)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        output: Tensor = self.head(self.blocks(tokens).mean(1))
        return output
