"""Models whose BatchNorm has no running statistics: their output for a sample depends on the rest of the batch."""

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


def without_running_statistics() -> nn.Sequential:
    """It normalizes by the batch's own statistics in eval mode too, which fails for a single sample."""
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 4))


@pytest.mark.parametrize("method", [steppe.GPM(basis_samples=65), steppe.FSDGPM(buffer=65), steppe.ER(buffer=20)])
@pytest.mark.parametrize("count", [40, 513])
def test_single_samples_are_avoided(method: steppe.MethodConfig, count: int) -> None:
    """Neither in checks, nor at the end of test or validation data or of the samples for a basis."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(count) % 2
    learner = steppe.Learner(without_running_statistics(), method, seed=0)
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


def test_task_of_one_sample() -> None:
    """Batches are normalized by their own statistics."""
    network = Network(without_running_statistics())
    assert min_eval_batch(network.model) == 2
    assert len(probe_inputs(steppe.Task((X[:1], Y[:1])), network)) == 2
    assert torch.equal(probe_inputs(steppe.Task((X, Y)), network), X[:2])
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    assert torch.equal(probe_inputs(steppe.Task(loader), network), X[:2])
    assert len(probe_inputs(steppe.Task(loader), Network(nn.Linear(6, 4)))) == 1


class Twice(nn.Module):
    """Also uses a layer's weight outside the layer, behind a norm whose gradient is zero for equal samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) + nn.functional.linear(x * x, self.first.weight)).relu())


def test_weight_used_outside_its_layer_is_detected_behind_a_norm() -> None:
    learner = steppe.Learner(Twice().double(), steppe.GPM(basis_samples=10), seed=0)
    with pytest.raises(steppe.ModelError, match=r"first\.weight"):
        learner.learn(steppe.Task((X.double(), Y)), batch_size=10)


def test_icarl_rejects_norms_without_running_statistics() -> None:
    """Its class means would be normalized class by class."""
    with pytest.raises(steppe.ModelError, match=r"class means.*track_running_stats"):
        steppe.Learner(without_running_statistics(), steppe.ICaRL(), seed=0).learn(
            steppe.Task((X, Y % 2), head=range(2)), batch_size=10
        )


def test_landscapes_avoid_single_samples() -> None:
    batch = Batch(torch.zeros(CHUNK + 1, 6), torch.zeros(CHUNK + 1, dtype=torch.int64), torch.zeros(CHUNK + 1))
    assert [len(part) for part in split_batch(batch, Network(without_running_statistics()))] == [CHUNK - 1, 2]
    assert [len(part) for part in split_batch(batch, Network(nn.Linear(6, 4)))] == [CHUNK, 1]
