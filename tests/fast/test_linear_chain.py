"""The fast path of linear chains against autograd and against the plain ascent, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import soften
from torch import Tensor, nn
from torch.nn import functional

from steppe import Learner, Task
from steppe.fast.factored import to_dense
from steppe.fast.linear_chain import weight_gradient
from steppe.fast.matmul import times_transposed
from steppe.fast.perturbed_chain import PerturbedChain
from steppe.methods.base import MethodConfig
from steppe.methods.parts.sharpness import PerturbedGradient, SharpnessAscent
from steppe.models.mlp import MLP
from steppe.network.network import Network
from steppe.projection.importance import Ones, Ridge, Sigmoid
from steppe.projection.layers import projected_weights
from steppe.projection.matrix_projector import MatrixProjector
from steppe.projection.memory import GradientMemory
from steppe.registry import METHODS
from steppe.tensors.batch import Batch, Shares


class Tower(nn.Module):
    """Biases, three kinds of activations, one after the last layer; layers declared in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(7, 5), nn.Linear(12, 7, bias=False), nn.Linear(9, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = functional.relu(self.a(x))
        hidden: Tensor = torch.sigmoid(self.b(x))
        return self.c(hidden).tanh()


def sequence() -> nn.Module:
    inner = nn.Sequential(nn.Linear(12, 7), nn.Tanh())
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 12, bias=False), nn.ReLU(inplace=True), inner, nn.Linear(7, 5))


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(9, 12, 5),
    "tower": Tower,
    "sequence": sequence,
    "one": lambda: nn.Sequential(nn.Linear(9, 5)),
}


def setting(name: str, heads: bool, seed: int = 0) -> tuple[Network, Network, Batch]:
    """The same network twice, with and without the fast path; a batch D ∪ N of 5 + 4."""
    torch.manual_seed(seed)
    model = CHAINS[name]().double()
    x, y = torch.randn(9, 9, dtype=torch.float64), torch.arange(9) % 2 + torch.tensor([0] * 5 + [2] * 4)
    batch = Batch(x, y, torch.tensor([0] * 5 + [1] * 4))
    networks = Network(model), Network(copy.deepcopy(model))
    for network in networks:
        network.heads.add(range(2) if heads else None, 5)
        network.heads.add(range(2, 5) if heads else None, 5)
    networks[0].use_chain_if_exact(batch)
    assert networks[0].chain is not None
    return *networks, batch


@pytest.mark.parametrize("name", CHAINS)
def test_outputs_are_the_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.network.fast_path._MANY", 9)
    quick, slow, batch = setting(name, heads=False)
    with torch.no_grad():
        expected = slow.model(batch.x)
        with monkeypatch.context() as patch:
            patch.setattr(quick.model, "forward", None)
            patch.setattr("steppe.fast.linear_chain.overrides_call", lambda module: False)
            torch.testing.assert_close(quick.outputs(batch.x), expected, rtol=1e-12, atol=1e-12)
        quick.model.forward = lambda x: x + 1
        torch.testing.assert_close(quick.outputs(batch.x), batch.x + 1)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("wide", [0, 2**15])
