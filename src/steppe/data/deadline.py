"""A time limit for connections: a socket's timeout never fires for a server that sends a byte now and then."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator


class Deadline:
    """Opens URLs, and shuts down their connections after `seconds`, as if the server had closed them."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._shut)
        self._timer.daemon = True
        self._opener = urllib.request.build_opener(*_handlers(self))

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._ends

    def open(self, request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
        """The response to a request; `timeout` is how long the server may be silent."""
        answer: http.client.HTTPResponse = self._opener.open(request, timeout=timeout)
        return answer

    def watch(self, connection: socket.socket) -> None:
        """Shut down this connection at the deadline, too."""
        with self._lock:
            self._sockets.append(connection)
        if self.is_over:
            self._shut()

    def _shut(self) -> None:
        with self._lock:
            connections, self._sockets = self._sockets, []
        for connection in connections:
            with contextlib.suppress(OSError, ValueError):  # already closed
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the time limit, which applies inside."""
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()


def _handlers(deadline: Deadline) -> list[urllib.request.BaseHandler]:
    """Handlers for urllib that register their sockets before the server has sent anything."""

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            deadline.watch(self.sock)

    class Secure(http.client.HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            deadline.watch(self.sock)

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, req)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Secure, req)

    return [PlainHandler(), SecureHandler()]
