"""Losses, weights and layer inputs that are no longer finite are found, and named."""

from __future__ import annotations

import pytest
import torch
from own_models import BreaksAt, bright, mlp

from steppe import FSDGPM, GPM, DivergedError, Finetune, Learner, Task
from steppe.methods.base import MethodConfig

X, Y = bright(8)(40, 0)


@pytest.mark.parametrize(("at", "epoch", "update"), [(1, 1, 1), (8, 1, 8), (11, 2, 11)])
def test_non_finite_loss_names_task_epoch_and_update(at: int, epoch: int, update: int) -> None:
    """40 samples in batches of 10, two updates per batch: 8 updates per epoch, one forward per update."""
    learner = Learner(BreaksAt(at, lambda output: output * torch.nan), Finetune())
    with pytest.raises(DivergedError, match=f"nan in task 'digits', epoch {epoch}, update {update};"):
        learner.learn(Task((X, Y), name="digits"), epochs=3, updates_per_batch=2)


def test_non_finite_weights_are_found_after_the_last_update() -> None:
    """One update, whose loss was finite."""
    with pytest.raises(DivergedError, match=r"'0\.weight' is no longer finite after task 'digits'"):
        Learner(mlp(), Finetune(lr=1e38, clip=0)).learn(Task((1e3 * X, Y), name="digits"), batch_size=40)


@pytest.mark.parametrize("method", [FSDGPM(lr=1e22, clip=0.0), FSDGPM(lr=1e22, clip=0.0, threshold=1.0), GPM(lr=1e22)])
def test_non_finite_layer_inputs_are_found_after_the_last_update(method: MethodConfig) -> None:
    """The weights are finite, but the layers' inputs are not."""
    learner = Learner(mlp(), method)
    with pytest.raises(
        DivergedError, match=r"task 'digits': the inputs of .*'[24]\.weight' are not finite.*: lower the step"
    ):
        learner.learn(Task((1e3 * X, Y), name="digits"), batch_size=40)
    assert (learner.num_tasks, learner.network.heads.ranges) == (0, [])
