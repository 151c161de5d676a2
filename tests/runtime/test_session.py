"""Learners in several threads: each gets the results it would get alone, and restores the state of the process."""

from __future__ import annotations

import copy
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steppe
import steppe.methods.parts.reservoir
from steppe import ER, GPM, Learner, Task, UsageError
from steppe.learning.events import EpochEnded, Event, Progress
from steppe.methods.parts.reservoir import Reservoir
from steppe.runtime.contexts import gc_frozen, twice_differentiable
from steppe.runtime.locks import FairLock
from steppe.runtime.rng import GLOBAL_RNG_LOCK
from steppe.runtime.signals import BlockedSignals, deliver_pending_signals, signals_unblocked
from steppe.runtime.threads import SINGLE_THREAD_LIMIT, choose_num_threads, count_multiplications, set_num_threads
from steppe.tensors.batch import Batch

X = torch.rand(400, 12, generator=torch.Generator().manual_seed(0))
Y = torch.arange(400) % 3


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = torch.get_num_threads()
    yield
    signal.signal(signal.SIGINT, before)
    torch.set_num_threads(threads)


def noisy(seed: int, share: float = 0.3) -> Learner:
    torch.manual_seed(seed)
    return Learner(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(share), nn.Linear(32, 3)), ER(), seed=seed)


def plain(seed: int) -> Learner:
    torch.manual_seed(seed)
    return Learner(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)), ER(), seed=seed)


def weights(learner: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in learner.model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_in_threads(*works: Callable[[], object]) -> None:
    """Run each function in its own thread; re-raise what one raises."""
    failed: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_two_threads_get_the_same_results_as_alone() -> None:
    """The global generators of the thread that started them are restored."""
    alone = [noisy(seed) for seed in (1, 2)]
    for learner in alone:
        learner.learn(Task((X, Y)), epochs=3)
    both = [noisy(seed) for seed in (1, 2)]
    torch.manual_seed(7)
    run_in_threads(*(lambda learner=each: learner.learn(Task((X, Y)), epochs=3) for each in both))
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    for one, other in zip(alone, both, strict=True):
        assert same(weights(one), weights(other))


def test_predicting_in_another_thread_changes_nothing() -> None:
    """With a copy or with the learner itself; predictions do not wait for the end of the task."""
    alone = noisy(1)
    alone.learn(Task((X, Y)), epochs=6)
    learner = noisy(1)
    learner.validate(Task((X, Y)))
    twin = copy.deepcopy(learner)
    ended = threading.Event()
    predicted: list[int] = []

    def learn() -> None:
        learner.learn(Task((X, Y)), epochs=6)
        ended.set()

    def predict() -> None:
        while not ended.is_set():
            for each in (learner, twin):
                each.predict(X[:5])
                predicted.append(ended.is_set())

    run_in_threads(learn, predict)
    assert predicted.count(False) > 4
    assert same(weights(learner), weights(alone))


@pytest.mark.parametrize("made", [noisy, plain])
def test_the_callback_sees_the_users_generators(made: Callable[[int], Learner]) -> None:
    alone, learner = made(1), made(1)
    alone.learn(Task((X, Y)), epochs=3)
    drawn: list[float] = []
    torch.manual_seed(7)
    learner.learn(Task((X, Y)), epochs=3, callback=lambda event: drawn.append(float(torch.rand(()))))
    torch.manual_seed(7)
    assert drawn == [float(torch.rand(())) for _ in drawn]
    assert same(weights(learner), weights(alone))


@pytest.mark.usefixtures("fast_paths_on")
def test_generators_are_not_swapped_without_random_operations() -> None:
    """Other threads may draw from them at any time."""
    learner, data = plain(1), Task((X, Y), (X, Y))
    depths: list[int] = []
    learner.learn(data, callback=lambda event: depths.append(GLOBAL_RNG_LOCK.depth))
    with GLOBAL_RNG_LOCK._mutex:
        owner = GLOBAL_RNG_LOCK._owner
    assert (owner, set(depths)) == (None, {0})
    GLOBAL_RNG_LOCK.acquire()  # by this thread, while another one evaluates
    try:
        run_in_threads(lambda: learner.evaluate(data))
    finally:
        GLOBAL_RNG_LOCK.release()
    assert noisy(1)._workload.draws(None, [data])
    assert learner._workload.draws(learner._method, [Task((X, Y), augment=lambda x, generator: x)])
    assert not learner._workload.draws(learner._method, [data])


def test_a_learner_learns_one_task_at_a_time() -> None:
    learner = plain(1)

    def again(event: Event) -> None:
        learner.learn(Task((X, Y)))

    with pytest.raises(UsageError, match=r"is learning .* not from its callback or another thread"):
        learner.learn(Task((X, Y), name="digits"), callback=again)


def test_lock_is_fair_and_reentrant() -> None:
    turn, order = FairLock(), []
    turn.acquire()
    turn.acquire()

    def waits(name: int) -> Callable[[], None]:
        def work() -> None:
            turn.acquire()
            order.append(name)
            turn.release()

        return work

    threads = [threading.Thread(target=waits(name)) for name in range(3)]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        while len(turn._waiting) < number:
            time.sleep(0.001)
    turn.release()
    assert (turn.depth, turn.has_waiters, order) == (1, True, [])
    turn.release()
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2]
    assert turn.depth == 0


