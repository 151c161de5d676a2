"""Profiles and surfaces against a parabola in closed form, and against networks copied and moved one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import OWN, bright
from reference_landscape import bowl, loss_at, moved, standing
from torch import nn

from steppe.errors import DivergedError
from steppe.landscape import profile as profiles
from steppe.landscape.directions import gaussian_noise, random_direction
from steppe.landscape.profile import LossProbe, cross_entropy, loss_profile, loss_surface, zero_one
from steppe.learning.scoring import Best
from steppe.network.network import Network

ALPHAS = [-1.0, -0.3, 0.0, 0.3, 1.0]


def tanh_chain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 9, bias=False), nn.Tanh(), nn.Linear(9, 4), nn.Sigmoid())


CHAINS = {"mlp": OWN["mlp"].build, "tanh": tanh_chain, "one layer": lambda: nn.Sequential(nn.Linear(8, 4))}


@given(seed=st.integers(0, 2**31), floor=st.floats(0.1, 5))
def test_a_parabola_in_closed_form(seed: int, floor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    model, matrix = bowl(generator)
    model.floor = floor
    network, batch = standing(model, torch.zeros(5, 1, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
    d, e = random_direction(network, seed, 0), random_direction(network, seed, 1)
    w, a, b = model.weight.detach().reshape(-1), d["weight"].reshape(-1), e["weight"].reshape(-1)
    start = floor + float(w @ matrix @ w) / 2
    found = loss_profile(LossProbe(network, batch), d, ALPHAS)
    expected = [start + t * float(w @ matrix @ a) + t * t * float(a @ matrix @ a) / 2 for t in ALPHAS]
    assert found == pytest.approx(expected, rel=1e-9)
    grid = loss_surface(LossProbe(network, batch), d, e, ALPHAS)
    for row, alpha in zip(grid, ALPHAS, strict=True):
        for value, beta in zip(row, ALPHAS, strict=True):
            at = w + alpha * a + beta * b
            assert value == pytest.approx(floor + float(at @ matrix @ at) / 2, rel=1e-9)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("head", [None, range(1, 4)])
def test_losses_equal_those_of_moved_copies(name: str, head: range | None) -> None:
    own = OWN[name]
    model = own.build()
    x, y = own.data(37, 0)
    y = y if head is None else y % 3 + 1
    network, batch = standing(model, x, y, head)
    surroundings = LossProbe(network, batch)
    first, second = (random_direction(network, 0, number) for number in (0, 1))
    expected = [loss_at(model, x, y, [first], [alpha], head) for alpha in ALPHAS]
    assert loss_profile(surroundings, first, ALPHAS) == pytest.approx(expected, rel=1e-5)
    grid = [[loss_at(model, x, y, [first, second], [a, b], head) for b in ALPHAS] for a in ALPHAS]
    torch.testing.assert_close(
        torch.tensor(loss_surface(surroundings, first, second, ALPHAS)), torch.tensor(grid), rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("fast_paths_on")
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("head", [None, range(1, 4)])
def test_fast_path_of_chains_equals_calling_the_model(
    name: str, head: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "CHUNK", 16)  # several parts, the last one smaller
    model = CHAINS[name]().double()
    x, y = bright(1, 4, 4)(41, 0) if name == "tanh" else bright(8)(41, 0)
    y = y if head is None else y % 3 + 1
    network, batch = standing(model, x.double(), y, head)
    quick, slow = LossProbe(network, batch), LossProbe(network, batch, quick=False)
    assert quick._grid is not None
    assert slow._grid is None
    directions = [random_direction(network, 0, 0), gaussian_noise(network.trainable, 0, 0)]  # noise moves biases too
    points = [(a, b) for a in ALPHAS for b in (0.0, 0.1)]
    both = cross_entropy, zero_one
    torch.testing.assert_close(quick.means(directions, points, both), slow.means(directions, points, both))
    for point, value in zip(points, quick.means(directions, points)[:, 0].tolist(), strict=True):
        assert value == pytest.approx(loss_at(model, x, y, directions, point, head), rel=1e-9)


@pytest.mark.parametrize("quick", [True, False])
def test_zero_one_loss_is_the_error_rate(quick: bool) -> None:
    x, y = OWN["mlp"].data(50, 0)
    network, batch = standing(OWN["mlp"].build(), x, y)
    v = gaussian_noise(network.trainable, 0, 0)
    found = LossProbe(network, batch, quick=quick).means([v], [(0.0,), (0.5,)], [zero_one])[:, 0].tolist()
    for sigma, error in zip((0.0, 0.5), found, strict=True):
        highest = moved(network.model, [v], [sigma])(x.double()).argmax(1)
        assert error == pytest.approx(float((highest != y).double().mean()))


@given(
    rows=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0, float("nan")]), min_size=6, max_size=6), min_size=1),
    label=st.integers(2, 4),
    head=st.sampled_from([None, range(2, 5)]),
)
def test_zero_one_loss_with_ties_and_nan(rows: list[list[float]], label: int, head: range | None) -> None:
    network = Network(nn.Linear(1, 6))
    network.heads.add(head, 6)
    outputs = torch.tensor(rows, dtype=torch.float64)
    logits = network.heads.mask(outputs, torch.zeros(len(rows), dtype=torch.int64)).T
    found = zero_one(logits, torch.full((len(rows),), label)).tolist()
    for row, output, error in zip(rows, outputs, found, strict=True):
        seen = row if head is None else row[head.start : head.stop]
        if any(value != value for value in seen):
            assert error == 1
            continue
        assert error == (int(Best(output.unsqueeze(0), head).places) != label)
        assert error == (seen.index(max(seen)) + (0 if head is None else head.start) != label)


@pytest.mark.parametrize("quick", [True, False])
def test_zero_one_loss_of_a_dead_network(quick: bool) -> None:
    """Dead units and no biases: every output is 0, and the first class is predicted."""
    model = nn.Sequential(nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Linear(5, 10, bias=False))
    nn.init.constant_(model[0].weight, -1.0)
    x = torch.rand(40, 8)
    y = torch.arange(40) % 10
    network, batch = standing(model, x, y)
    at_rest = {name: torch.zeros_like(p) for name, p in network.trainable.items()}
    found = LossProbe(network, batch, quick=quick).means([at_rest], [(1.0,)], [zero_one])
    assert float(found) == pytest.approx(0.9)


@pytest.mark.parametrize("name", ["mlp", "convolutional", "transformer"])
def test_weights_and_statistics_do_not_change(name: str) -> None:
    own = OWN[name]
    x, y = own.data(20, 0)
    network, batch = standing(own.build(), x, y)
    places = {key: tensor.data_ptr() for key, tensor in network.model.state_dict().items()}
    before = {key: tensor.clone() for key, tensor in network.model.state_dict().items()}
    surroundings = LossProbe(network, batch)
    d, e = (random_direction(network, 0, number) for number in (0, 1))
    loss_profile(surroundings, d, ALPHAS)
    loss_surface(surroundings, d, e, ALPHAS)
    surroundings.means([e], [(0.1,)], [zero_one])
    after = network.model.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert {key: tensor.data_ptr() for key, tensor in after.items()} == places
    assert all(p.grad is None for p in network.model.parameters())


class Counting(nn.Module):
    """Changes a buffer even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def test_buffers_changed_in_eval_mode_are_restored() -> None:
    network, batch = standing(Counting(), *bright(8)(8, 0))
    surroundings = LossProbe(network, batch)
    before = float(network.model.calls)
    loss_profile(surroundings, random_direction(network, 0, 0), ALPHAS)
    assert float(network.model.calls) == before


