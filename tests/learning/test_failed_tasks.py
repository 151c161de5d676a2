"""A task that fails is rolled back and can be learned again. A task that the user stops keeps what it learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import mlp
from small_tasks import SEQUENTIAL, Small, images, settings_of, task
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe import ER, GEM, DataError, DivergedError, Finetune, ICaRL, Learner, Task, UsageError
from steppe.learning import loop as training
from steppe.learning.events import EpochEnded, Event, Progress, ignore
from steppe.methods.base import MethodConfig
from steppe.methods.parts import reservoir as replay

HOW = {"batch_size": 6, "freeze_norms": True, "freeze_statistics": True}


def failing_after(batches: int, number: int) -> Task:
    """A task whose data fails: after this many batches, one has a label outside the head."""
    x, y = images(24, range(2 * number, 2 * number + 2), number)
    y[6 * batches :] = 77
    return Task(DataLoader(TensorDataset(x, y), batch_size=6), head=range(2 * number, 2 * number + 2), name="broken")


def same(one: Learner, other: Learner) -> bool:
    first, second = one.network.snapshot(), other.network.snapshot()
    return all(torch.equal(first[name], value) for name, value in second.items())


def test_divergence_found_when_saving_is_a_failure(tmp_path: Path) -> None:
    """One update makes the weights non-finite, and no loss has been computed with them yet."""
    again = Task((100 * torch.randn(12, 4), torch.arange(12) % 2), head=range(2), name="again")
    for saves in (False, True):
        learner = Learner(nn.Linear(4, 4), ICaRL(lr=3e38, clip=0.0))

        def save(event: Event, learner: Learner = learner) -> None:
            learner.save(tmp_path / "learner")

        with pytest.raises(DivergedError):
            learner.learn(again, batch_size=12, callback=save if saves else ignore)
        assert (learner.num_tasks, learner.network.heads.ranges) == (0, [])


class Freezing(nn.Module):
    """Fails in its second task, and leaves its weight or its bias frozen."""

    def __init__(self, frozen: str = "bias") -> None:
        super().__init__()
        self.layer, self.fails, self.frozen = nn.Linear(4, 4), False, frozen

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and self.training:
            self.layer.get_parameter(self.frozen).requires_grad_(False)
            raise RuntimeError("boom")
        output: Tensor = self.layer(x)
        return output


def test_model_error_is_raised_and_the_task_rolled_back() -> None:
    model = Freezing()
    learner = Learner(model, ER())
    samples = torch.randn(12, 4), torch.arange(12) % 2
    learner.learn(Task(samples, head=range(2)))
    model.fails = True
    with pytest.raises(RuntimeError, match="boom"):
        learner.learn(Task((samples[0], samples[1] + 2), head=range(2, 4)))
    assert (learner.num_tasks, learner.network.heads.ranges) == (1, [range(2)])


@pytest.mark.parametrize("why", ["frozen", "no memory"])
def test_learner_that_cannot_be_rolled_back_is_broken(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would continue with an empty or outdated memory."""
    model = Freezing("weight")  # the method has a basis for it
    learner = Learner(model, steppe.FSDGPM() if why == "frozen" else ER())
    samples = torch.randn(12, 4), torch.arange(12) % 2
    learner.learn(Task(samples))
    learner.save(tmp_path / "learner")
    model.fails = True
    if why == "no memory":

        def out_of_memory(*given: object) -> Tensor:
            raise UsageError("there is no memory")

        monkeypatch.setattr(replay, "allocate_rows", out_of_memory)
    with pytest.raises(RuntimeError, match="boom") as failure:
        learner.learn(Task(samples))
    assert "A task failed, and could not be rolled back" in failure.value.__notes__[0]
    monkeypatch.undo()
    model.fails = False
    model.layer.weight.requires_grad_(True)
    for use in (lambda: learner.learn(Task(samples)), lambda: learner.save(tmp_path / "other")):
        with pytest.raises(UsageError, match=r"could not be rolled back .*; load a saved learner, or create a new one"):
            use()
    with torch.no_grad():
        right = int((model.layer(samples[0]).argmax(1) == samples[1]).sum())
    assert learner.evaluate(Task(samples, samples)) == [pytest.approx(100 * right / 12)]
    steppe.load(tmp_path / "learner", model).learn(Task(samples))


def test_failed_validation_does_not_change_coverage(tmp_path: Path) -> None:
    """A saved file must name the weights that the current method covers."""
    learner = Learner(mlp(6), steppe.GPM(thresholds="0.9,0.9,0.9"))
    learner.validate(Task((X, Y)))
    with pytest.raises(UsageError, match="thresholds"):
        learner.validate(Task((X, Y), head=range(0, 2)))
    learner.learn(Task((X, Y)))
    learner.save(tmp_path / "learner")
    assert steppe.load(tmp_path / "learner", mlp(6)).learn(Task((X, Y))).updates == 5


