"""Models whose linear layers use oneDNN against the same models in float64: dense and factored gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from onednn_products import CLOSE, NEEDS_ONEDNN, every_product_by_onednn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steppe import FSDGPM, GPM, Learner, Task
from steppe.fast.factored import FactoredGrad, to_dense
from steppe.fast.matmul import fast_linear_layers, wide_linear_layers
from steppe.models.alexnet import AlexNet
from steppe.network.network import Network
from steppe.projection.layers import projected_weights
from steppe.tensors.batch import Batch

pytestmark = NEEDS_ONEDNN


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    return every_product_by_onednn(monkeypatch)


def networks(model: nn.Module) -> tuple[Network, Network]:
    return Network(model), Network(copy.deepcopy(model).double())


class Checkpointed(nn.Module):
    """Its middle part is recomputed in the backward pass, by torch's checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        # A checkpointed function without parameters of its own needs an input that requires grad.
        hidden: Tensor = checkpoint(lambda h: torch.tanh(self.middle(h)), self.first(x), use_reentrant=self.reentrant)
        output: Tensor = self.last(hidden)
        return output


class Attentive(nn.Module):
    """Sequences, layers called twice, a fused projection, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unflatten(1, (3, 8))
        h = h + self.attention(h, h, h)[0]
        output: Tensor = self.head(torch.relu(self.twice(torch.relu(self.twice(h))))[:, 0])
        return output


class Sequences(nn.Module):
    """Linear layers on sequences, each followed by an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 9)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.act(self.second(self.act(self.first(x.unflatten(1, (3, 8)))))).mean(1))
        return output


def in_place(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6, bias=bias), nn.ReLU(inplace=True), nn.Dropout(0), nn.Linear(6, 5, bias=bias))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in place": (lambda: in_place(True), (7,)),
    "in place without biases": (lambda: in_place(False), (7,)),
    "norm": (lambda: nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 5)), (7,)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(7, 6)), nn.ReLU(), nn.Linear(6, 5)),
        (7,),
    ),
    "checkpoint": (lambda: Checkpointed(False), (7,)),
    "attention": (Attentive, (24,)),
    "sequences": (Sequences, (24,)),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("factored", [False, True])
def test_gradients_of_models(kind: str, factored: bool, calls: list[object]) -> None:
    torch.manual_seed(5)
    make, shape = MODELS[kind]
    own, twin = networks(make())
    x = torch.randn(4, *shape)
    labels, tasks = torch.tensor([0, 1, 2, 4]), torch.zeros(4, dtype=torch.int64)
    found = {}
    for network, dtype in ((own, torch.float32), (twin, torch.float64)):
        network.heads.add(None, 5)
        modules = network.model.named_modules() if factored else ()
        layers = {f"{place}.weight": [module] for place, module in modules if type(module) is nn.Linear}
        if (
            kind == "sequences"
        ):  # with a bias, torch's own function returns a view for sequences, which the in-place activation detaches
            layers.pop("second.weight", None)
        found[dtype] = network.loss_and_grad(Batch(x.to(dtype), labels, tasks), factored=layers)
    assert calls
    torch.testing.assert_close(found[torch.float32][0].double(), found[torch.float64][0], **CLOSE)
    for name, g in found[torch.float32][1].items():
        exact = found[torch.float64][1][name]
        assert isinstance(g, FactoredGrad) == isinstance(exact, FactoredGrad)
        torch.testing.assert_close(to_dense(g).double(), to_dense(exact), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(own.outputs(x), own.model(x), **CLOSE)
    assert not any("forward" in vars(module) for module in own.model.modules())


def test_checkpoints_that_enter_the_graph_anew() -> None:
    model, x = Checkpointed(True), torch.randn(4, 7)
    wanted = {}
    for name, layers in (("torch", []), ("quick", wide_linear_layers(model))):
        model.zero_grad()
        with fast_linear_layers(layers):
            output = model(x)
        output.square().sum().backward()
        wanted[name] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(wanted["torch"]) == 6
    for each, other in zip(wanted["torch"], wanted["quick"], strict=True):
        torch.testing.assert_close(each, other, **CLOSE)


@pytest.mark.parametrize("method", [GPM(), FSDGPM(buffer=20)])
def test_layers_before_in_place_activations_are_trained(method: FSDGPM, calls: list[object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 40, bias=False), nn.ReLU(inplace=True), nn.Linear(40, 4)
    )
    before = model[2].weight.detach().clone()
    x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 4
    Learner(model, method).learn(Task((x, y)), batch_size=8)
    assert calls
    assert not torch.equal(model[2].weight, before)


def test_factored_gradients_are_not_multiplied_out(calls: list[tuple[int, ...]]) -> None:
    network = Network(AlexNet(10, size=19))
    network.heads.add(None, 10)
    batch = Batch(torch.randn(3, 3, 19, 19), torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64))
    covered = projected_weights(network.model)
    layers = {name: weight.layers for name, weight in covered.items() if name.startswith("hidden")}
    network.loss_and_grad(batch, factored=layers)
    forward = [(3, 256, 2048), (3, 2048, 2048), (3, 2048, 10)]
    back = [(3, 10, 2048), (10, 3, 2048), (3, 2048, 2048), (3, 2048, 256)]  # of weights, only the head's
    assert sorted(calls) == sorted(forward + back)
