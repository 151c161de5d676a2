"""A case for each kind of layer with a rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

F64: dict[str, Any] = {"dtype": torch.float64}


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 3, **F64), (4, 5)),
    "linear on sequences": (nn.Linear(5, 3, **F64), (2, 4, 5)),
    "conv1d": (nn.Conv1d(3, 4, 3, **F64), (2, 3, 8)),
    "conv1d on one sample": (nn.Conv1d(3, 4, 3, padding=1, **F64), (3, 8)),
    "conv1d stride, padding, dilation": (nn.Conv1d(2, 3, 3, stride=2, padding=3, dilation=2, **F64), (2, 2, 9)),
    "conv1d same, even kernel": (nn.Conv1d(2, 3, 4, padding="same", **F64), (2, 2, 7)),
    "conv1d circular": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular", **F64), (2, 2, 6)),
    "conv1d depthwise": (nn.Conv1d(3, 6, 3, groups=3, **F64), (2, 3, 6)),
    "conv2d": (nn.Conv2d(3, 4, (2, 3), **F64), (2, 3, 4, 5)),
    "conv2d on one sample": (nn.Conv2d(4, 6, 3, groups=2, padding=1, **F64), (4, 5, 4)),
    "conv2d on one sample, reflect": (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect", **F64), (2, 4, 4)),
    "conv2d stride, padding": (nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), **F64), (2, 2, 5, 4)),
    "conv2d dilation": (nn.Conv2d(2, 3, 2, dilation=(2, 3), **F64), (2, 2, 5, 6)),
    "conv2d groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False, **F64), (2, 4, 4, 3)),
    "conv2d valid": (nn.Conv2d(2, 3, 3, padding="valid", **F64), (1, 2, 4, 5)),
    "conv2d same, dilation": (nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 2), **F64), (1, 2, 5, 4)),
    "conv2d reflect": (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect", **F64), (1, 2, 4, 4)),
    "conv2d replicate": (nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate", stride=2, **F64), (1, 2, 4, 5)),
    "conv2d circular same": (
        nn.Conv2d(2, 4, 2, padding="same", padding_mode="circular", groups=2, **F64),
        (1, 2, 3, 4),
    ),
    "conv3d": (nn.Conv3d(2, 3, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1), **F64), (1, 2, 3, 3, 2)),
    "conv3d on one sample": (nn.Conv3d(2, 3, 2, padding=1, **F64), (2, 3, 2, 3)),
    "conv3d groups, dilation": (nn.Conv3d(2, 2, 2, groups=2, dilation=(1, 2, 1), **F64), (2, 2, 2, 3, 3)),
}
