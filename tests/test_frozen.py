"""What stands still: norm layers for one call of `learn`, and weights that their owner froze, also after loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_protocol import SEQUENTIAL, Small, settings_of, task

import steppe
from steppe import Learner


@pytest.mark.parametrize(("method", "saved"), [*((name, False) for name in SEQUENTIAL), ("er", True), ("gpm", True)])
def test_what_one_call_freezes_the_next_may_learn_again(method: str, saved: bool, tmp_path: Path) -> None:
    """Both are arguments of a call: what they say holds for its task alone, also of a learner that was loaded."""
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
