"""Random directions: every filter as long as the same filter of the weights, everything else at rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import OWN
from torch import nn

from steppe.landscape.directions import direction, filter_normalised, noise


@pytest.mark.parametrize("name", OWN)
def test_every_filter_has_the_norm_of_the_weights_and_vectors_stay(name: str) -> None:
    weights = dict(OWN[name].build().named_parameters())
    found = direction(weights, seed=3, number=1)
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        assert found[key].shape == weight.shape
        if weight.ndim < 2:
            assert not found[key].any()
            continue
        for d, w in zip(found[key], weight.detach(), strict=True):  # filter by filter
            assert float(d.norm()) == pytest.approx(float(w.norm()), rel=1e-5)


@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), seed=st.integers(0, 2**31), scale=st.floats(0, 1e3))
def test_it_grows_with_the_weights_and_never_fails(shape: list[int], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    one = filter_normalised({"w": weight}, torch.Generator().manual_seed(seed))["w"]
    other = filter_normalised({"w": scale * weight}, torch.Generator().manual_seed(seed))["w"]
    torch.testing.assert_close(other, scale * one)
    torch.testing.assert_close(one.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))


def test_a_filter_of_zeros_stays() -> None:
    weight = torch.ones(3, 4)
    weight[1] = 0
    found = direction({"w": weight}, seed=0, number=0)["w"]
    assert not found[1].any()
    assert found[0].any()


def test_seed_and_number_decide_alone() -> None:
    weights = dict(nn.Linear(5, 4).named_parameters())
    state = torch.get_rng_state()
    first = direction(weights, 1, 0)["weight"]
    assert torch.equal(first, direction(weights, 1, 0)["weight"])
    assert not torch.equal(first, direction(weights, 1, 1)["weight"])
    assert not torch.equal(first, direction(weights, 2, 0)["weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_directions_are_gaussian_before_they_are_scaled() -> None:
    """All rows as long as √in: then scaling hardly matters, and what is left is N(0, 1)."""
    found = direction({"w": torch.ones(100, 400)}, seed=5, number=0)["w"]
    assert abs(float(found.mean())) < 0.02
    assert float(found.std()) == pytest.approx(1, abs=0.02)
    assert float((found.abs() < 1).double().mean()) == pytest.approx(0.683, abs=0.01)


def test_noise_moves_every_parameter() -> None:
    weights = dict(OWN["convolutional"].build().named_parameters())
    found = noise(weights, seed=0, number=0)
    assert all(found[name].shape == weight.shape and found[name].any() for name, weight in weights.items())
    drawn = torch.cat([d.flatten() for number in range(30) for d in noise(weights, 0, number).values()])
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