def test_momentum_is_dropped_at_the_end_of_a_task() -> None:
    """It is not used again; without it, files and the snapshot before a task are smaller by one model."""
    learner = Learner(mlp(6), ER())
    learner.learn(Task((X, Y)))
    assert learner.state_dict()["method"]["descent"]["velocity"] == {}


def test_validation_alone_decides_nothing() -> None:
    """The first task that is learned decides which layers are covered, not one that was only validated."""
    for refused in (False, True):
        learner = Learner(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)), steppe.FSDGPM())
        samples = torch.randn(12, 4), torch.arange(12) % 2
        first = dict(learner.model.named_parameters())["0.weight"]
        first.requires_grad_(not refused)
        if refused:
            with pytest.raises(steppe.ModelError, match="frozen after"):
                learner.learn(Task(samples))
        else:
            learner.validate(Task(samples))
        first.requires_grad_(True)
        learnt = learner.learn(Task(samples, head=range(2)))
        assert list(learnt.diagnostics["ranks"]) == ["0.weight"]
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), steppe.FSDGPM())
    learner.validate(Task(samples))
    learner.learn(Task((samples[0].reshape(12, 2, 2), samples[1])))
    with pytest.raises(DataError, match="those of earlier tasks"):
        learner.learn(Task(samples))


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_failed_task_is_rolled_back_completely(method: str, tmp_path: Path) -> None:
    """In the first task and in a later one, with samples in the buffers.

    The weights are not rolled back, so they are restored here to compare everything else.
    """
    failed, never = (Learner(Small(6), settings_of(method, "cifar100-superclass"), seed=5) for _ in range(2))
    never.network.restore(failed.network.snapshot())
    for number in range(3):
        if number != 1:
            before = failed.network.snapshot()
            with pytest.raises(DataError, match=r"broken: .*labels 77"):
                failed.learn(failing_after(2, number), **HOW)
            assert any(not torch.equal(before[name], value) for name, value in failed.network.snapshot().items())
            failed.network.restore(before)
        assert failed.num_tasks == never.num_tasks == number == len(failed.network.heads)
        one, other = failed.learn(task(number), **HOW), never.learn(task(number), **HOW)
        assert (one.updates, one.bytes, one.diagnostics) == (other.updates, other.bytes, other.diagnostics)
        assert same(failed, never)
    assert failed.evaluate(task(0)) == never.evaluate(task(0))
    failed.save(tmp_path / "learner")
    assert steppe.load(tmp_path / "learner", Small(6)).num_tasks == 3


def test_corrected_task_may_have_other_inputs_and_head() -> None:
    """The failed attempt does not fix the inputs and the head of the first task."""
    learner = Learner(nn.Sequential(nn.Flatten(), mlp()), ICaRL())
    x, y = torch.rand(20, 8), torch.arange(20) % 2
    with pytest.raises(UsageError, match="give the tasks heads"):
        learner.learn(Task((x, y)))
    learner.learn(Task((x.reshape(20, 2, 4), y), head=range(0, 2)))
    assert learner.num_tasks == 1


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


X, Y = torch.randn(41, 6, generator=torch.Generator().manual_seed(0)), torch.arange(41) % 2
BESIDE_REPLAY = ("er", "fs-er", "der++", "sam-er", "dgpm")  # at least in their first task
ALONE = [name for name in SEQUENTIAL if name not in BESIDE_REPLAY]


@pytest.mark.parametrize("source", [(X, Y), TensorDataset(X, Y)], ids=["tensors", "dataset"])
@pytest.mark.parametrize("method", ALONE)
def test_last_batch_of_one_is_rejected_before_learning(method: str, source: Any) -> None:
    learner = Learner(normed(), settings_of(method, "cifar100-superclass"))
    before, bad = learner.network.snapshot(), Task(source, head=range(0, 2), name="odd")
    for size in (10, 1, 40):
        with pytest.raises(DataError, match=r"odd: a batch of one sample .*choose a batch_size"):
            learner.learn(bad, batch_size=size)
        assert all(torch.equal(before[name], value) for name, value in learner.network.snapshot().items())
    assert learner.learn(bad, batch_size=11).updates == 4
    assert learner.num_tasks == 1


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_single_sample_is_accepted_where_possible(method: str) -> None:
    """With replay samples in the batch, with frozen statistics, or without BatchNorm."""
    settings = settings_of(method, "cifar100-superclass")
    tasks = [Task((X, Y + 2 * number), head=range(2 * number, 2 * number + 2)) for number in range(2)]
    plain = Learner(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), settings)
    assert [plain.learn(each, batch_size=10).updates for each in tasks] == [5, 5]
    if method in ("er", "der++", "sam-er", "icarl"):  # their chunks and slices are single samples
        joined = Learner(normed(), settings)
        sizes = (11 if method == "icarl" else 10, 10)
        assert [joined.learn(each, batch_size=size).updates > 3 for each, size in zip(tasks, sizes, strict=True)]
    resting = Learner(normed(), settings)
    resting.learn(tasks[0], batch_size=11)
    assert resting.learn(tasks[1], batch_size=10, freeze_statistics=True).updates == 5


