"""Learning from a stream without declared tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_states import same_state, timeless
from own_models import mlp
from small_tasks import SEQUENTIAL, Small, images, settings_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe import ER, FSDGPM, GPM, DataError, DivergedError, Finetune, Learner, MemoryUpdated, Task, UsageError
from steppe.learning.events import Event, Progress
from steppe.registry import METHODS

NEED_TASKS = ("gem", "a-gem", "icarl", "multitask", "oracle")
STREAMING = [name for name in METHODS if name not in NEED_TASKS]


def learner_of(method: str, **more: Any) -> Learner:
    torch.manual_seed(0)
    return Learner(Small(2), settings_of(method, "cifar100-superclass"), head="head", grow=True, seed=3, **more)


def seeded(inputs: int) -> nn.Module:
    torch.manual_seed(1)
    return mlp(inputs)


def batches(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """A stream in which new classes come up: two more every four batches."""
    found = [images(size, range(2 + 2 * (number // 4)), number) for number in range(count)]
    for number, (_, y) in enumerate(found):
        y[0] = 1 + 2 * (number // 4)
    return found


@pytest.mark.parametrize("method", STREAMING)
def test_a_stream_is_learnt_and_resumed_to_the_same_bits(method: str, tmp_path: Path) -> None:
    """Saved after every batch: within a segment, at its end, before and after classes that are new."""
    learner, resumed = learner_of(method), learner_of(method)
    events: list[Event] = []
    for number, batch in enumerate(batches(10)):
        losses = [
            learner.observe(batch, update_every=20, callback=events.append),
            resumed.observe(batch, update_every=20),
        ]
        assert torch.equal(*losses)
        assert same_state(timeless(resumed), timeless(learner))
        assert learner.model.head.out_features == 2 + 2 * (number // 4)  # type: ignore[union-attr]
        assert learner.predict(batch[0]).shape == (6,)
        resumed.save(tmp_path / "learner")
        resumed = steppe.load(tmp_path / "learner", Small(2))
    assert [(type(event), event.segment, event.samples) for event in events if isinstance(event, MemoryUpdated)] == [
        (MemoryUpdated, 0, 24),
        (MemoryUpdated, 1, 24),
    ]
    assert learner.num_tasks == 3
    resumed.update_memory()
    learner.update_memory()
    assert same_state(timeless(resumed), timeless(learner))
    assert learner.update_memory() == []


@pytest.mark.parametrize("method", STREAMING)
def test_a_stream_of_one_segment_equals_a_task(method: str) -> None:
    """The same batches as one epoch of a task, in the same order."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    settings = settings_of(method, "cifar100-superclass")
    streamed, whole = (Learner(seeded(6), settings, seed=2) for _ in range(2))
    whole.network.restore(streamed.network.snapshot())
    whole.learn(Task(DataLoader(TensorDataset(x, y), batch_size=6)))
    for start in range(0, 24, 6):
        streamed.observe((x[start : start + 6], y[start : start + 6]), update_every=24)
    one, other = timeless(streamed), timeless(whole)
    for state in (one, other):
        del state["streams"]["generators"], state["streams"]["ambient"]  # of the loader's order, which draws nothing
    assert same_state(one, other)


@pytest.mark.parametrize("method", NEED_TASKS)
def test_methods_that_need_tasks_say_so_before_anything_is_done(method: str) -> None:
    learner = learner_of(method)
    before = timeless(learner)
    with pytest.raises(UsageError, match=r"needs declared tasks, so it cannot learn from a stream; use learn\(\)"):
        learner.observe(images(6, range(8), 0))
    assert same_state(timeless(learner), before)


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_the_list_of_methods_that_need_tasks_is_complete(method: str) -> None:
    assert METHODS[method].settings.needs_tasks == (method in NEED_TASKS)  # type: ignore[attr-defined]


def test_the_memory_grows_with_the_stream() -> None:
    """Bases are updated while the stream goes on, and protect what came before."""
    learner = Learner(seeded(6), GPM(thresholds="0.9"))
    generator = torch.Generator().manual_seed(0)
    ranks = []

    def note(event: Event) -> None:
        assert isinstance(event, MemoryUpdated)
        ranks.append(event.diagnostics["ranks"])

    for _ in range(8):
        x = torch.randn(10, 6, generator=generator)
        learner.observe((x, torch.arange(10) % 3), update_every=40, callback=note)
    assert len(ranks) == 2
    assert all(ranks[0][name]["rank"] <= ranks[1][name]["rank"] for name in ranks[0])


