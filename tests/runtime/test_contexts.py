"""Second-order learning through attention: torch's kernels give the same as explicit operations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import steppe
from steppe.methods.base import MethodConfig
from steppe.runtime import contexts
from steppe.runtime.contexts import twice_differentiable

X = torch.randn(20, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


class Attention(nn.Module):
    """Self-attention over three vectors; `fused` uses torch's own function."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.lift, self.head = nn.Linear(4, 12, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.lift(x).unsqueeze(1).chunk(3, dim=-1)  # one head: with fewer dimensions no fused kernel is used
        if self.fused:
            return self.head(scaled_dot_product_attention(q, k, v).mean((1, 2)))
        return self.head((torch.softmax(q @ k.mT / math.sqrt(4), -1) @ v).mean((1, 2)))


@pytest.mark.parametrize(
    "method",
    [
        steppe.FSDGPM(second_order=True, basis_samples=10),
        steppe.FSDGPM(second_order=True, basis_samples=10, ascent_form="chunked"),
        steppe.LaMAML(second_order=True, inner_steps=2),
    ],
    ids=["fs-dgpm", "chunked", "la-maml"],
)
def test_second_order_goes_through_attention(method: MethodConfig) -> None:
    fused = Attention(fused=True)
    slow = copy.deepcopy(fused)
    slow.fused = False
    start = fused.lift.weight.detach().clone()
    for model in (fused, slow):
        learner = steppe.Learner(model, method)
        for shift in range(2):
            learner.learn(steppe.Task((X, (Y + shift) % 3)), batch_size=10)
    for found, expected in zip(fused.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(fused.lift.weight, start)


def test_kernel_settings_are_restored() -> None:
    def found() -> tuple[bool, ...]:
        backends = torch.backends.cuda
        return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()

    before = found()
    with twice_differentiable(nn.Linear(1, 1)):
        assert found() == (False, False, True)
    assert found() == before


def test_flush_denormals_is_restored_after_an_interrupted_exit() -> None:
    """As if the exception had struck before the context's exit could do anything."""
    inside = contexts.flush_denormals()
    inside.__enter__()
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64)
    assert not bool(smallest / 2)
    contexts.restore_denormals()
    assert bool(smallest / 2)
    contexts.restore_denormals()  # a second call changes nothing
    assert bool(smallest / 2)
