"""Models whose BatchNorm keeps no running statistics: what they say of a sample depends on the others in its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe.errors import DataError
from steppe.landscape.profile import CHUNK, split_batch
from steppe.learning.task_checks import probe_inputs
from steppe.network.eval_batches import min_eval_batch
from steppe.network.network import Network
from steppe.tensors.batch import Batch

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 4


def by_batch() -> nn.Sequential:
    """Without running statistics: in eval mode, too, it normalises by the batch, which one sample is too few for."""
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 4))


@pytest.mark.parametrize("method", [steppe.GPM(basis_samples=65), steppe.FSDGPM(buffer=65), steppe.ER(buffer=20)])
@pytest.mark.parametrize("count", [40, 513])
def test_a_norm_without_running_statistics_never_meets_a_lone_sample(method: steppe.MethodConfig, count: int) -> None:
    """Neither when it is looked at, nor at the end of test and validation data or of the samples of a basis."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(count) % 2
    learner = steppe.Learner(by_batch(), method, seed=0)
    tasks = [
        steppe.Task((x[:80], y[:80]), (x, y), val=(x, y), head=range(2)),
        steppe.Task((x[:80], 2 + y[:80]), head=range(2, 4)),
    ]
    learner.learn(tasks[0], epochs=2, batch_size=10, patience=1)
    learner.learn(tasks[1], batch_size=10)
    right = torch.cat([learner.model.eval()(part)[:, :2].argmax(1) for part in torch.split(x, 511)]) == y
    assert learner.evaluate(tasks[0]) == [pytest.approx(100 * float(right.float().mean()))]
    assert len(learner.predict(x)) == count
    with pytest.raises(DataError, match=r"single sample cannot be normalized.*track_running_stats"):
        learner.predict(x[:1])


def test_a_task_of_one_sample_is_looked_at_twice() -> None:
    """Where a batch is normalised by itself."""
    network = Network(by_batch())
    assert min_eval_batch(network.model) == 2
    assert len(probe_inputs(steppe.Task((X[:1], Y[:1])), network)) == 2
    assert torch.equal(probe_inputs(steppe.Task((X, Y)), network), X[:2])
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    assert torch.equal(probe_inputs(steppe.Task(loader), network), X[:2])
    assert len(probe_inputs(steppe.Task(loader), Network(nn.Linear(6, 4)))) == 1


class Twice(nn.Module):
    """Uses a layer's weight outside of the layer as well, behind a norm through which equal samples have no slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) + nn.functional.linear(x * x, self.first.weight)).relu())


def test_a_weight_used_outside_is_seen_behind_a_norm_without_running_statistics() -> None:
    learner = steppe.Learner(Twice().double(), steppe.GPM(basis_samples=10), seed=0)
    with pytest.raises(steppe.ModelError, match=r"first\.weight"):
        learner.learn(steppe.Task((X.double(), Y)), batch_size=10)


def test_icarl_refuses_a_norm_without_running_statistics() -> None:
    """Its means of classes would be normalised class by class."""
    with pytest.raises(steppe.ModelError, match=r"class means.*track_running_stats"):
        steppe.Learner(by_batch(), steppe.ICaRL(), seed=0).learn(steppe.Task((X, Y % 2), head=range(2)), batch_size=10)


def test_landscapes_leave_no_lone_sample() -> None:
    batch = Batch(torch.zeros(CHUNK + 1, 6), torch.zeros(CHUNK + 1, dtype=torch.int64), torch.zeros(CHUNK + 1))
    assert [len(part) for part in split_batch(batch, Network(by_batch()))] == [CHUNK - 1, 2]
    assert [len(part) for part in split_batch(batch, Network(nn.Linear(6, 4)))] == [CHUNK, 1]
