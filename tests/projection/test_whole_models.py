"""With λ = 1 and all directions held, outputs on memorized inputs change only by rounding."""

from __future__ import annotations

import warnings

import pytest
import torch
from whole_models import MODELS, SAMPLES, build

import steppe
from steppe.methods.base import MethodConfig

METHODS: dict[str, MethodConfig] = {
    "fs-dgpm": steppe.FSDGPM(lr=0.1, importance="ones", threshold=1.0, buffer=2 * SAMPLES, basis_samples=2 * SAMPLES),
    "gpm": steppe.GPM(lr=0.1, thresholds="1", basis_samples=SAMPLES),
}


def learned(name: str, method: MethodConfig) -> tuple[steppe.Learner, list[steppe.Task], set[str]]:
    """A model that has learned two tasks, of which the memory holds the second completely."""
    model, data = build(name), MODELS[name][1]
    learner = steppe.Learner(model, method)
    tasks = [steppe.Task(data(task)) for task in range(3)]
    for task in tasks[:2]:
        result = learner.learn(task, epochs=3, freeze_norms=True)
    return learner, tasks, set(result.diagnostics["ranks"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_old_outputs_stay(name: str, method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        warnings.filterwarnings("ignore", ".* can no longer learn")  # small first layers
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        learner, tasks, covered = learned(name, METHODS[method])
    model = learner.model
    assert covered == {
        path for path, p in model.named_parameters() if p.ndim > 1 and not path.endswith(("original0", "_g"))
    }
    old, new = (task.train.first()[0] for task in tasks[1:])
    with torch.no_grad():
        before, first = model.eval()(old), model(new)
        learner.learn(tasks[2], epochs=10, freeze_norms=True)
        assert (model.eval()(old) - before).abs().max() < 1e-9
        assert (model(new) - first).abs().max() > 1e-4  # there was room to learn


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", MODELS)
def test_old_outputs_change_without_the_memory(name: str) -> None:
    learner, tasks, _ = learned(name, METHODS["gpm"])
    free = steppe.Learner(learner.model, steppe.Finetune(lr=0.1))
    old = tasks[1].train.first()[0]
    with torch.no_grad():
        before = learner.model.eval()(old)
        free.learn(tasks[2], epochs=10)
        assert (learner.model.eval()(old) - before).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:.* can no longer learn")
@pytest.mark.parametrize("name", MODELS)
def test_old_outputs_stay_under_adamw(name: str) -> None:
    """The step is projected, not only the gradient, so momentum, scaling and weight decay cannot move them either."""
    model, data = build(name), MODELS[name][1]
    biases = [p for path, p in model.named_parameters() if p.ndim < 2 and not path.endswith(("original0", "_g"))]
    for bias in biases:
        bias.requires_grad_(False)
    learner = steppe.Learner(
        model, METHODS["gpm"], optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    )
    tasks = [steppe.Task(data(task)) for task in range(3)]
    for task in tasks[:2]:
        learner.learn(task, epochs=3)
    old, new = (task.train.first()[0] for task in tasks[1:])
    with torch.no_grad():
        before, first = model.eval()(old), model(new)
        learner.learn(tasks[2], epochs=10)
        assert (model.eval()(old) - before).abs().max() < 1e-9
        assert (model(new) - first).abs().max() > 1e-4
