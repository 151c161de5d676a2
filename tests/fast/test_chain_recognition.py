"""Which models use the fast path: linear chains, and nothing that could ever differ from one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from steppe import FSDGPM, Learner, Task
from steppe.errors import ModelError
from steppe.fast.chain_recognition import find_linear_chain
from steppe.learning.events import EpochEnded
from steppe.models.mlp import MLP


class Branching(MLP):
    """Sometimes takes another branch."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return super().forward(x) if self.training else super().forward(x) * 2


class Counting(MLP):
    """Counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        self.calls = 1
        return self.head(self.first(x).relu())


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.b(self.a(self.a(x)))


class Bent(Twice):
    """A helper method with one call, which could do anything."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.b(self.bent(self.a(x)))

    def bent(self, x: Tensor) -> Tensor:
        return x.relu()


class Helped(Bent):
    """A helper method with several calls."""

    def bent(self, x: Tensor) -> Tensor:
        return x.relu().relu()


class Chosen(Bent):
    """Its activation is an attribute, which may change."""

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.b(self.act(self.a(x)))


def custom_activation(x: Tensor) -> Tensor:
    """A function from elsewhere."""
    return x.relu()


class Foreign(Bent):
    """Calls a function from elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.b(custom_activation(self.a(x)))


class Called(MLP):
    """Overrides `__call__`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, bounded."""
        output: Tensor = super().__call__(x)
        return output.clamp(-1, 1)


def weight_hooked() -> nn.Module:
    model = MLP(9, 12, 5)
    model.second.weight.register_hook(lambda g: g * 0)
    return model


def patched() -> nn.Module:
    model = MLP(9, 12, 5)
    model.second.forward = lambda x: x  # type: ignore[method-assign]
    return model


def hooked() -> nn.Module:
    model = MLP(9, 12, 5)
    model.second.register_forward_hook(lambda layer, args, output: output * 2)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.ReLU(), nn.Linear(9, 9, bias=False))
    model[2].weight = model[0].weight
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "branch": lambda: Branching(9, 12, 5),
    "trace": lambda: Counting(9, 12, 5),
    "twice": Twice,
    "helper": Helped,
    "helper of one call": Bent,
    "attribute": Chosen,
    "foreign function": Foreign,
    "call": lambda: Called(9, 12, 5),
    "weight hook": weight_hooked,
    "patched": patched,
    "late flatten": lambda: nn.Sequential(nn.Linear(9, 6), nn.Flatten(), nn.Linear(6, 5)),
    "hook": hooked,
    "tied": tied,
    "norm": lambda: nn.Sequential(nn.Linear(9, 6), nn.LayerNorm(6), nn.Linear(6, 5)),
    "batch norm": lambda: nn.Sequential(nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)),
    "dropout": lambda: nn.Sequential(nn.Linear(9, 6), nn.Dropout(0.1), nn.Linear(6, 5)),
    "gelu": lambda: nn.Sequential(nn.Linear(9, 6), nn.GELU(), nn.Linear(6, 5)),
    "scaled": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(9, 5)),
    "unused": lambda: nn.Sequential(OrderedDict(a=nn.Linear(9, 5), b=nn.Identity(), c=nn.PReLU())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_not_chains(name: str) -> None:
    assert find_linear_chain(OTHERS[name]()) is None


def test_global_hooks_disable_the_chain() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert find_linear_chain(MLP(9, 12, 5)) is None
    finally:
        handle.remove()
    assert find_linear_chain(MLP(9, 12, 5)) is not None


@pytest.mark.parametrize("change", ["hook", "weight hook", "layer"])
def test_changes_during_a_task_disable_the_chain(change: str) -> None:
    """From that moment on, the model learns as without it."""
    weights = []
    for quick in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5)).double()
        learner = Learner(model, FSDGPM(buffer=20))
        if not quick:
            learner.network.use_chain_if_exact = lambda batch: None  # type: ignore[method-assign]

        def interfere(event: object, model: nn.Sequential = model) -> None:
            if not isinstance(event, EpochEnded) or event.epoch > 0:  # progress is reported by the clock
                return
            if change == "hook":
                model[0].register_forward_hook(lambda module, args, output: output * 0.5)
            elif change == "weight hook":
                model[2].weight.register_hook(lambda g: g * 0)
            else:
                model[1] = nn.Tanh()

        x = torch.randn(30, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        learner.learn(Task((x, torch.arange(30) % 5)), epochs=2, callback=interfere)
        assert learner.network.chain is None
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_unflattened_inputs_disable_the_chain() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(30, 3))
    learner = Learner(model, FSDGPM(buffer=10))
    learner.learn(Task((torch.rand(20, 5, 4), torch.arange(20) % 3)))
    assert learner.network.chain is None
    deep = nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3))
    learner = Learner(deep, FSDGPM(buffer=10))
    learner.learn(Task((torch.rand(20, 5, 4), torch.arange(20) % 3)))
    assert learner.network.chain is not None


def test_layer_replaced_between_tasks_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5))
    learner = Learner(model, FSDGPM(buffer=10))
    task = Task((torch.rand(20, 9), torch.arange(20) % 5))
    learner.learn(task)
    model[2] = nn.Linear(12, 5)
    with pytest.raises(ModelError, match=r"weight '2.weight' was replaced after the learner was created"):
        learner.learn(task)


def test_weight_hooks_see_the_gradient() -> None:
    """Also where gradients of linear layers come as factors."""
    moved = []
    for size in (4, 30):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 20), nn.ReLU(), nn.Linear(20, 3)
        )
        before = model[3].weight.detach().clone()
        model[3].weight.register_hook(lambda g: g * 0)
        Learner(model, FSDGPM(buffer=10)).learn(Task((torch.rand(60, 1, 5, 5), torch.arange(60) % 3)), batch_size=size)
        moved.append(float((model[3].weight.detach() - before).abs().max()))
    assert moved == [0.0, 0.0]


def test_recognition_does_not_change_the_model() -> None:
    model = Counting(9, 12, 5)
    find_linear_chain(model)
    assert not hasattr(model, "calls")


def test_model_changed_between_tasks_is_checked_again() -> None:
    model = MLP(9, 12, 5)
    learner = Learner(model, FSDGPM(buffer=10))
    task = Task((torch.rand(20, 9), torch.arange(20) % 5))
    learner.learn(task)
    assert learner.network.chain is not None
    handle = model.first.register_forward_hook(lambda layer, args, output: output * 0.5)
    learner.learn(task)  # with the scratch memory left by the fast path
    assert learner.network.chain is None
    handle.remove()
    learner.learn(task)
    assert learner.network.chain is not None