@pytest.mark.parametrize("shared", [gc_frozen, lambda: twice_differentiable(nn.RNN(1, 1))])
def test_process_state_is_restored_by_the_last_thread(shared: Callable[[], AbstractContextManager[None]]) -> None:
    """However the two threads overlap."""

    def found() -> tuple[object, ...]:
        cuda = torch.backends.cuda
        return (
            gc.get_freeze_count() > 0,
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            torch.backends.cudnn.enabled,
        )

    before, first, second = found(), shared(), shared()
    first.__enter__()
    changed = found()
    assert changed != before
    second.__enter__()
    first.__exit__(None, None, None)
    assert found() == changed
    second.__exit__(None, None, None)
    assert found() == before


def test_small_models_use_one_thread_and_restore_the_callers_number() -> None:
    torch.set_num_threads(2)
    learner, seen = plain(1), []

    class Spy(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(x)

    learner.model[1] = Spy()  # type: ignore[index, operator]
    learner.learn(Task((X, Y), (X, Y)), callback=lambda event: seen.append(-torch.get_num_threads()))
    learner.evaluate(Task((X, Y), (X, Y)))
    assert {number for number in seen[2:] if number > 0} <= {1, 2}
    assert seen.count(1) >= 40
    assert seen[-1] == 1
    learner.predict(X)
    assert seen[-1] == 2  # changing the number would take longer than the work
    learner.predict(torch.rand(20_000, 12))
    assert seen[-1] == 1
    assert -2 in seen
    assert -1 not in seen
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_can_be_chosen_and_are_kept(threads: int, tmp_path: Path) -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(3 - threads)
    learner = Learner(model, ER(), threads=threads)
    learner.learn(Task((X, Y)))
    assert seen[-1] == threads
    assert torch.get_num_threads() == 3 - threads
    learner.save(tmp_path / "learner")
    assert steppe.load(tmp_path / "learner", nn.Sequential(*model))._workload.chosen == threads
    assert steppe.load(tmp_path / "learner", nn.Sequential(*model), threads=5)._workload.chosen == 5


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2"])
def test_invalid_thread_numbers_are_rejected(threads: Any) -> None:
    with pytest.raises(UsageError, match="threads: expected a positive integer or None"):
        Learner(nn.Linear(2, 2), ER(), threads=threads)


def test_other_threads_keep_their_thread_number() -> None:
    """Both existing threads and those started meanwhile."""
    torch.set_num_threads(2)
    first: list[int] = []
    run_in_threads(lambda: first.append(torch.get_num_threads()))
    seen: list[int] = []

    def other() -> None:
        found = set_num_threads(1)
        run_in_threads(lambda: seen.append(torch.get_num_threads()))
        seen.append(torch.get_num_threads())
        set_num_threads(found)

    run_in_threads(other)
    assert seen == [first[0], 1]
    assert torch.get_num_threads() == 2


def test_multiplications_are_counted() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 5))
    assert count_multiplications(net, lambda: net(torch.zeros(4, 2, 4, 4)), 4) == 16 * 3 * 18 + 48 * 5
    assert count_multiplications(net, lambda: net(torch.zeros(4, 7)), 4) == sum(p.numel() for p in net.parameters())
    torch.set_num_threads(2)
    assert (choose_num_threads(SINGLE_THREAD_LIMIT, 1), choose_num_threads(SINGLE_THREAD_LIMIT, 2)) == (1, 2)
    assert not net[0]._forward_hooks


