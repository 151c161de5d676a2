"""Factored gradients of linear layers against autograd's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import no_hooks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, linear, relu

from steppe.fast.factored import FactoredGrad, to_dense
from steppe.fast.linear_hooks import find_factorable, record_linear_calls
from steppe.methods.parts.sgd import clip_factor
from steppe.network.network import Network
from steppe.projection.coverage import find_covered_weights
from steppe.projection.importance import Ones
from steppe.projection.layers import projected_weights
from steppe.projection.memory import GradientMemory
from steppe.tensors.batch import Batch


class Net(nn.Module):
    """Linear layers combined by a given function, so that each case shows how it uses them."""

    def __init__(self, use: Callable[[Net, Tensor], Tensor], inputs: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 12)
        self.second = nn.Linear(12, 12, bias=False)
        self.third = nn.Linear(12, 12)
        self.third.weight = self.second.weight
        self.unused = nn.Linear(4, 9)
        self.head = nn.Linear(12, 3)
        self.rectify = nn.ReLU(inplace=True)
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def _half_unused(net: Net, x: Tensor) -> Tensor:
    """The second layer runs, but the loss does not depend on it."""
    hidden = relu(net.first(x))
    net.second(hidden)
    return net.head(hidden)


CASES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "plain": lambda net, x: net.head(relu(net.second(relu(net.first(x))))),
    "relu in place": lambda net, x: net.head(net.rectify(net.second(net.rectify(net.first(x))))),
    "in place on the head": lambda net, x: net.head(relu(net.first(x))).mul_(2.0),
    "reused": lambda net, x: net.head(relu(net.second(relu(net.second(relu(net.first(x))))))),
    "tied": lambda net, x: net.head(relu(net.third(relu(net.second(relu(net.first(x))))))),
    "residual": lambda net, x: net.head((h := relu(net.first(x))) + net.second(h) + net.third(h)),
    "an output the loss does not see": _half_unused,
    "keyword argument": lambda net, x: net.head(relu(net.first(input=x))),
    "sequences": lambda net, x: net.head(relu(net.first(x.reshape(len(x), 2, 3))).mean(1)),
    "no vectors": lambda net, x: torch.cat([net.head(h := relu(net.first(x))), net.head(net.second(h[:0]))]),
    "detached": lambda net, x: net.head(relu(net.second(relu(net.first(x)).detach()))),
}


@pytest.mark.parametrize("n", [1, 4, 7, 40])
@pytest.mark.parametrize("case", CASES)
def test_factored_gradients_equal_dense_ones(case: str, n: int) -> None:
    """Factored for few samples, multiplied out for many; layers that are reused, tied or unused included."""
    model = Net(CASES[case], inputs=3 if case == "sequences" else 6)
    network = Network(model)
    network.heads.add(None, 3)
    batch = Batch(torch.randn(n, 6, dtype=torch.float64), torch.arange(n) % 3, torch.zeros(n, dtype=torch.int64))
    linear = {name: weight.layers for name, weight in projected_weights(model).items()}
    assert set(linear) == {"first.weight", "second.weight", "unused.weight", "head.weight"}
    loss, dense = network.loss_and_grad(batch)
    same, found = network.loss_and_grad(batch, factored=linear)
    assert torch.equal(loss, same)
    assert list(found) == list(dense) == [name for name, _ in model.named_parameters()]
    for name, g in found.items():
        torch.testing.assert_close(to_dense(g), dense[name], rtol=1e-11, atol=1e-13)
    rows = n * (2 if case == "sequences" else 1)
    assert isinstance(found["first.weight"], FactoredGrad) == (rows < 12)
    assert isinstance(found["head.weight"], FactoredGrad) == (n < 3)
    assert no_hooks(model)


def test_calls_are_counted_together() -> None:
    """A weight used twice sees twice the vectors: factors pay off only while there are fewer than its rows."""
    model = Net(CASES["reused"])
    network = Network(model)
    network.heads.add(None, 3)
    batch = Batch(torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % 3, torch.zeros(7, dtype=torch.int64))
    _, found = network.loss_and_grad(batch, factored={"first.weight": [model.first], "second.weight": [model.second]})
    assert isinstance(found["first.weight"], FactoredGrad)
    assert isinstance(found["second.weight"], Tensor)


def test_hooks_are_removed_when_the_forward_fails() -> None:
    model = Net(CASES["plain"])
    with pytest.raises(RuntimeError), record_linear_calls({"first.weight": [model.first]}):
        model(torch.zeros(2, 5, dtype=torch.float64))
    assert no_hooks(model)


class Scaled(nn.Linear):
    """A linear layer that computes something else with its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, 2 * self.weight)