def test_frozen_weights_do_not_move() -> None:
    model = OWN["mlp"].build()
    model[0].weight.requires_grad_(False)
    x, y = bright(8)(10, 0)
    network, batch = standing(model, x, y)
    d = random_direction(network, 0, 0)
    assert "0.weight" not in d
    found = loss_profile(LossProbe(network, batch), d, [1.0])
    whole = {**d, "0.weight": torch.zeros_like(model[0].weight)}
    assert found == pytest.approx([loss_at(model, x, y, [whole], [1.0], None)], rel=1e-5)


@pytest.mark.parametrize("quick", [True, False])
def test_non_finite_losses_are_an_error(quick: bool) -> None:
    model = nn.Linear(8, 4, bias=False)
    x, y = bright(8)(10, 0)
    network, batch = standing(model, x, y)
    d = {"weight": torch.full((4, 8), 1e38)}
    with pytest.raises(DivergedError, match="--range"):
        loss_profile(LossProbe(network, batch, quick=quick), d, [0.0, 100.0])


def test_probe_uses_the_current_weights() -> None:
    """After new weights are loaded into the model, losses are measured around those."""
    model = OWN["mlp"].build()
    x, y = bright(8)(10, 0)
    network, batch = standing(model, x, y)
    first = float(LossProbe(network, batch).means())
    model.load_state_dict(OWN["mlp"].build().state_dict())
    second = float(LossProbe(network, batch).means())
    assert first != second
    assert second == pytest.approx(Network(model).loss(batch).item(), rel=1e-6)
