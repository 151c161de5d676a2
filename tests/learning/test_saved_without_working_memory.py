"""Files without bases: they are rebuilt to the same bits, and learning goes on as if they had been written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_states import same
from torch import nn

import steppe
from steppe import FSDGPM, Learner, Task
from steppe.checkpoint.io import read_state
from steppe.checkpoint.tree import equal_trees

BRISK: dict[str, Any] = {"lr": 0.05, "buffer": 40, "ascent_lr": 0.02}
CASES: dict[str, FSDGPM] = {
    "fs-dgpm": FSDGPM(**BRISK, basis_samples=30, threshold=0.9),
    "fs-sgpm": FSDGPM(**BRISK, basis_samples=60, importance="spectral", ascent_form="chunked"),
    "fs-rgpm": FSDGPM(**BRISK, basis_samples=30, importance="ridge"),
    "fs-rgpm, gram": FSDGPM(**BRISK, importance="ridge", first_inputs="all", replay_weight=1.0),
    "fs-rgpm, gram of low rank": FSDGPM(**BRISK, importance="ridge", first_inputs="all", gram_rank=5),
    "fs-rgpm, averaged": FSDGPM(**BRISK, importance="ridge", average=0.9),
}


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 4))


def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(216, 4)
    )


def tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(2)
    stream = []
    for number in range(3):
        x, y = torch.randn(60, 1, 8, 8, generator=generator), torch.arange(60) % 4
        x[torch.arange(60), 0, y, number] += 3
        stream.append(Task((x, y), (x, y), name=f"task {number}"))
    return stream


@pytest.mark.parametrize("build", [mlp, normed])
@pytest.mark.parametrize("case", CASES)
def test_learning_goes_on_to_the_same_bits(case: str, build: Any, tmp_path: Path) -> None:
    first, second, third = tasks()
    one = Learner(build(0), CASES[case], seed=3)
    one.learn(first)
    one.learn(second)
    one.save(tmp_path / "whole")
    one.save(tmp_path / "reduced", working_memory=False)
    assert "memory" not in read_state(tmp_path / "reduced", "learner", "cpu")["method"]
    assert (tmp_path / "reduced").stat().st_size < 0.9 * (tmp_path / "whole").stat().st_size
    other = steppe.load(tmp_path / "reduced", build(99))
    assert equal_trees(one.state_dict(), other.state_dict())
    one.learn(third)
    other.learn(third)
    assert same(one, other)


def test_bases_of_other_weights_are_written(tmp_path: Path) -> None:
    """They cannot be rebuilt from the weights of now."""
    first, second, _ = tasks()
    one = Learner(mlp(0), CASES["fs-rgpm"], seed=3)
    one.learn(first)
    with torch.no_grad():
        one.model[1].weight.mul_(1.5)  # type: ignore[index, operator, union-attr]
    one.save(tmp_path / "file", working_memory=False)
    assert "memory" in read_state(tmp_path / "file", "learner", "cpu")["method"]
    other = steppe.load(tmp_path / "file", mlp(99))
    one.learn(second)
    other.learn(second)
    assert same(one, other)


def test_within_a_task_all_is_written(tmp_path: Path) -> None:
    first, second, third = tasks()
    one = Learner(mlp(0), CASES["fs-rgpm, gram"], seed=3)
    one.learn(first)

    def save(event: object) -> None:
        one.save(tmp_path / "file", working_memory=False)

    one.learn(second, epochs=2, callback=save)
    assert "memory" in read_state(tmp_path / "file", "learner", "cpu")["method"]
    other = steppe.load(tmp_path / "file", mlp(99))
    other.learn(second, epochs=2)
    one.learn(third)
    other.learn(third)
    assert same(one, other)


def test_methods_without_working_memory_are_written_whole(tmp_path: Path) -> None:
    one = Learner(mlp(0), steppe.GPM(), seed=3)
    one.save(tmp_path / "before", working_memory=False)
    one.learn(tasks()[0])
    one.save(tmp_path / "file", working_memory=False)
    assert equal_trees(steppe.load(tmp_path / "file", mlp(9)).state_dict(), one.state_dict())


@pytest.mark.parametrize("built_from", [{"slots": [400], "threads": 1}, {"slots": None, "threads": -1}])
def test_an_invalid_file_is_refused(built_from: Any) -> None:
    one = Learner(mlp(0), CASES["fs-rgpm"], seed=3)
    one.learn(tasks()[0])
    state = one.state_dict(working_memory=False)
    state["method"]["built_from"] = built_from
    with pytest.raises(ValueError, match=r"slots|samples"):
        Learner(mlp(0), CASES["fs-rgpm"], seed=3).load_state_dict(state)