class Unusual(nn.Module):
    """Weights whose gradient is not what the layers' calls alone would give."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.scaled = nn.Linear(5, 5, dtype=torch.float64), Scaled(5, 5, dtype=torch.float64)
        self.twice, self.halved = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, 5, dtype=torch.float64)
        self.halved.register_forward_hook(lambda layer, args, output: output / 2)
        self.aside = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.aside(x).sigmoid()
        x = self.twice(self.scaled(self.plain(x))) * gate
        return self.halved(nn.functional.linear(x, self.twice.weight.T))


def test_only_outer_products_are_factored() -> None:
    model = Unusual()
    linear = {name: weight.layers for name, weight in projected_weights(model).items()}
    assert set(linear) == {f"{name}.weight" for name in ("plain", "scaled", "twice", "halved", "aside")}
    assert find_factorable(model, linear, torch.randn(3, 5, dtype=torch.float64)) == ["plain.weight", "halved.weight"]


def test_layer_without_inputs_is_not_factored() -> None:
    """On these samples neither its call nor the other use of its weight has a gradient; on others both do."""

    def use(net: Net, x: Tensor) -> Tensor:
        none = net.first(x[:0])
        return torch.cat([net.head(net.first(x)), net.head(net.second(none) + linear(none, net.second.weight))])

    model = Net(use)
    linears = {name: weight.layers for name, weight in projected_weights(model).items()}
    assert find_factorable(model, linears, torch.randn(3, 6, dtype=torch.float64)) == ["first.weight", "head.weight"]


class DropConnect(nn.Linear):
    """Drops weights, only in training."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, dropout(self.weight, 0.5, self.training), self.bias)


class Renamed(nn.Linear):
    """A subclass that computes the same."""


def patched() -> nn.Linear:
    """Replaces the class's forward on the instance."""
    layer = nn.Linear(8, 64, dtype=torch.float64)
    layer.forward = lambda x: linear(x, dropout(layer.weight, 0.5, layer.training), layer.bias)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("build", "factored"),
    [
        (lambda: nn.Linear(8, 64, dtype=torch.float64), True),
        (lambda: Renamed(8, 64, dtype=torch.float64), True),
        (lambda: DropConnect(8, 64, dtype=torch.float64), False),
        (patched, False),
    ],
    ids=["torch's own", "by another name", "drop-connect", "patched"],
)
def test_gradients_equal_autograd_in_train_mode(build: Callable[[], nn.Linear], factored: bool) -> None:
    """The check runs in eval mode, where a layer may differ from train mode."""
    torch.manual_seed(0)
    model = nn.Sequential(build(), nn.Tanh(), nn.Linear(64, 4, dtype=torch.float64))
    network = Network(model)
    x, y = torch.randn(5, 8, dtype=torch.float64), torch.arange(5) % 4
    found = find_covered_weights(network, x[:1], (), multi_head=False)
    assert found["0.weight"].factorable == factored
    assert found["2.weight"].factorable
    memory = GradientMemory(Ones(), found)
    with network.mode(training=True):
        torch.manual_seed(1)
        _, gradient = network.loss_and_grad(Batch(x, y, torch.zeros_like(y)), factored=memory.linear)
        torch.manual_seed(1)  # drops the same weights
        truth = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    assert isinstance(gradient["0.weight"], FactoredGrad) == factored
    for g, expected in zip(gradient.values(), truth, strict=True):
        torch.testing.assert_close(to_dense(g), expected)


def test_norm_of_a_tiny_gradient_is_not_negative() -> None:
    """Rounding can make Σ (δδᵀ) ∘ (XXᵀ) negative, and its square root would be NaN."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = torch.randn(1, 30, generator=generator) + 1e3
        slope = torch.randn(1, 4, generator=generator)
        g = FactoredGrad(torch.cat([slope, -slope]), torch.cat([x, x]))
        assert clip_factor({"weight": g}, 2.0) == 1.0
