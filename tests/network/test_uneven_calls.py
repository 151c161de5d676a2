"""Models that call a layer on some of the samples, on none, or on one at a time without a batch dimension."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from steppe import FSDGPM, GPM, SGP, Learner, Task
from steppe.methods.base import MethodConfig
from steppe.methods.parts.task_gradients import PastTasks
from steppe.network.network import Network
from steppe.tensors.batch import Batch


class Experts(nn.Module):
    """Routes each sample to one of two layers by its first feature, so that one of them may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        to_b = x[:, 0] > 0.5
        hidden = x.new_zeros(len(x), 8)
        hidden[~to_b], hidden[to_b] = self.a(x[~to_b]), self.b(x[to_b])
        output: Tensor = self.head(hidden.relu())
        return output


class ConvolutionExperts(nn.Module):
    """The same with convolutions, one of which uses the fast path for patches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Linear(27, 4)

    def forward(self, x: Tensor) -> Tensor:
        to_b = x[:, 0, 0, 0] > 0.5
        hidden = x.new_zeros(len(x), 3, 3, 3)
        hidden[~to_b], hidden[to_b] = self.a(x[~to_b]), self.b(x[to_b])
        output: Tensor = self.head(hidden.relu().flatten(1))
        return output


METHODS: dict[str, MethodConfig] = {
    "fs-dgpm": FSDGPM(buffer=20, basis_samples=20),
    "fs-dgpm precise": FSDGPM(buffer=20, basis_samples=20, threshold=1.0),
    "fs-dgpm second order": FSDGPM(buffer=20, basis_samples=20, second_order=True),
    "gpm": GPM(basis_samples=20),
    "sgp": SGP(basis_samples=20),
}
MODELS = {"linear": (Experts, (6,)), "convolutions": (ConvolutionExperts, (1, 5, 5))}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch_size", [2, 20])
def test_layers_without_samples(model: str, method: str, batch_size: int) -> None:
    """In the first and third task all samples go to the same layer, in the second they alternate.

    A layer without samples gets no basis, and keeps an existing one.
    """
    torch.manual_seed(0)
    build, shape = MODELS[model]
    learner = Learner(build(), METHODS[method])
    x, y = torch.rand(20, *shape), torch.arange(20) % 4
    own = learner.network.trainable["b.weight"]
    for to_b in (0, 1, 0):
        x.view(20, -1)[:, 0] = torch.arange(20) % 2 * to_b
        before = own.detach().clone()
        ranks = learner.learn(Task((x.clone(), y)), batch_size=batch_size).diagnostics["ranks"]
        assert set(ranks) == {"a.weight", "head.weight"} | ({"b.weight"} if to_b or learner.num_tasks > 1 else set())
        assert to_b or "dgpm" in method or torch.equal(own, before)  # it replays samples of the second task
    assert all(bool(p.isfinite().all()) for p in learner.network.trainable.values())


class Gated(Experts):
    """Learns the routing: at first, all samples go to the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([9.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(1)
        to_b = share[:, 1] > share[:, 0]
        hidden = x.new_zeros(len(x), 8)
        hidden[~to_b], hidden[to_b] = self.a(x[~to_b]) * share[~to_b, :1], self.b(x[to_b]) * share[to_b, 1:]
        output: Tensor = self.head(hidden.relu())
        return output


def test_samples_that_change_their_layer() -> None:
    """Past tasks' gradients are then computed one by one, as rows of a layer's input cannot be assigned to samples."""
    torch.manual_seed(0)
    model = Gated()
    network = Network(model)
    network.heads.add(None, 4)
    y = torch.arange(5) % 4
    samples = [Batch(torch.randn(5, 6), y, torch.zeros_like(y)) for _ in range(2)]
    past = PastTasks(network, samples)
    model.gate.bias.data.zero_()
    found = past.gradients(0.0).combined(torch.eye(2)[1])
    for name, g in network.loss_and_grad(samples[1])[1].items():
        torch.testing.assert_close(found[name], g)


class OneByOne(nn.Module):
    """A convolution called on one sample at a time, without a batch dimension, or on all at once."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.convolution, self.head = nn.Conv2d(2, 4, 3), nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.stack([self.convolution(each) for each in x]) if self.one_by_one else self.convolution(x)
        output: Tensor = self.head(hidden.relu().flatten(1))
        return output


@pytest.mark.parametrize("method", METHODS)
def test_calls_without_a_batch_dimension(method: str) -> None:
    """The bases, and so the weights after two tasks, equal those with the batch dimension."""
    x, y = torch.rand(2, 20, 2, 5, 5, dtype=torch.float64), torch.arange(20) % 4
    found = []
    for one_by_one in (True, False):
        torch.manual_seed(0)
        learner = Learner(OneByOne(one_by_one).double(), METHODS[method])
        ranks = [learner.learn(Task((part, y))).diagnostics["ranks"] for part in x]
        found.append((ranks, list(learner.network.trainable.values())))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-8)