def test_gradients_are_autograds(name: str, heads: bool, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.fast.linear_chain.FACTORS", wide)
    quick, slow, batch = setting(name, heads)
    at = {key: p.detach() + torch.randn_like(p) for key, p in slow.trainable.items()}
    for place in (None, at):
        (loss, found), (expected_loss, expected) = quick.loss_and_grad(batch, place), slow.loss_and_grad(batch, place)
        torch.testing.assert_close(loss, expected_loss)
        assert found.keys() == expected.keys()
        for key, g in expected.items():
            torch.testing.assert_close(to_dense(found[key]), to_dense(g))
            assert not to_dense(found[key]).requires_grad


def soft_memory(network: Network, seed: int) -> GradientMemory:
    """A memory with soft importances."""
    generator = torch.Generator().manual_seed(seed)
    memory = GradientMemory(Sigmoid(0.01), projected_weights(network.model))
    memory.rebuild(network, torch.randn(6, 9, dtype=torch.float64, generator=generator), 0.9)
    soften(memory, generator)
    return memory


def assert_gradients_close(found: PerturbedGradient, expected: PerturbedGradient) -> None:
    torch.testing.assert_close(found.loss, expected.loss)
    for key, g in expected.gradient.items():
        torch.testing.assert_close(to_dense(found.gradient[key]), to_dense(g))
    assert (found.importance_gradient is None) == (expected.importance_gradient is None)
    if found.importance_gradient is not None:
        torch.testing.assert_close(found.importance_gradient, expected.importance_gradient)
    if expected.coordinates:
        assert found.coordinates is not None
        for key, c in expected.coordinates.items():
            torch.testing.assert_close(to_dense(found.coordinates[key]), to_dense(c))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("wide", "factors"),
    [(0, 0), (60, 60), (2**15, 2**15), (2**15, 0)],
    ids=["all wide", "mixed", "all small", "small with factors"],
)
@pytest.mark.parametrize("clamp", [1e3, 0.02, 1e-4], ids=["free", "now and then", "clamped"])
@pytest.mark.parametrize("first_task", [False, True])
def test_ascent_equals_the_plain_ascent(
    name: str, chunked: bool, wide: int, factors: int, clamp: float, first_task: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v and everything that follows from it, for weights that are copied and weights whose factors are added to
    outputs; with and without clamped steps, with and without bases."""
    monkeypatch.setattr("steppe.fast.linear_chain.FACTORS", factors)
    monkeypatch.setattr("steppe.fast.perturbed_chain.WIDE", wide)
    quick, slow, batch = setting(name, heads=True)
    memories = [GradientMemory(Sigmoid(0.01)) if first_task else soft_memory(network, 3) for network in (quick, slow)]
    before = quick.snapshot()
    ascent = SharpnessAscent(0.3, steps=3, clamp=clamp, chunked=chunked)
    found, expected = (ascent(n, m, batch[:5], batch) for n, m in zip((quick, slow), memories, strict=True))
    assert_gradients_close(found, expected)
    left = memories[0].project_out(found.gradient, found.coordinates)
    for key, g in memories[1].project_out(expected.gradient).items():
        torch.testing.assert_close(to_dense(left[key]), to_dense(g))
    assert all(torch.equal(before[key], tensor) for key, tensor in quick.snapshot().items())
    again = ascent(quick, memories[0], batch[:5], batch)
    assert_gradients_close(again, expected)  # nothing is left from the last update


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("wide", [0, 60, 2**15], ids=["all wide", "mixed", "all small"])
@pytest.mark.parametrize("clamp", [1e3, 0.02], ids=["free", "now and then"])
@pytest.mark.parametrize("samples", [3, 40], ids=["bases", "matrices"])
def test_the_ascent_with_ridge_importances(
    name: str, chunked: bool, wide: int, clamp: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With projectors that hold P itself, and shares of the samples in the loss."""
    monkeypatch.setattr("steppe.fast.linear_chain.FACTORS", wide)
    monkeypatch.setattr("steppe.fast.perturbed_chain.WIDE", wide)
    quick, slow, batch = setting(name, heads=True)
    memories = [GradientMemory(Ridge(0.05), projected_weights(network.model)) for network in (quick, slow)]
    x = torch.randn(samples, 9, dtype=torch.float64) + 0.3
    for memory, network in zip(memories, (quick, slow), strict=True):
        memory.rebuild(network, x, None)
    held = memories[0].projectors[quick.chain.links[0].weight]  # type: ignore[union-attr]
    assert isinstance(held, MatrixProjector) is (samples == 40)
    shares = Shares(torch.tensor([0.1] * 5 + [0.3] * 4, dtype=torch.float64), 5, (0.5, 1.2))
    ascent = SharpnessAscent(0.3, steps=3, clamp=clamp, chunked=chunked)
    found, expected = (
        ascent(n, m, batch[:5], batch.with_shares(shares)) for n, m in zip((quick, slow), memories, strict=True)
    )
    assert_gradients_close(found, expected)
    left = memories[0].project_out(found.gradient, found.coordinates)
    for key, g in memories[1].project_out(expected.gradient).items():
        torch.testing.assert_close(to_dense(left[key]), to_dense(g))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999, 1.001, 3.0])
