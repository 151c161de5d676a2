"""Worker processes on this machine; each one sends messages to the parent over its own socket."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

Payload = dict[str, Any]
"""One message of a worker: values that JSON can represent."""
Send = Callable[[Payload], None]
"""Sends a message to the parent."""

_CHUNK = 2**20  # bytes read at once
_CHUNKS = 16
_EXIT_TIMEOUT = 10.0  # seconds for a worker to exit after its last message
_SAFE_PATH = "PYTHONSAFEPATH"
_START = threading.Lock()


class ParentGoneError(Exception):
    """The parent is gone, or has cancelled the work."""


@dataclass(frozen=True)
class WorkerExited:
    """A worker has exited, and all its messages have been delivered."""

    exit_code: int | None

    @property
    def reason(self) -> str:
        """How it exited, in words."""
        code = self.exit_code
        if code is not None and code < 0:
            with suppress(ValueError):
                name = signal.Signals(-code).name
                memory = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
                return f"the process was killed by {name}{memory}"
        return f"the process exited with code {code}"


@dataclass
class _Worker:
    """A process, our end of its socket, and the incomplete message read so far."""

    process: BaseProcess
    channel: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    is_open: bool = True
    """Whether more may arrive."""

    def receive(self, *, ended: bool) -> Iterator[Payload]:
        """Yield the messages that have arrived, without waiting.

        From a running process only a few chunks are read, to be fair to the others. The incomplete last message of a
        killed process is dropped.
        """
        chunks = count() if ended else range(_CHUNKS)
        try:
            for _ in chunks:
                data = self.channel.recv(_CHUNK)
                if not data:
                    break
                self.unread += data
                if b"\n" in data:
                    *lines, self.unread = self.unread.split(b"\n")
                    yield from map(json.loads, lines)
            else:
                return
        except BlockingIOError:
            return
        except OSError:  # reset: the other end was closed with unread data
            pass
        self.is_open = False


class LocalExecutor:
    """Runs functions in worker processes, any of which may be killed at any time without affecting the others.

    The processes share nothing: no lock that a killed one could hold, no queue that it could leave corrupt.
    """

    def __init__(self, *preload: str) -> None:
        """Create the executor; no process is started yet.

        Args:
            preload: Modules that every worker needs; with a fork server they are imported only once.
        """
        self._context = _context(preload)
        self._workers: dict[int, _Worker] = {}

    def __len__(self) -> int:
        """Return the number of running workers."""
        return len(self._workers)

    def submit(self, number: int, work: Callable[..., None], *arguments: Any) -> None:
        """Start `work(send, *arguments)` in a new process.

        Args:
            number: Identifies the worker in the results of `poll`.
            work: A function at module level.
            arguments: Its further arguments, which must be picklable.

        Raises:
            OSError: The system cannot start a process.
            EOFError: The fork server has died.
        """
        ours, theirs = socket.socketpair()
        try:
            with _isolated_sys_path() as safe_path:
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=_worker_main, args=(theirs, safe_path, work, arguments), daemon=True
                )
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # then the worker has the only copy, and its exit closes the connection
        ours.setblocking(False)
        self._workers[number] = _Worker(process, ours)

    def poll(self, timeout: float | None = None) -> list[tuple[int, Payload | WorkerExited]]:
        """Wait for messages from the workers.

        Args:
            timeout: Seconds to wait at most; None waits until there is a message.

        Returns:
            The messages in order, each with its worker's number. The last message of every worker is followed by a
            `WorkerExited`, however it exited.
        """
        if not self._workers:
            return []
        numbers: dict[Any, int] = {}
        for number, worker in self._workers.items():
            numbers[worker.process.sentinel] = number
            if worker.is_open:
                numbers[worker.channel] = number
        messages: list[tuple[int, Payload | WorkerExited]] = []
        for number in dict.fromkeys(numbers[ready] for ready in connection.wait(list(numbers), timeout)):
            worker = self._workers[number]
            ended = worker.process.exitcode is not None  # checked before reading, so that all it sent has arrived
            messages += ((number, payload) for payload in worker.receive(ended=ended))
            if ended:
                messages.append((number, self._reap(number)))
        return messages

    def release(self, number: int) -> None:
        """Wait for a worker that has sent its last message to exit, and kill it after a timeout."""
        if number not in self._workers:  # it has exited already
            return
        worker = self._workers[number]
        worker.process.join(_EXIT_TIMEOUT)
        if worker.process.exitcode is None:  # for example, a plugin's thread is still running
            worker.process.kill()
        self._reap(number)

    def stop(self, number: int) -> None:
        """Terminate one worker and wait until it has exited; what it has sent and is not read yet is dropped."""
        if number in self._workers:
            worker = self._workers[number]
            worker.process.terminate()
            worker.channel.close()
            self._reap(number)

    def cancel(self) -> None:
        """Terminate all workers and wait until they have exited."""
        for worker in self._workers.values():
            worker.process.terminate()
            worker.channel.close()  # otherwise it could block forever on a full socket
        for number in list(self._workers):
            self._reap(number)

    def _reap(self, number: int) -> WorkerExited:
        worker = self._workers[number]
        worker.channel.close()
        worker.process.join()
        del self._workers[number]
        return WorkerExited(worker.process.exitcode)


def _worker_main(
    channel: socket.socket, safe_path: str | None, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the work in its process; Ctrl-C is left to the parent, which sends SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_safe_path(safe_path)

    def send(message: Payload) -> None:
        try:
            channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ParentGoneError from error

    work(send, *arguments)


def _context(preload: tuple[str, ...]) -> BaseContext:
    """Fork workers from a server with the modules preloaded, where supported; otherwise spawn them."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        return context
    return multiprocessing.get_context("spawn")


@contextmanager
def _isolated_sys_path() -> Iterator[str | None]:
    """Keep the working directory off the module path of processes started meanwhile.

    multiprocessing starts them with `python -c`, and an untrusted directory may contain its own torch.py.

    Yields:
        The previous value of the environment variable, for the process to restore.
    """
    with _START:
        before = os.environ.get(_SAFE_PATH)
        _set_safe_path("1")
        try:
            yield before
        finally:
            _set_safe_path(before)


def _set_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(_SAFE_PATH, None)
    else:
        os.environ[_SAFE_PATH] = value
