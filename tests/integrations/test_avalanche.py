"""Avalanche: outputs of the first experience stay while the second is learned by an Avalanche strategy.

Avalanche wants torchvision, and with it a torch of its own choice, so these tests run in an environment of their own:

    python -m venv avalanche && avalanche/bin/pip install -e '.[avalanche]' pytest hypothesis
    avalanche/bin/python -m pytest tests/integrations/test_avalanche.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from two_tasks import FEATURES, adamw, exact_memory, largest_change, network, task

import steppe
from steppe.integrations.avalanche import GradientMemoryPlugin

pytest.importorskip("avalanche", reason="needs an environment of its own: pip install 'steppe[avalanche]'")

from avalanche.benchmarks import tensors_benchmark
from avalanche.models import IncrementalClassifier
from avalanche.training import Naive
from avalanche.training.plugins import ReplayPlugin

pytestmark = pytest.mark.filterwarnings("ignore:the basis of", "ignore::DeprecationWarning", "ignore:No loggers")


def benchmark(first_class: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Two experiences; in the second, classes are counted from `first_class`."""
    tasks = [task(number, dtype) for number in (1, 2)]
    tensors = [(x, y + number * first_class) for number, (x, y) in enumerate(tasks)]
    return tensors_benchmark(train_tensors=tensors, test_tensors=tensors, task_labels=[0, 0])


def strategy(model: nn.Module, plugins: Any, optimizer: Any = None) -> Naive:
    return Naive(
        model=model,
        optimizer=adamw(model) if optimizer is None else optimizer,
        criterion=cross_entropy,
        train_mb_size=4,
        train_epochs=10,
        plugins=list(plugins),
        evaluator=None,
    )


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(task(1, next(model.parameters()).dtype)[0])


@pytest.mark.parametrize("replay", [False, True])
def test_old_outputs_stay(replay: bool) -> None:
    changes = {}
    for protect in (True, False):
        model = network().double()
        memory = exact_memory(model)
        plugins: list[Any] = [GradientMemoryPlugin(memory)] if protect else []
        learner = strategy(model, [*plugins, ReplayPlugin(mem_size=6)] if replay else plugins)
        for experience in benchmark().train_stream:
            before = outputs(model)
            learner.train(experience)
        assert memory.num_updates == (2 if protect else 0)
        x, y = task(2, torch.float64)
        with torch.no_grad():
            assert float(cross_entropy(model(x), y)) < 1.0
        changes[protect] = largest_change(before, outputs(model))
    assert changes[True] < 1e-9
    assert changes[False] > 0.1


def test_a_head_that_grows() -> None:
    """Avalanche replaces the parameters of the head, in the optimizer too. New ones are in single precision."""
    changes = {}
    for protect in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, 40), nn.ReLU(), IncrementalClassifier(40, initial_out_features=3, masking=False)
        )
        memory = exact_memory(model)
        learner = strategy(model, [GradientMemoryPlugin(memory)] if protect else [])
        old = [outputs(model)]
        for experience in benchmark(3, torch.float32).train_stream:
            old.append(outputs(model))
            learner.train(experience)
        assert outputs(model).shape[1] == 6
        x, y = task(2)
        with torch.no_grad():
            assert float(cross_entropy(model(x), y + 3)) < 1.0
        changes[protect] = largest_change(old[-1], outputs(model)[:, :3])
    assert changes[True] < 1e-4
    assert changes[False] > 0.1


def test_an_optimizer_that_is_wrapped_already() -> None:
    model = network().double()
    memory = exact_memory(model)
    learner = strategy(model, [GradientMemoryPlugin(memory, max_samples=5)], memory.wrap(adamw(model)))
    learner.train(benchmark().train_stream[0])
    assert isinstance(learner.optimizer, steppe.ProjectedOptimizer)
    assert not isinstance(learner.optimizer.optimizer, steppe.ProjectedOptimizer)
    assert memory.ranks()["0.weight"]["rank"] == 5
