"""Work in other processes of this machine, several at a time; each tells how it goes over a channel of its own."""

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
"""One message of a process: plain values, that is what JSON can hold."""
Send = Callable[[Payload], None]
"""Sends a message to whoever submitted the work."""

_CHUNK = 2**20  # bytes read at once
_CHUNKS = 16
_PATIENCE = 10.0  # seconds for a process whose work is done to end
_SAFE_PATH = "PYTHONSAFEPATH"
_START = threading.Lock()


class ParentGoneError(Exception):
    """Whoever submitted the work is no longer there to be told, or has cancelled it."""


@dataclass(frozen=True)
class WorkerExited:
    """A process is no more, and everything that it told has been passed on."""

    exit_code: int | None

    @property
    def reason(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is not None and code < 0:
            with suppress(ValueError):
                name = signal.Signals(-code).name
                memory = ", as by the system when memory runs out" if name == "SIGKILL" else ""
                return f"its process was killed by {name}{memory}"
        return f"its process ended with exit code {code}"


@dataclass
class _Worker:
    """A process and our end of its channel; `unread` is the beginning of a message."""

    process: BaseProcess
    channel: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    is_open: bool = True
    """Whether the channel may bring more."""

    def receive(self, *, ended: bool) -> Iterator[Payload]:
        """The messages that are there, of a process that has not ended no more than a few: others want to be heard as
        well. Never waits; what a killed process left half-sent is dropped.
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
        except OSError:  # reset: its other end was closed with something unread in it
            pass
        self.is_open = False


class LocalExecutor:
    """Does work in processes of this machine, each of which may be killed at any instant without harm to others.

    Nothing is shared between processes: no lock that one could die with, no channel that it could leave half a message
    in for the others.
    """

    def __init__(self, *preload: str) -> None:
        """`preload` names modules that every process needs; where the system can, they are loaded once for all."""
        self._context = _context(preload)
        self._workers: dict[int, _Worker] = {}

    def __len__(self) -> int:
        """How many are at work."""
        return len(self._workers)

    def submit(self, number: int, work: Callable[..., None], *arguments: Any) -> None:
        """Start `work(tell, *arguments)` in a process; `number` tells it from others in what `progress` gives.

        Raises:
            OSError, EOFError: The system cannot start a process now.
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
            theirs.close()  # the process's own copy is then the last: when it ends, the channel does
        ours.setblocking(False)
        self._workers[number] = _Worker(process, ours)

    def poll(self, timeout: float | None = None) -> list[tuple[int, Payload | WorkerExited]]:
        """What the processes have told, by their numbers, in order; waits until there is something.

        A process that has ended, however that was, is told of by `Ended`, after its last message.
        """
        if not self._workers:
            return []
        places: dict[Any, int] = {}
        for number, worker in self._workers.items():
            places[worker.process.sentinel] = number
            if worker.is_open:
                places[worker.channel] = number
        found: list[tuple[int, Payload | WorkerExited]] = []
        for number in dict.fromkeys(places[ready] for ready in connection.wait(list(places), timeout)):
            worker = self._workers[number]
            ended = worker.process.exitcode is not None  # looked at first: what it sent before is there by now
            found += ((number, told) for told in worker.receive(ended=ended))
            if ended:
                found.append((number, self._reap(number)))
        return found

    def release(self, number: int) -> None:
        """Let go of a process that has told everything: it may end, and is made to if it does not."""
        if number not in self._workers:  # it has ended already
            return
        worker = self._workers[number]
        worker.process.join(_PATIENCE)
        if worker.process.exitcode is None:  # threads of a plugin's, for example
            worker.process.kill()
        self._reap(number)

    def cancel(self) -> None:
        """Ask all processes to stop, and wait until they have."""
        for worker in self._workers.values():
            worker.process.terminate()
            worker.channel.close()  # else it might wait for ever for us to read
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
    """The work, in its process. Ctrl-C is the parent's business: it ends us by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_safe_path(safe_path)

    def tell(message: Payload) -> None:
        try:
            channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ParentGoneError from error

    work(tell, *arguments)


def _context(preload: tuple[str, ...]) -> BaseContext:
    """Processes forked from a server that has the modules loaded already, where the system can; else spawned."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        return context
    return multiprocessing.get_context("spawn")


@contextmanager
def _isolated_sys_path() -> Iterator[str | None]:
    """Meanwhile Python, which multiprocessing starts by `python -c`, takes no modules from the working directory: it
    may be a stranger's, with a torch.py of its own. Gives what was set before, for the process to set again.
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