def test_signals_wait_for_a_safe_point_but_not_in_user_code() -> None:
    held = BlockedSignals()
    held.block()
    try:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            deliver_pending_signals()
        with pytest.raises(KeyboardInterrupt), signals_unblocked():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        with pytest.raises(KeyboardInterrupt):
            held.unblock()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_end_of_an_update() -> None:
    """The weights are those after that update; the user's own handler is called and restored."""
    learner, seen = noisy(1), []

    def own(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, own)
    method = learner.validate(Task((X, Y)))
    observe, after = method.observe, []

    def observed(batch: Batch) -> Tensor:
        if len(after) == 3:
            signal.raise_signal(signal.SIGINT)
        loss = observe(batch)
        after.append(weights(learner))
        return loss

    method.observe = observed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        learner.learn(Task((X, Y)))
    assert len(after) == 4
    assert same(after[-1], weights(learner))
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


def test_interrupted_end_of_a_task_is_repeated_identically() -> None:
    """Ctrl-C while the bases are extended: they are extended later, from the same samples."""
    learners = [
        Learner(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), GPM(basis_samples=20)) for _ in "ab"
    ]
    learners[1].model.load_state_dict(learners[0].model.state_dict())
    learners[0].learn(Task((X, Y)))
    method: Any = learners[1].validate(Task((X, Y)))
    end = method.end_task

    def ending() -> list[str]:
        method.end_task = end
        signal.raise_signal(signal.SIGINT)
        return list(end())

    method.end_task = ending
    with pytest.raises(KeyboardInterrupt):
        learners[1].learn(Task((X, Y)))
    assert method.tasks_done == 0
    learners[1].evaluate(Task((X, Y), (X, Y)))
    assert method.tasks_done == 1
    whole: Any = learners[0]._method
    for name, projector in whole.memory.projectors.items():
        assert torch.equal(projector.basis, method.memory.projectors[name].basis)


def test_interrupted_reservoir_stays_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never counts a missing sample or mixes up labels, wherever it is interrupted."""

    def batch(start: int) -> Batch:
        numbers = torch.arange(start, start + 4)
        return Batch(numbers.float().unsqueeze(1), numbers, numbers)

    for stop in range(1, 4):
        reservoir = Reservoir(6, random.Random(0), random.Random(0))
        reservoir.add(batch(0))
        writes = iter(range(1, 99))

        def written(
            targets: Any, where: Tensor, places: Any, rows: Any, stop: int = stop, writes: Iterator[int] = writes
        ) -> None:
            for target, row in zip(targets, rows, strict=True):
                if next(writes) == stop:
                    raise KeyboardInterrupt
                target[where] = row

        monkeypatch.setattr(steppe.methods.parts.reservoir, "_write", written)
        with pytest.raises(KeyboardInterrupt):
            reservoir.add(batch(4))
        monkeypatch.undo()
        held = reservoir.state_dict()["stored"]
        assert torch.equal(held.x.squeeze(1).long(), held.y)
        assert torch.equal(held.y, held.task)


def test_progress_and_ends_are_reported() -> None:
    seen: list[type] = []
    plain(1).learn(Task((X, Y)), epochs=2, callback=lambda event: seen.append(type(event)))
    assert [kind for kind in seen if kind is not Progress] == [EpochEnded, EpochEnded]