def test_what_is_protected_moves_by_rounding_only() -> None:
    """With λ = 1 and every direction of the first segment in the bases, its outputs stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    learner = Learner(model, FSDGPM(importance="ones", threshold=1.0, threshold_step=0.0, lr=0.1, buffer=50))
    first = torch.randn(20, 12, dtype=torch.float64) * (torch.arange(12) < 4)
    learner.observe((first, torch.arange(20) % 3), update_every=20)
    before = model(first).detach()
    changed = model[0].weight.detach().clone()
    for _ in range(5):
        learner.observe((torch.randn(10, 12, dtype=torch.float64), torch.arange(10) % 3), update_every=1000)
    assert not torch.equal(changed, model[0].weight)
    assert float((model(first) - before).detach().abs().max()) < 1e-10


def test_learning_a_task_ends_the_segment(tmp_path: Path) -> None:
    learner = Learner(mlp(6), FSDGPM(threshold=0.9))
    x, y = torch.randn(20, 6), torch.arange(20) % 3
    learner.observe((x, y))
    assert learner.state_dict()["method"]["memory"] == {}
    learner.learn(Task((x, y)))
    assert learner.num_tasks == 2
    assert learner.state_dict()["method"]["tasks_done"] == 2
    learner.observe((x, y), update_every=10)
    assert learner.state_dict()["method"]["tasks_done"] == 3


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    learner = Learner(mlp(6), ER())
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    for _ in range(2):  # before the first segment, and within one
        before = timeless(learner)
        for bad, words in (
            ((x, y + 9), "outside the head"),
            ((x[:, :2], y), "the stream: "),
            ((x[:4], y), "shape"),
            ((x, y.float()), "integer class numbers"),
            ((x * torch.nan, y), "NaN or infinity"),
            ((x[:0], y[:0]), "is empty"),
            (TensorDataset(x, y), r"expected a batch \(inputs, labels\)"),
        ):
            with pytest.raises(DataError, match=words):
                learner.observe(bad)  # type: ignore[arg-type]
        for wrong in ({"update_every": 0}, {"updates": 1.5}, {"update_every": True}):
            with pytest.raises(UsageError, match="whole number of at least 1"):
                learner.observe((x, y), **wrong)  # type: ignore[arg-type]
        after = timeless(learner)
        for state in (before, after):
            del state["outputs"], state["inputs"], state["method"], state["covered"]
        assert same_state(before, after)
        learner.observe((x, y))


def test_a_task_that_was_interrupted_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.learning.loop._REPORT_EVERY", 0.0)
    learner, file = Learner(mlp(6), ER()), tmp_path / "learner"
    x, y = torch.randn(20, 6), torch.arange(20) % 3

    def callback(event: Event) -> None:
        if isinstance(event, Progress):
            learner.save(file)
            with pytest.raises(UsageError, match="is learning a task"):
                learner.observe((x, y))

    learner.learn(Task((x, y), name="mine"), callback=callback)
    loaded = steppe.load(file, mlp(6))
    with pytest.raises(UsageError, match="middle of 'mine'; resume that first"):
        loaded.observe((x, y))
    loaded.learn(Task((x, y), name="mine"))
    loaded.observe((x, y))


def test_a_stream_that_diverges_says_so() -> None:
    learner = Learner(mlp(6), Finetune(lr=1e30, clip=0.0))
    x, y = torch.randn(20, 6), torch.arange(20) % 3

    def go_on() -> None:
        for _ in range(20):
            learner.observe((x, y), update_every=100)

    with pytest.raises(DivergedError):
        go_on()


def test_a_memory_update_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, never = (Learner(seeded(6), FSDGPM(threshold=0.9)) for _ in range(2))
    x, y = torch.randn(20, 6), torch.arange(20) % 3
    method = type(learner.validate(Task((x, y))))
    with monkeypatch.context() as patched:

        def end_task(self: object) -> list[str]:
            raise KeyboardInterrupt

        patched.setattr(method, "end_task", end_task)
        with pytest.raises(KeyboardInterrupt):
            learner.observe((x, y), update_every=20)
    never.observe((x, y), update_every=20)
    for each in (learner, never):
        each.observe((x, y), update_every=20)
    assert same_state(timeless(learner), timeless(never))


def test_a_file_with_a_wrong_stream_is_refused() -> None:
    learner = Learner(mlp(6), ER())
    learner.observe((torch.randn(20, 6), torch.arange(20) % 3))
    state = learner.state_dict()
    for wrong in (-1, "many", True):
        with pytest.raises(ValueError, match="invalid number of samples"):
            Learner(mlp(6), ER()).load_state_dict({**state, "stream": wrong})


def test_a_stream_with_a_loss_of_its_own() -> None:
    """One that ignores samples whose class is unknown."""
    learner = Learner(nn.Linear(6, 2), ER(lr=0.1), loss=nn.CrossEntropyLoss(ignore_index=-100))
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        x = torch.randn(20, 6, generator=generator)
        y = (x[:, 0] > 0).long()
        y[:5] = -100
        loss = learner.observe((x, y), update_every=500)
    assert loss < 0.2
