"""Learning tasks together equals learning their union, each sample on its own head; Oracle starts from scratch each
time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from steppe import Finetune, Learner, Multitask, Task
from steppe.errors import DataError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.learning.task_group import TaskGroup
from steppe.network.network import Network
from steppe.runtime.rng import Streams

SHORT = ["tasks=3", "samples=40", "test_samples=50"]


def data(count: int, first: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return x, first + torch.randint(0, classes, (count,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_single_head_equals_one_task_with_all_samples() -> None:
    parts = [data(count, 0, 6, seed) for seed, count in enumerate((13, 8, 21))]
    union = tuple(torch.cat([part[place] for part in parts]) for place in (0, 1))
    together = Learner(network(), Multitask(), seed=1)
    together.learn([Task(part) for part in parts], epochs=3, batch_size=4)
    at_once = Learner(network(), Finetune(), seed=1)
    at_once.learn(Task(union), epochs=3, batch_size=4)
    torch.testing.assert_close(weights(together.model), weights(at_once.model), rtol=1e-10, atol=1e-12)
    assert together.num_tasks == 3


def test_every_sample_is_learned_on_its_own_head() -> None:
    """One batch of everything: the gradient is that of the mean of each sample's loss on its task's outputs."""
    heads = [range(0, 2), range(2, 6)]
    parts = [data(9, head.start, len(head), seed) for seed, head in enumerate(heads)]
    model = network()
    before = weights(model)
    losses = [
        cross_entropy(model(x[i : i + 1])[:, head.start : head.stop], y[i : i + 1] - head.start)
        for (x, y), head in zip(parts, heads, strict=True)
        for i in range(9)
    ]
    slopes = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
    wanted = before - 0.5 * torch.cat([slope.flatten() for slope in slopes])
    learner = Learner(model, Multitask(lr=0.5, clip=0))
    learner.learn([Task(part, head=head) for part, head in zip(parts, heads, strict=True)], batch_size=18)
    torch.testing.assert_close(weights(model), wanted, rtol=1e-10, atol=1e-12)


def test_epoch_has_every_sample_once_and_mixes_the_tasks() -> None:
    tasks = [Task(data(count, 0, 6, seed)) for seed, count in enumerate((7, 12, 3))]
    curriculum = TaskGroup(tasks, first=4)
    batches = list(curriculum.batches(5, Streams(0), 6, Network(nn.Linear(5, 6).double())))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 2]
    assert len(batches) == curriculum.count_batches(5)
    seen = {(int(t) - 4, tuple(x.tolist())) for batch in batches for x, t in zip(batch.x, batch.task, strict=True)}
    assert seen == {
        (place, tuple(x.tolist()))
        for place, task in enumerate(tasks)
        for x in task.train.take(torch.arange(len(task.train)))[0]
    }
    assert any(len(set(batch.task.tolist())) > 1 for batch in batches)


def test_loader_cannot_be_mixed() -> None:
    x, y = data(8, 0, 6, 0)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    with pytest.raises(DataError, match="theirs: the training data is a DataLoader"):
        Learner(network(), Multitask()).learn([Task((x, y)), Task(loader, name="theirs")])


def test_multitask_has_one_row_of_accuracies() -> None:
    result = run(RunConfig.make("pmnist", "multitask", SHORT))
    assert result.accuracy[:2] == [[None] * 3] * 2
    assert None not in result.accuracy[2]
    assert result.bwt is result.learning_acc is result.forgetting is None
    assert result.updates == 5 * 12


def test_oracle_learns_all_tasks_so_far_from_scratch() -> None:
    """Its last row is Multitask's, and its first is that of the first task alone."""
    oracle = run(RunConfig.make("pmnist", "oracle", SHORT))
    multitask = run(RunConfig.make("pmnist", "multitask", SHORT))
    assert oracle.accuracy[2] == multitask.accuracy[2]
    first = run(RunConfig.make("pmnist", "multitask", ["tasks=1", *SHORT[1:]]))
    assert oracle.accuracy[0][0] == first.accuracy[0][0]
    assert oracle.updates == 5 * sum(itertools.accumulate([4, 4, 4]))
