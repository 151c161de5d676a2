"""One switch for all fast paths: off, everything is plain PyTorch, and results are the same up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as torch_dropout

from steppe import ER, FSDGPM, GEM, GPM, Learner, Task
from steppe.errors import UsageError
from steppe.fast import matmul
from steppe.fast.chain_recognition import find_linear_chain
from steppe.fast.factored import FactoredGrad
from steppe.fast.linear_hooks import may_factor
from steppe.fast.malloc import keep_freed_memory
from steppe.fast.switch import VARIABLE, fast_paths, fast_paths_enabled
from steppe.methods.base import MethodConfig
from steppe.models.layers.dropout import dropout
from steppe.models.layers.response_norm import ResponseNorm
from steppe.projection.patches import patch_product


@pytest.fixture(autouse=True)
def _fast() -> None:
    """Every test here sets the switch itself."""


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_environment_variable_sets_the_switch(
    value: str | None, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert fast_paths_enabled() == enabled
    with fast_paths(not enabled):
        assert fast_paths_enabled() != enabled
        with fast_paths(enabled):
            assert fast_paths_enabled() == enabled
    assert fast_paths_enabled() == enabled


def test_other_values_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(UsageError, match=r"STEPPE_FAST='off': expected 0"):
        fast_paths_enabled()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 40), nn.ReLU(), nn.Linear(40, 4)).double()


def tasks() -> list[Task]:
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [Task((part, (part[:, 0] > 0).long()), (part, (part[:, 0] > 0).long())) for part in x]


def test_no_fast_path_is_taken_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "onednn_is_quicker", lambda: True)
    monkeypatch.setattr(matmul, "_WIDE", 0)
    x = torch.randn(4, 3, 8, 8)
    large = torch.randn(512, 512)
    with fast_paths(True):
        assert find_linear_chain(mlp()) is not None
        assert may_factor(nn.Linear(2, 2))
        assert matmul.wide_linear_layers(mlp())
        assert matmul._is_for_onednn(large, large)
        assert patch_product(nn.Conv2d(3, 2, 3), x) is not None
    with fast_paths(False):
        assert find_linear_chain(mlp()) is None
        assert not may_factor(nn.Linear(2, 2))
        assert not matmul.wide_linear_layers(mlp())
        assert not matmul._is_for_onednn(large, large)
        assert patch_product(nn.Conv2d(3, 2, 3), x) is None
        assert not keep_freed_memory()


def test_layers_are_torchs_own_when_off() -> None:
    x = torch.randn(4, 20, 6, 6)
    with fast_paths(False):
        torch.manual_seed(1)
        found = dropout(x, 0.3, training=True)
        torch.manual_seed(1)
        assert torch.equal(found, torch_dropout(x, 0.3))
        assert torch.equal(ResponseNorm(20, 4, 0.3, 0.6, 1.5)(x), nn.LocalResponseNorm(4, 0.3, 0.6, 1.5)(x))


def weights(method: MethodConfig, *, fast: bool) -> dict[str, Tensor]:
    """The weights after two tasks."""
    with fast_paths(fast):
        learner = Learner(mlp(), method, seed=0)
        for task in tasks():
            learner.learn(task, batch_size=10, epochs=2)
        assert (learner.network.chain is not None) == fast
        return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


@pytest.mark.parametrize("config", [FSDGPM(), GPM(basis_samples=20), GEM(memory=20, tasks=2), ER()], ids=repr)
def test_learning_is_the_same_either_way(config: MethodConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on = weights(config, fast=True)
    with monkeypatch.context() as patch:
        patch.setattr(FactoredGrad, "__init__", lambda *_: pytest.fail("a factored gradient"))
        off = weights(config, fast=False)
    for name, expected in off.items():
        torch.testing.assert_close(on[name], expected, rtol=1e-6, atol=1e-9)
    assert any(not torch.equal(p, off[name]) for name, p in mlp().named_parameters())
