"""Methods put together from the parts in a loop of one's own equal the learner's, on the same batches, to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import steppe


def network(*, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 16, bias=bias), nn.ReLU(), nn.Linear(16, 12, bias=bias), nn.ReLU(), nn.Linear(12, 4)]
    return nn.Sequential(*layers).double()


def tasks(count: int) -> list[steppe.Task]:
    """Each task has the same classes, seen through another permutation of the pixels."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 20, generator=generator, dtype=torch.float64)
    made = []
    for _ in range(count):
        y = torch.randint(4, (60,), generator=generator)
        x = centres[y] + 0.3 * torch.randn(60, 20, generator=generator, dtype=torch.float64)
        made.append(steppe.Task((x[:, torch.randperm(20, generator=generator)], y)))
    return made


def learned(
    model: nn.Module, method: steppe.MethodConfig, stream: list[steppe.Task], monkeypatch: pytest.MonkeyPatch
) -> tuple[steppe.Learner, list[list[tuple[Tensor, Tensor]]]]:
    """A learner after the tasks, and the batches that it made of them."""
    learner = steppe.Learner(model, method, seed=3)
    batches: list[list[tuple[Tensor, Tensor]]] = []
    running = learner.validate(stream[0])
    observe = type(running).observe

    def noting(self: steppe.Method, batch: steppe.Batch) -> Tensor:
        batches[-1].append((batch.x.clone(), batch.y.clone()))
        return observe(self, batch)

    monkeypatch.setattr(type(running), "observe", noting)
    for task in stream:
        batches.append([])
        learner.learn(task, batch_size=10)
    return learner, batches


def distance(model: nn.Module, other: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), other.parameters(), strict=True))


CASES = {
    "the paper's settings": {},
    "weak thresholds, λ that moves": {"threshold": 0.7, "importance_lr": 3.0, "temperature": 2.0},
    "spectral": {"importance": "spectral", "threshold": 0.9, "alpha": 2.0},
    "hard": {"importance": "ones", "threshold": 0.9, "ascent_steps": 1},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_fs_dgpm(settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    method = steppe.FSDGPM(**{"buffer": 40, "basis_samples": 30, "lr": 0.05, **settings})
    stream, model = tasks(4), network()
    own = copy.deepcopy(model)
    learner, batches = learned(model, method, stream, monkeypatch)

    memory = steppe.GradientProjectionMemory(
        own,
        importance=method.importance,
        importance_lr=method.importance_lr,
        temperature=method.temperature,
        alpha=method.alpha,
    )
    sgd = torch.optim.SGD(own.parameters(), lr=method.lr, momentum=method.momentum)
    optimizer = steppe.FlatSharpness(
        memory.wrap(sgd, project="gradient"),
        lr=method.ascent_lr,
        steps=method.ascent_steps,
        clamp=method.ascent_clamp,
        clip=method.clip,
    )
    buffer = steppe.ReservoirBuffer(method.buffer, seed=3)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(own(x), y)
        loss.backward()
        return loss

    moved = 0.0
    for number, task in enumerate(batches):
        sgd.state.clear()
        for x, y in task:
            both = buffer.join((x, y), len(x))
            optimizer.step(lambda both=both: backward(*both), lambda x=x, y=y: backward(x, y))
            buffer.add((x, y))
        if number == 0:
            assert distance(model, own) > 1e-3  # the learner is three tasks ahead
        moved = max([moved, *(float((1 - p.importance).abs().max()) for p in memory.projectors.values())])
        threshold = method.threshold + number * method.threshold_step
        memory.update(buffer.sample(method.basis_samples), rebuild=True, threshold=threshold)
    assert distance(model, own) < 1e-12
    assert {n: rank["rank"] for n, rank in memory.ranks().items()} == {
        n: rank["rank"]
        for n, rank in learner.validate(stream[0]).memory.ranks().items()  # type: ignore[attr-defined]
    }
    assert (moved > 1e-3) == (settings.get("importance") != "ones" and settings != {})  # the test sees λ move


@pytest.mark.parametrize(
    "method",
    [
        steppe.GPM(thresholds="0.6,0.7,0.9", threshold_step=0.02, basis_samples=100, clip=1.0, lr=0.05),
        steppe.SGP(thresholds="0.8", alpha=2.0, basis_samples=100, lr=0.05),
    ],
    ids=["gpm", "sgp"],
)
@pytest.mark.filterwarnings("ignore:the basis of")
def test_gpm_and_sgp(method: steppe.GPM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, model = tasks(4), network(bias=True)
    own = copy.deepcopy(model)
    learner, batches = learned(model, method, stream, monkeypatch)
    memory = steppe.GradientProjectionMemory(
        own,
        importance="spectral" if isinstance(method, steppe.SGP) else "ones",
        alpha=getattr(method, "alpha", 1.0),
    )
    names = ["0.weight", "2.weight", "4.weight"]
    shares = [float(share) for share in method.thresholds.split(",")]
    shares = shares if len(shares) == len(names) else shares * len(names)
    sgd = torch.optim.SGD(own.parameters(), lr=method.lr, momentum=method.momentum)
    optimizer = memory.wrap(sgd)
    for number, task in enumerate(batches):
        sgd.state.clear()
        for x, y in task:
            optimizer.zero_grad()
            cross_entropy(own(x), y).backward()
            if method.clip:
                nn.utils.clip_grad_norm_(own.parameters(), method.clip)
            optimizer.step()
        raised = {n: share + number * method.threshold_step for n, share in zip(names, shares, strict=True)}
        memory.update(task, threshold=raised, below_threshold=number == 0)
    assert distance(model, own) < 1e-12
    assert memory.ranks() == learner.validate(stream[0]).memory.ranks()  # type: ignore[attr-defined]
