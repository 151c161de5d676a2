"""Workers that end in every way a process can end: the study continues, and the run is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steppe.experiments import executor
from steppe.experiments.executor import LocalExecutor, ParentGoneError, Payload, Send, WorkerExited

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals are those of POSIX")

STUDY = """
import json, sys, time
from pathlib import Path
from steppe.experiments.config import RunConfig
from steppe.experiments.study import Job, run_all

if __name__ == "__main__":
    plugin, out = sys.argv[1:]
    changes = ["benchmark.samples=20", "benchmark.test_samples=20", "benchmark.tasks=2"]
    jobs = [
        Job(RunConfig.make("pmnist", "dying", changes, seed=seed, plugins=[plugin]), Path(out) / str(seed))
        for seed in range(4)
    ]
    slept = []

    def watch(number, message):
        if not slept:  # meanwhile a message fills the channel, and its writer dies
            slept.append(time.sleep(3))

    outcome = run_all(jobs, 2, watch)
    told = {number: failure.reason for number, failure in outcome.failures.items()}
    print(json.dumps([sorted(outcome.results), told]))
"""


def started(work: Callable[..., None], *arguments: object) -> LocalExecutor:
    found = LocalExecutor()
    found.submit(7, work, *arguments)
    return found


def drain(running: LocalExecutor, seconds: float = 30.0) -> list[Payload | WorkerExited]:
    """All messages until the last process has exited."""
    told: list[Payload | WorkerExited] = []
    end = time.monotonic() + seconds
    while len(running):
        assert time.monotonic() < end, "it waits for ever"
        told += [message for _, message in running.poll(1.0)]
    return told


def tells(tell: Send) -> None:
    for number in range(3):
        tell({"number": number, "text": "a\nb", "nothing": None, "nan": float("inf")})
    tell({"much": "x" * 3_000_000})


def test_messages_arrive_complete_and_in_order() -> None:
    *told, ended = drain(started(tells))
    assert [message["number"] for message in told[:3]] == [0, 1, 2]  # type: ignore[index]
    assert told[0] == {"number": 0, "text": "a\nb", "nothing": None, "nan": float("inf")}
    assert told[3] == {"much": "x" * 3_000_000}
    assert ended == WorkerExited(0)


def test_polling_without_workers() -> None:
    assert LocalExecutor().poll() == []


def dies_in_a_message(tell: Send, pid: str) -> None:
    tell({"first": 1})
    Path(pid).write_text(str(os.getpid()), encoding="utf-8")
    tell({"much": "x" * 30_000_000})


def test_incomplete_message_of_a_killed_worker_is_dropped(tmp_path: Path) -> None:
    running = started(dies_in_a_message, str(tmp_path / "pid"))
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
    time.sleep(0.5)  # it waits for the parent to read
    os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), 9)
    assert drain(running) == [{"first": 1}, WorkerExited(-9)]


def leaves_its_channel_to_another(tell: Send) -> None:
    tell({"first": 1})
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), 9)


def test_a_grandchild_that_holds_the_socket_open_is_not_waited_for() -> None:
    started_at = time.monotonic()
    assert drain(started(leaves_its_channel_to_another)) == [{"first": 1}, WorkerExited(-9)]
    assert time.monotonic() - started_at < 15


def stays(tell: Send) -> None:
    tell({"done": True})
    threading.Thread(target=time.sleep, args=(60,)).start()


def test_a_worker_that_does_not_exit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_EXIT_TIMEOUT", 0.2)
    running = started(stays)
    while not running.poll():
        pass
    running.release(7)
    assert len(running) == 0
    running.release(7)  # it has exited, as intended


def talks_until_nobody_listens(tell: Send, note: str) -> None:
    try:
        while True:
            tell({"much": "x" * 1_000_000})
    except ParentGoneError:
        Path(note).write_text("gone", encoding="utf-8")


def test_cancelling_a_worker_that_blocks_on_a_full_socket(tmp_path: Path) -> None:
    running = started(talks_until_nobody_listens, str(tmp_path / "note"))
    while not running.poll():
        pass
    time.sleep(0.5)
    started_at = time.monotonic()
    running.cancel()
    assert time.monotonic() - started_at < 20
    assert len(running) == 0


def tells_then_waits(tell: Send, note: str) -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a run that keeps its state first
    tell({"first": 1})
    time.sleep(0.5)
    talks_until_nobody_listens(tell, note)


def test_sending_after_cancellation_raises(tmp_path: Path) -> None:
    running = started(tells_then_waits, str(tmp_path / "note"))
    while not running.poll():
        pass
    running.cancel()
    assert (tmp_path / "note").read_text(encoding="utf-8") == "gone"


def test_exit_reasons() -> None:
    assert WorkerExited(-9).reason == "the process was killed by SIGKILL (the system does this when memory runs out)"
    assert WorkerExited(-11).reason == "the process was killed by SIGSEGV"
    assert WorkerExited(3).reason == "the process exited with code 3"
    assert WorkerExited(-200).reason == "the process exited with code -200"


def test_a_study_survives_a_worker_killed_within_a_message(tmp_path: Path) -> None:
    """With a shared channel, a killed process would leave its lock held, or half a message to the others."""
    (tmp_path / "study.py").write_text(STUDY, encoding="utf-8")
    plugin = Path(__file__).parents[1] / "support" / "dying_plugin.py"
    command = [sys.executable, str(tmp_path / "study.py"), str(plugin), str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    finished, failed = json.loads(done.stdout)
    assert finished == [1, 2, 3]
    assert failed == {"0": WorkerExited(-9).reason}


def test_one_worker_is_stopped_and_the_others_go_on() -> None:
    executor = LocalExecutor()
    executor.submit(1, _endless)
    executor.submit(2, _endless)
    started = set()
    while started != {1, 2}:
        started |= {number for number, _ in executor.poll()}
    executor.stop(1)
    executor.stop(1)  # it has exited already
    assert len(executor) == 1
    assert {number for number, _ in executor.poll(0.5)} <= {2}
    executor.cancel()
    assert len(executor) == 0


def _endless(send: Send) -> None:
    send({"started": True})
    time.sleep(600)
