"""Importance rules against their formulas, direction by direction."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steppe.projection.importance import Ones, Ridge, Sigmoid, Spectral

VALUES = torch.tensor([[8.0, 2.0, 0.5], [3.0, 1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [0.01, 5.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("temperature", [10.0, 1.5])
def test_sigmoid_rule(sign: int, scale: float, temperature: float) -> None:
    """λ ← σ(temperature · (λ ∓ lr · g)), with g clipped to norm 2 over all layers together, not layer by layer."""
    rule = Sigmoid(0.3, temperature, sign=sign)
    gradient = scale * torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    importance = torch.rand_like(gradient)
    norm = math.sqrt(sum(value**2 for value in gradient.tolist()))
    assert (norm > 2) == (scale == 5.0)
    factor = min(1.0, 2.0 / norm)
    pairs = zip(importance.tolist(), gradient.tolist(), strict=True)
    expected = [1 / (1 + math.exp(-temperature * (x - sign * 0.3 * factor * g))) for x, g in pairs]
    rule.update(importance, gradient)
    torch.testing.assert_close(importance, torch.tensor(expected).to(importance), rtol=1e-6, atol=0)


def test_papers_rule_is_inert_at_the_papers_step_size() -> None:
    """σ(10·λ) has one fixed point, 0.99995: gradients of the paper's size have no visible effect."""
    rule, values = Sigmoid(0.01), torch.ones(5, dtype=torch.float64)
    for _ in range(50):
        rule.update(values, torch.full_like(values, 0.05))
    torch.testing.assert_close(values, torch.full((5,), 0.99995, dtype=torch.float64), rtol=0, atol=1e-5)


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=3), st.floats(0.01, 1000))
def test_spectral_rule(values: list[list[float]], alpha: float) -> None:
    """(α + 1) σ / (α σ + σ_max) per group: 1 for the strongest direction, never above 1, and 0 for padding."""
    found = Spectral(alpha).initial(torch.tensor(values, dtype=torch.float64))
    for row, group in zip(found.tolist(), values, strict=True):
        top = max(group)
        for importance, sigma in zip(row, group, strict=True):
            expected = (alpha + 1) * sigma / (alpha * sigma + top) if sigma > 0 else 0.0
            assert importance == pytest.approx(expected, rel=1e-9, abs=1e-300)
            assert importance <= 1 + 1e-12
            assert importance > 0.999999 or sigma < top or top == 0


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=3), st.floats(1e-5, 1000))
def test_ridge_rule(values: list[list[float]], a: float) -> None:
    """r (1 + a) / (r + a) per group, with r = σ² / σ_max²: 1 at the top, never above, 0 without energy."""
    found = Ridge(a).initial(torch.tensor(values, dtype=torch.float64))
    for row, group in zip(found.tolist(), values, strict=True):
        top = max(group)
        for importance, sigma in zip(row, group, strict=True):
            r = (sigma / top) ** 2 if top > 0 else 0.0
            assert importance == pytest.approx(r * (1 + a) / (r + a), rel=1e-9, abs=1e-300)
            assert 0 <= importance <= 1 + 1e-12
            assert importance > 0.999999 or sigma < top or top == 0


def test_limits_of_the_ridge_rule() -> None:
    """Small a: hard projection onto every direction with energy. Large a: λ is the share of the largest energy."""
    values = torch.tensor([[8.0, 2.0, 0.5, 0.0]], dtype=torch.float64)
    hard, soft = Ridge(1e-12).initial(values), Ridge(1e12).initial(values)
    torch.testing.assert_close(hard, torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(soft, (values / 8).square(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [Ones(), Spectral(3.0), Ridge(0.1)])
def test_fixed_rules_do_not_move(rule: Ones | Spectral | Ridge) -> None:
    assert not rule.dynamic
    importance = rule.initial(VALUES).view(-1)
    before = importance.clone()
    rule.update(importance, torch.ones_like(importance))
    assert torch.equal(importance, before)


@pytest.mark.parametrize("rule", [Ones(), Sigmoid(0.01)])
def test_hard_rules_start_from_one(rule: Ones | Sigmoid) -> None:
    assert torch.equal(rule.initial(VALUES), torch.ones_like(VALUES))
