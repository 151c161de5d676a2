"""Attention learnt in second order: by torch's kernels, the same as written out."""

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
    """Self-attention over three vectors; `quick` leaves it to torch."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        self.quick = quick
        self.lift, self.head = nn.Linear(4, 12, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.lift(x).unsqueeze(1).chunk(3, dim=-1)  # one head: with fewer dimensions no quick kernel is taken
        if self.quick:
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
    quick = Attention(quick=True)
    slow = copy.deepcopy(quick)
    slow.quick = False
    start = quick.lift.weight.detach().clone()
    for model in (quick, slow):
        learner = steppe.Learner(model, method)
        for shift in range(2):
            learner.learn(steppe.Task((X, (Y + shift) % 3)), batch_size=10)
    for found, expected in zip(quick.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(quick.lift.weight, start)


def test_kernels_are_given_back() -> None:
    def found() -> tuple[bool, ...]:
        backends = torch.backends.cuda
        return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()

    before = found()
    with twice_differentiable(nn.Linear(1, 1)):
        assert found() == (False, False, True)
    assert found() == before


def test_flushing_that_an_exception_left_behind_is_restored() -> None:
    """As if the exception had struck before the context's end could do anything."""
    inside = contexts.flush_denormals()
    inside.__enter__()
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64)
    assert not bool(smallest / 2)
    contexts.restore_denormals()
    assert bool(smallest / 2)
    contexts.restore_denormals()  # once more changes nothing
    assert bool(smallest / 2)
