"""Random directions: every filter has the norm of the same filter of the weights, and nothing else moves."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import OWN
from torch import nn

from steppe.landscape.directions import filter_normalized_noise, gaussian_noise, random_direction
from steppe.models.alexnet import AlexNet
from steppe.models.four_conv import FourConv
from steppe.models.lenet import LeNet
from steppe.models.mlp import MLP
from steppe.network.network import Network
from steppe.runtime.rng import Streams


@pytest.mark.parametrize("name", OWN)
def test_every_filter_has_the_norm_of_the_weights_and_vectors_stay(name: str) -> None:
    network = Network(OWN[name].build())
    weights = network.trainable
    found = random_direction(network, seed=3, number=1)
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        assert found[key].shape == weight.shape
        if weight.ndim < 2:
            assert not found[key].any()
            continue
        for d, w in zip(found[key], weight.detach(), strict=True):  # filter by filter
            assert float(d.norm()) == pytest.approx(float(w.norm()), rel=1e-5)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 6), (4,)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "transposed, 1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 5)),
    "transposed, 2d": (nn.ConvTranspose2d(4, 6, 3), (4, 5, 5)),
    "transposed, in groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 5, 5)),
    "transposed, each its own": (nn.ConvTranspose2d(4, 4, 2, groups=4), (4, 5, 5)),
    "transposed, 3d": (nn.ConvTranspose3d(4, 6, 2, groups=2), (4, 3, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_filter_holds_the_weights_of_one_output(name: str) -> None:
    """The slow reference asks autograd which elements of the weight each output channel depends on."""
    layer, shape = copy.deepcopy(LAYERS[name])
    layer.double()
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    x = 1 + torch.rand(2, *shape, dtype=torch.float64)
    d = random_direction(Network(nn.Sequential(layer)), seed=0, number=0)["0.weight"]
    output = layer(x)
    for channel in range(output.shape[1]):
        (slope,) = torch.autograd.grad(output[:, channel].sum(), [weight], retain_graph=True)
        own = slope != 0
        assert float(d[own].norm()) == pytest.approx(float(weight.detach()[own].norm()), rel=1e-12)
    assert d.all()


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm([2, 4, 4]),
        lambda: nn.RMSNorm([2, 4, 4]),
        lambda: nn.GroupNorm(2, 2),
        lambda: nn.BatchNorm2d(2),
    ],
)
def test_scales_and_shifts_never_move(norm: Callable[[], nn.Module]) -> None:
    network = Network(nn.Sequential(nn.Conv2d(1, 2, 1), norm(), nn.Flatten(), nn.Linear(32, 3)))
    found = random_direction(network, seed=0, number=0)
    assert {name for name, d in found.items() if d.any()} == {"0.weight", "3.weight"}


@pytest.mark.parametrize("build", [MLP, LeNet, AlexNet, FourConv])
def test_directions_of_benchmark_networks_have_not_changed(build: Callable[[], nn.Module]) -> None:
    """Recorded landscapes used them: rows of every weight of two dimensions or more, from one sequence of draws."""
    network = Network(build())
    generator = torch.Generator().manual_seed(Streams(3).derive_seed("landscape direction 2"))
    found = random_direction(network, seed=3, number=2)
    for name, weight in network.trainable.items():
        if weight.ndim < 2:
            assert not found[name].any()
            continue
        drawn = torch.randn(weight.shape, generator=generator).flatten(1)
        scale = weight.detach().flatten(1).norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True)
        assert torch.equal(found[name], (drawn * scale).view_as(weight))


@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), seed=st.integers(0, 2**31), scale=st.floats(0, 1e3))
def test_noise_scales_with_the_weights(shape: list[int], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    one = filter_normalized_noise({"w": weight}, torch.Generator().manual_seed(seed))["w"]
    other = filter_normalized_noise({"w": scale * weight}, torch.Generator().manual_seed(seed))["w"]
    torch.testing.assert_close(other, scale * one)
    torch.testing.assert_close(one.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))


def test_zero_filter_does_not_move() -> None:
    weight = torch.ones(3, 4)
    weight[1] = 0
    found = filter_normalized_noise({"w": weight}, torch.Generator())["w"]
    assert not found[1].any()
    assert found[0].any()


def test_directions_depend_only_on_seed_and_number() -> None:
    network = Network(nn.Linear(5, 4))
    state = torch.get_rng_state()
    first = random_direction(network, 1, 0)["weight"]
    assert torch.equal(first, random_direction(network, 1, 0)["weight"])
    assert not torch.equal(first, random_direction(network, 1, 1)["weight"])
    assert not torch.equal(first, random_direction(network, 2, 0)["weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_directions_are_gaussian_before_they_are_scaled() -> None:
    """If all rows have norm √in, scaling hardly matters, and the result is close to N(0, 1)."""
    found = filter_normalized_noise({"w": torch.ones(100, 400)}, torch.Generator().manual_seed(5))["w"]
    assert abs(float(found.mean())) < 0.02
    assert float(found.std()) == pytest.approx(1, abs=0.02)
    assert float((found.abs() < 1).double().mean()) == pytest.approx(0.683, abs=0.01)


def test_noise_moves_every_parameter() -> None:
    weights = dict(OWN["convolutional"].build().named_parameters())
    found = gaussian_noise(weights, seed=0, number=0)
    assert all(found[name].shape == weight.shape and found[name].any() for name, weight in weights.items())
    drawn = torch.cat([d.flatten() for number in range(30) for d in gaussian_noise(weights, 0, number).values()])
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
