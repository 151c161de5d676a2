"""A local server whose responses a test decides."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

Answer = Callable[[BaseHTTPRequestHandler], object]


class Server:
    """Responds by path, and records the path and range of each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.answers: dict[str, Answer] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers.get("Range")))
                outer.answers[self.path](self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{path}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def send(handler: BaseHTTPRequestHandler, content: bytes, start: int = 0, stop: int | None = None) -> None:
    """The content from `start`, with its full length announced but cut at `stop`."""
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(content) - start))
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.end_headers()
    handler.wfile.write(content[start:stop])


def asked_from(handler: BaseHTTPRequestHandler) -> int:
    told = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
    return int(told[1]) if told else 0


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()
