"""Weights of current and replayed samples in the loss: cross-entropy, and a loss of the user's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from steppe.methods.parts.loss_shares import LossShares
from steppe.network.network import Network
from steppe.tensors.batch import Batch


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("heads", [(None, None), (range(2), range(2, 5))])
@pytest.mark.parametrize("current", [5, 9])
def test_the_parts_losses_are_weighted(own: bool, heads: tuple[range | None, ...], current: int) -> None:
    """2 n_D / n · weight · L_D + 2 n_N / n · weight · L_N: with as many of each, weight · L_D + weight · L_N."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5)).double()
    network = Network(model, loss=cross_entropy) if own else Network(model)
    for head in heads:
        network.heads.add(head, outputs=5)
    y = torch.tensor([0, 1, 0, 1, 0, 2, 3, 4, 2])
    union = Batch(torch.randn(9, 6, dtype=torch.float64), y, torch.tensor([0] * 5 + [1] * 4))
    shared = LossShares(0.5, 1.0, network).of(union, current)
    expected = 2 * current / 9 * 0.5 * network.loss(union[:current])
    if current < 9:
        expected = expected + 2 * 4 / 9 * network.loss(union[current:])
    torch.testing.assert_close(network.loss(shared), expected)
    output = model(union.x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(network.output_loss.loss(output, shared), [output])
    loss, found = network.output_loss.loss_and_slope(output.detach(), shared)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, slope)


def test_a_half_each_is_the_plain_mean() -> None:
    network = Network(nn.Linear(6, 5))
    y = torch.arange(4)
    batch = Batch(torch.randn(4, 6), y, torch.zeros_like(y))
    assert LossShares(0.5, 0.5, network).of(batch, 1) is batch


def test_a_part_of_a_batch_has_its_own_mean() -> None:
    network = Network(nn.Linear(6, 5))
    y = torch.arange(4)
    batch = LossShares(0.5, 1.0, network).of(Batch(torch.randn(4, 6), y, torch.zeros_like(y)), 2)
    assert batch.shares is not None
    assert batch[:2].shares is None