def test_failed_attempts_do_not_count_as_tasks() -> None:
    learner = Learner(normed(), GEM(memory=8, tasks=2))
    loader = DataLoader(TensorDataset(X, Y), batch_size=10)  # its last batch is known only when it comes
    for _ in range(3):
        with pytest.raises(DataError, match="batch of one sample"):
            learner.learn(Task(loader))
    assert [learner.learn(Task((X, Y)), batch_size=11).updates for _ in range(2)] == [4, 4]
    with pytest.raises(UsageError, match="divided among tasks = 2"):
        learner.learn(Task((X, Y)), batch_size=11)


def stop_with(kind: type[BaseException]) -> Callable[[Event], None]:
    def callback(event: Event) -> None:
        if isinstance(event, EpochEnded):
            raise kind("enough")

    return callback


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, DataError])
def test_task_stopped_by_the_user_is_kept(kind: type[BaseException]) -> None:
    learner = Learner(mlp(6), ER(buffer=30))
    with pytest.raises(kind, match="enough"):
        learner.learn(Task((X, Y), head=range(0, 2)), epochs=3, callback=stop_with(kind))
    assert (learner.num_tasks, learner.network.heads.ranges, learner.has_pending_task) == (1, [range(0, 2)], False)
    assert learner.learn(Task((X, Y + 2), head=range(2, 4))).updates == 5
    assert learner.network.heads.ranges == [range(0, 2), range(2, 4)]


def test_task_stopped_by_ctrl_c_is_kept() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.left = mlp(6), 3

        def forward(self, x: Tensor) -> Tensor:
            self.left -= self.training
            if self.training and self.left == 0:
                raise KeyboardInterrupt
            return self.inner(x)  # type: ignore[no-any-return]

    learner = Learner(Stopped(), ER())
    with pytest.raises(KeyboardInterrupt):
        learner.learn(Task((X, Y)))
    assert learner.num_tasks == 1
    learner.learn(Task((X, Y)))
    assert learner.num_tasks == 2


def test_failure_after_resuming_cannot_be_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the task is not known; the file can be loaded again."""
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)
    file = tmp_path / "learner"
    learner = Learner(mlp(6), ER(), seed=1)

    def save_once(event: Event) -> None:
        if isinstance(event, Progress) and not file.exists():
            learner.save(file)

    whole = learner.learn(Task((X, Y)), callback=save_once)
    loaded = steppe.load(file, mlp(6))
    with pytest.raises(DataError, match="labels"):
        loaded.learn(Task(DataLoader(TensorDataset(X, Y + 9 * (torch.arange(41) > 20)), batch_size=10)))
    assert loaded.num_tasks == 1
    with pytest.raises(UsageError, match="failed after it was resumed; load a saved learner"):
        loaded.learn(Task((X, Y)))
    loaded = steppe.load(file, mlp(6))
    assert loaded.learn(Task((X, Y))).updates == whole.updates
    assert same(loaded, learner)


@dataclass(frozen=True)
class Silent(Finetune):
    """A method that does not declare its state."""

    def start(self, *arguments: Any) -> Any:
        method = super().start(*arguments)
        method.__class__ = type("Own", (type(method),), {"state_attrs": None})
        return method


@pytest.mark.parametrize("settings", [Finetune(), Silent()])
def test_without_state_attrs_only_the_first_task_is_rolled_back(settings: MethodConfig) -> None:
    learner = Learner(mlp(6), settings)
    broken = Task(DataLoader(TensorDataset(X, Y + 9 * (torch.arange(41) > 20)), batch_size=10))
    for _ in range(2):
        with pytest.raises(DataError):
            learner.learn(broken)
    assert learner.num_tasks == 0
    learner.learn(Task((X, Y)))
    with pytest.raises(DataError):
        learner.learn(broken)
    assert learner.num_tasks == (2 if isinstance(settings, Silent) else 1)


def test_first_label_outside_the_head_is_rejected_in_every_form() -> None:
    """Labels are checked before the model runs, which would raise an index error."""
    with pytest.raises(DataError, match="bad: the training data has labels 9 to 10"):
        Learner(mlp(6), ER()).learn(Task(TensorDataset(X, Y + 9), name="bad"))