@pytest.mark.parametrize("first_task", [False, True])
@pytest.mark.parametrize("lr", [0.3, -0.3])
def test_step_is_clamped_if_one_element_is_too_large(
    share: float, first_task: bool, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs along a single axis, all of one class, an element reaches the estimated bound of a wide weight's
    step, so a bound that is too high would be noticed."""
    monkeypatch.setattr("steppe.fast.perturbed_chain.WIDE", 0)
    quick, slow, batch = setting("one", heads=False)
    x = torch.zeros(4, 9, dtype=torch.float64)  # fewer samples than outputs, or the weight would count as small
    x[:, 4] = 1.5
    batch = Batch(x, torch.zeros_like(batch.y[:4]), batch.task[:4])
    memories = [GradientMemory(Sigmoid(0.01), projected_weights(network.model)) for network in (quick, slow)]
    if not first_task:
        for memory, network in zip(memories, (quick, slow), strict=True):
            memory.rebuild(network, x, 0.9)
    step = to_dense(slow.loss_and_grad(batch[:2])[1]["0.weight"])
    ascent = SharpnessAscent(lr, steps=2, clamp=share * float(step.abs().max()))
    assert_gradients_close(*(ascent(n, m, batch[:2], batch) for n, m in zip((quick, slow), memories, strict=True)))


@pytest.mark.parametrize("chunked", [False, True])
def test_the_first_layers_coordinates_are_not_computed_twice(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """X M is available already, even if λ does not move."""
    monkeypatch.setattr("steppe.fast.perturbed_chain.WIDE", 0)
    quick, _, batch = setting("mlp", heads=True)
    memory = soft_memory(quick, 3)
    memory.rule = Ones()
    found = SharpnessAscent(0.3, chunked=chunked)(quick, memory, batch[:5], batch)
    first = next(iter(memory.projectors))
    assert found.coordinates is not None
    assert found.coordinates.keys() == {first}
    expected = memory.coordinates(found.gradient)[first]
    torch.testing.assert_close(to_dense(found.coordinates[first]), to_dense(expected))


def test_cached_buffers_are_not_reused_when_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates share buffers; weights, λ, bases and the number of samples may change between them."""
    monkeypatch.setattr("steppe.fast.perturbed_chain.WIDE", 60)
    quick, slow, batch = setting("mlp", heads=True)
    memories = [soft_memory(network, 3) for network in (quick, slow)]
    ascent = SharpnessAscent(0.3)

    def same(count: int) -> None:
        part = batch[:count]
        assert_gradients_close(*(ascent(n, m, part[:3], part) for n, m in zip((quick, slow), memories, strict=True)))

    same(len(batch))
    for network in (quick, slow):
        with torch.no_grad():
            for p in network.trainable.values():
                p.mul_(1.5)
    same(len(batch))
    for memory in memories:
        memory.update_importances(torch.full_like(memory.importance, 0.4))
    same(len(batch))
    same(5)
    for place, network in enumerate((quick, slow)):
        memories[place] = soft_memory(network, 8)
    same(5)
    for memory in memories:
        soften(memory, torch.Generator().manual_seed(9))
    same(5)


def test_fast_ascent_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparisons would compare the slow one with itself."""
    made: list[int] = []
    start = PerturbedChain.__init__

    def noted(self: PerturbedChain, *arguments: object) -> None:
        made.append(1)
        start(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PerturbedChain, "__init__", noted)
    quick, slow, batch = setting("mlp", heads=False)
    for network, count in ((slow, 0), (quick, 1)):
        SharpnessAscent(0.3)(network, soft_memory(network, 0), batch[:5], batch)
        assert len(made) == count
    apart = Batch(batch.x[:5].clone(), batch.y[:5], batch.task[:5])  # not the first samples of the union
    found = SharpnessAscent(0.3)(quick, soft_memory(quick, 0), apart, batch)
    assert len(made) == 1
    assert_gradients_close(found, SharpnessAscent(0.3)(quick, soft_memory(quick, 0), batch[:5], batch))
    made.pop()
    for parameter in quick.model.first.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    SharpnessAscent(0.3)(Network(quick.model), GradientMemory(Sigmoid(0.01)), batch[:5], batch)
    assert len(made) == 1


def test_frozen_weight_is_not_moved() -> None:
    torch.manual_seed(0)
    model = MLP(9, 12, 5).double()
    model.second.weight.requires_grad_(False)
    quick, slow = Network(model), Network(copy.deepcopy(model))
    batch = Batch(torch.randn(4, 9, dtype=torch.float64), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    for network in (quick, slow):
        network.heads.add(None, 5)
    quick.use_chain_if_exact(batch)
    assert quick.chain is not None
    found, expected = quick.loss_and_grad(batch)[1], slow.loss_and_grad(batch)[1]
    assert list(found) == list(expected) == ["first.weight", "head.weight"]
    assert_gradients_close(
        *(SharpnessAscent(0.3)(n, GradientMemory(Sigmoid(0.01)), batch, batch) for n in (quick, slow))
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("multitask", "oracle")])
def test_every_method_learns_the_same_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks in float64, weights compared at the end."""
    entry = METHODS[name]
    made = entry.settings.from_mapping({**entry.values("cifar100-split"), **entry.variant})
    assert isinstance(made, MethodConfig)
    weights = []
    for quick in (True, False):
        if not quick:
            monkeypatch.setattr(Network, "use_chain_if_exact", lambda self, batch: None)
        torch.manual_seed(5)
        model = MLP(9, 12, 6).double()
        learner = Learner(model, made, seed=1)
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            rows = range(3 * number, 3 * number + 3)
            x = torch.randn(24, 9, dtype=torch.float64, generator=generator)
            learner.learn(Task((x, torch.arange(24) % 3 + rows.start), head=rows), epochs=2, batch_size=6)
            assert (learner.network.chain is not None) is quick
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-8)


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 6), st.integers(1, 5))
def test_product_in_parts_equals_the_product(n: int, inputs: int, outputs: int) -> None:
    x, w = (
        torch.randn(n, 700 * inputs, dtype=torch.float64),
        torch.randn(60 * outputs, 700 * inputs, dtype=torch.float64),
    )
    torch.testing.assert_close(times_transposed(x, w), x @ w.T)
    torch.testing.assert_close(to_dense(weight_gradient(x[:, : 60 * outputs], x)), x[:, : 60 * outputs].T @ x)
