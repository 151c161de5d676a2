"""Frozen weights and norm layers: for one call of `learn`, or by the user, also after loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import SEQUENTIAL, Small, settings_of, task
from torch import Tensor, nn

import steppe
from steppe import ER, FSDGPM, GPM, LaMAML, Learner, ModelError, Task
from steppe.checkpoint.io import write_state
from steppe.errors import RunError


@pytest.mark.parametrize(("method", "saved"), [*((name, False) for name in SEQUENTIAL), ("er", True), ("gpm", True)])
def test_freezing_lasts_for_one_call(method: str, saved: bool, tmp_path: Path) -> None:
    """Both are arguments of a call and apply to its task only, also for a learner that was loaded."""
    torch.manual_seed(0)
    learner = Learner(Small(6), settings_of(method, "cifar100-superclass"))
    learner.learn(task(0), batch_size=6, freeze_norms=True, freeze_statistics=True)
    first = learner.network.snapshot()
    learner.learn(task(1), batch_size=6, freeze_norms=True, freeze_statistics=True)
    second = learner.network.snapshot()
    if saved:
        learner.save(tmp_path / "learner")
        learner = steppe.load(tmp_path / "learner", Small(6))
    learner.learn(task(2), batch_size=6)
    third = learner.network.snapshot()
    for name in ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"):
        assert torch.equal(first[name], second[name])
        stays = method in ("gpm", "sgp") and name in ("norm.weight", "norm.bias")  # frozen by their own settings
        assert torch.equal(second[name], third[name]) is stays


class Adapted(nn.Module):
    """A backbone with BatchNorm and dropout, and a head; optionally frozen and in eval mode."""

    def __init__(self, *, frozen: bool = True, in_eval: bool = True) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8))
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.backbone.requires_grad_(not frozen).train(not in_eval)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.hidden(self.backbone(x)).relu())
        return output


def numbers(task: int) -> Task:
    generator = torch.Generator().manual_seed(task)
    pair = torch.randn(24, 6, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    return Task(pair, val=pair, name=f"task {task}")


UNTIL_CUT = {
    "epochs": 30,
    "batch_size": 6,
    "patience": 1,
    "lr_min": 1.0,
}  # ends at the first decay: no momentum is left
METHODS = {
    "er": ER(lr=0.3, buffer=10),
    "fs-dgpm": FSDGPM(lr=0.3, buffer=10, basis_samples=10),
    "gpm": GPM(lr=0.3),
    "la-maml": LaMAML(buffer=10),
}


def written(file: Path, name: str, model: nn.Module, **how: Any) -> Learner:
    learner = Learner(model, METHODS[name])
    learner.learn(numbers(0), **how)
    learner.save(file)
    return learner


@pytest.mark.parametrize("how", [UNTIL_CUT, {}], ids=["until a cut", "to the end"])
@pytest.mark.parametrize("name", METHODS)
def test_loading_into_a_model_with_unfrozen_weights_is_an_error(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    file, given = tmp_path / "learner", Adapted(frozen=False)
    learner = written(file, name, Adapted(), **how)
    before = {key: value.clone() for key, value in given.state_dict().items()}
    with pytest.raises(ModelError, match=r"'backbone\.0\.weight' \(and 5 more\) was frozen .*requires_grad_\(False\)"):
        steppe.load(file, given)
    assert all(torch.equal(before[key], value) for key, value in given.state_dict().items())
    again = steppe.load(file, Adapted())
    for each in (learner, again):
        each.learn(numbers(1))
    found = again.model.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in learner.model.state_dict().items())


def test_loading_into_a_model_with_trained_weights_frozen_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "learner", "er", Adapted(frozen=False, in_eval=False))
    with pytest.raises(
        ModelError, match=r"'backbone\.0\.weight' \(and 5 more\) was trainable .*requires_grad_\(True\)"
    ):
        steppe.load(tmp_path / "learner", Adapted())


@pytest.mark.parametrize("saved_in_eval", [True, False])
def test_frozen_layers_must_keep_their_mode(saved_in_eval: bool, tmp_path: Path) -> None:
    """For prediction either mode works; learning in the other mode is an error, without need to load again."""
    learner = written(tmp_path / "learner", "er", Adapted(in_eval=saved_in_eval))
    learner.model.eval()  # as usual between tasks; it says nothing about the mode in training
    learner.save(tmp_path / "learner")
    loaded = steppe.load(tmp_path / "learner", Adapted(in_eval=not saved_in_eval))
    loaded.save(tmp_path / "learner")  # has no effect
    loaded = steppe.load(tmp_path / "learner", Adapted(in_eval=not saved_in_eval))
    assert torch.equal(loaded.predict(torch.ones(3, 6)), learner.predict(torch.ones(3, 6)))
    said = r"eval mode with part\.eval\(\)" if saved_in_eval else r"train mode with layer\.train\(\)"
    before = loaded.network.snapshot()
    with pytest.raises(ModelError, match=rf"'backbone\.1' \(and 1 more\) was in .*{said}\."):
        loaded.learn(numbers(1))
    assert all(torch.equal(before[name], value) for name, value in loaded.network.snapshot().items())
    loaded.model.backbone.train(not saved_in_eval)
    loaded.learn(numbers(1))
    stood = torch.equal(before["backbone.1.running_mean"], loaded.network.snapshot()["backbone.1.running_mean"])
    assert stood is saved_in_eval
    loaded.model.backbone.train(saved_in_eval)  # between tasks the user decides
    loaded.learn(numbers(2))


def test_modes_without_effect_are_not_checked(tmp_path: Path) -> None:
    def plain() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        model[0].requires_grad_(False)
        return model

    learner = Learner(plain().eval(), ER())
    learner.learn(numbers(0))
    learner.save(tmp_path / "learner")
    steppe.load(tmp_path / "learner", plain()).learn(numbers(1))


def test_modes_saved_within_a_task_are_those_before_it(tmp_path: Path) -> None:
    """Frozen statistics put layers in eval mode during a task; that is not the user's choice."""
    learner = Learner(Adapted(in_eval=False), ER())
    learner.learn(numbers(0))
    how = {"batch_size": 6, "freeze_statistics": True}
    learner.learn(numbers(1), **how, callback=lambda event: learner.save(tmp_path / "learner"))
    steppe.load(tmp_path / "learner", Adapted(in_eval=False)).learn(numbers(1), **how)


def test_older_files_without_frozen_names_load(tmp_path: Path) -> None:
    learner = written(tmp_path / "learner", "er", Adapted(), **UNTIL_CUT)
    state = learner.state_dict()
    del state["trainable"], state["at_rest"]
    write_state(tmp_path / "learner", "learner", state)
    steppe.load(tmp_path / "learner", Adapted()).learn(numbers(1))
    state["at_rest"] = [3]
    write_state(tmp_path / "learner", "learner", state)
    with pytest.raises(RunError, match="expected names"):
        steppe.load(tmp_path / "learner", Adapted())
