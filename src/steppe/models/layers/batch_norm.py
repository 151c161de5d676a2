"""Fast BatchNorm for images with few channels on several CPU threads.

With channels last, torch's own processes images pixel by pixel, and the threads' sums over 20 channels share cache
lines: two threads take longer than one (`bench/folded_norm.py`). Here several pixels are treated as one with more
channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from steppe.fast.switch import fast_paths_enabled

_CHANNELS = 256  # the largest number to fold pixels to; more do not help


class FoldedBatchNorm2d(nn.BatchNorm2d):
    """torch's `BatchNorm2d` with its parameters and buffers, equal up to rounding.

    On one thread, or with `STEPPE_FAST=0`, it is torch's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize images, (n, channels, height, width)."""
        whole = self.training and self.affine and self.track_running_stats
        fold = _fold(x, self.weight) if whole else 1
        if fold == 1:
            return super().forward(x)
        output, mean, variance = _BatchNorm.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, fold
        )
        self._move_statistics(mean, variance, x.numel() // x.shape[1])
        normalized: Tensor = output
        return normalized

    @torch.no_grad()
    def _move_statistics(self, mean: Tensor, variance: Tensor, pixels: int) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * (pixels / (pixels - 1)), share)


class _BatchNorm(torch.autograd.Function):
    """The normalized images, and the mean and variance of each channel, which are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, fold: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _rows(x, fold)
        means, variances = (part.view(fold, -1) for part in torch.batch_norm_update_stats(rows, None, None, 0.0))
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.eps, ctx.fold = eps, fold
        ctx.mark_non_differentiable(mean, variance)
        center, spread, scale, shift = (part.repeat(fold) for part in (mean, variance, weight, bias))
        return _images(batch_norm(rows, center, spread, scale, shift, eps=eps), x), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias, mean, variance = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]  # frozen weights need no gradient, nor do images after frozen layers only
        grad, eps, fold = gradients[0], ctx.eps, ctx.fold
        if torch.is_grad_enabled():  # differentiated twice: left to torch
            output = batch_norm(x, None, None, weight, bias, training=True, eps=eps)
            wanted = [part for part, needs in zip((x, weight, bias), needed, strict=True) if needs]
            grads = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
            by_x, by_weight, by_bias = (next(grads) if needs else None for needs in needed)
            return by_x, by_weight, by_bias, None, None
        rows, grad_rows = _rows(x, fold), _rows(grad.contiguous(memory_format=torch.channels_last), fold)
        wide = [part.repeat(fold) for part in (weight, mean, variance)]
        sums = torch.ops.aten.native_batch_norm_backward(
            grad_rows, rows, *wide, None, None, False, eps, [False, True, True]
        )
        by_weight, by_bias = (part.view(fold, -1).sum(0) for part in sums[1:])
        if not needed[0]:
            return None, by_weight, by_bias, None, None
        # With s = weight/σ and n pixels: ∂x = s ∂y − s/n (Σ∂y + (x − mean)/σ Σ∂y(x − mean)/σ).
        scale, share = weight * (variance + eps).rsqrt(), x.shape[1] / x.numel()
        slope = scale * by_weight * (variance + eps).rsqrt() * -share
        level = -share * scale * by_bias - slope * mean
        back = torch.addcmul(level.repeat(fold), rows, slope.repeat(fold)).addcmul_(grad_rows, scale.repeat(fold))
        return _images(back, x), by_weight, by_bias, None, None


def _fold(x: Tensor, weight: Tensor) -> int:
    """How many pixels to treat as one; 1 if that does not help, or if they are not contiguous."""
    if torch.get_num_threads() == 1 or not fast_paths_enabled():
        return 1
    suitable = x.ndim == 4 and x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)
    if not suitable or x.device.type != "cpu" or x.dtype != weight.dtype:
        return 1
    fold, channels = 1, x.shape[1]
    while 2 * fold * channels <= _CHANNELS and x.numel() % (2 * fold * channels) == 0:
        fold *= 2
    return fold


def _rows(x: Tensor, fold: int) -> Tensor:
    """`fold` pixels per row."""
    return x.movedim(1, -1).reshape(-1, fold * x.shape[1])


def _images(rows: Tensor, like: Tensor) -> Tensor:
    count, channels, height, width = like.shape
    return rows.view(count, height, width, channels).movedim(-1, 1)
