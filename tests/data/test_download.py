"""Downloads from well- and ill-behaved local servers: the file that arrives is right, or there is none."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from local_server import Answer, Server, asked_from, send

from steppe.data import download as module
from steppe.data.catalogue import DATA_SETS, Archive
from steppe.data.download import download, find_mismatch
from steppe.errors import DataError

GZIP = b"\x1f\x8b"
CONTENT = GZIP + random.Random(0).randbytes(999_998)
OTHER = GZIP + random.Random(1).randbytes(999_998)
PAGE = b"<html>please log in</html>"


def without_length(content: bytes, kind: str | None = None) -> Answer:
    """Respond from the start, whatever range was requested, without a Content-Length."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if kind is not None:
            handler.send_header("Content-Type", kind)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def wrong_part(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}")
    handler.end_headers()
    handler.wfile.write(CONTENT[7:])


TEMPERS: dict[str, Answer] = {
    "/good": lambda handler: send(handler, CONTENT, asked_from(handler)),
    "/no-range": lambda handler: send(handler, CONTENT),
    "/breaks": lambda handler: send(
        handler, CONTENT, asked_from(handler), asked_from(handler) + 300_000
    ),  # each connection sends 300,000 bytes
    "/breaks-for-good": lambda handler: send(handler, CONTENT, asked_from(handler), max(400_000, asked_from(handler))),
    "/other": lambda handler: send(handler, OTHER, asked_from(handler)),
    "/short": lambda handler: send(handler, CONTENT[:-1], asked_from(handler)),
    "/without_length": without_length(CONTENT),
    "/without_length-half": without_length(CONTENT[:500_000]),
    "/without_length-other": without_length(OTHER),
    "/too-much": without_length(CONTENT + OTHER),
    "/page": without_length(PAGE, "text/html; charset=utf-8"),
    "/packed-page": without_length(GZIP + PAGE, "text/html"),
    "/notice": without_length(b"please log in", "text/plain"),
    "/no-range-breaks": lambda handler: send(handler, CONTENT, stop=300_000),
    "/wrong-part": wrong_part,
    "/missing": lambda handler: handler.send_error(404),
    "/busy": lambda handler: handler.send_error(503),
}


def archive(server: Server, *paths: str) -> Archive:
    server.answers.update(TEMPERS)
    md5, sha256 = hashlib.md5(CONTENT).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    return Archive("set.tar.gz", "set", len(CONTENT), md5, sha256, tuple(server.url(path) for path in paths))


def nothing(done: int, total: int) -> None:
    pass


def sizes_in(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


def test_normal_download(server: Server, tmp_path: Path) -> None:
    with_headers: list[tuple[int, int]] = []
    path = download(archive(server, "/good"), tmp_path / "new", lambda *pair: with_headers.append(pair))
    assert path.read_bytes() == CONTENT
    assert sizes_in(path.parent) == {"set.tar.gz.part": len(CONTENT)}
    assert with_headers[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in with_headers] == sorted(done for done, _ in with_headers)


def test_partial_file_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT[:600_000])
    assert download(archive(server, "/good"), tmp_path, nothing).read_bytes() == CONTENT
    assert server.asked == [("/good", "bytes=600000-")]


def test_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(OTHER[:600_000])
    assert download(archive(server, "/no-range"), tmp_path, nothing).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/page", "sent a web page"),
        ("/packed-page", "sent a web page"),
        ("/notice", "sent something else (it does not begin like"),
        ("/without_length-half", "started over and broke off at 500,000 of 1,000,000"),
        ("/without_length-other", "sent something else (its hash is not the publisher's)"),
        ("/too-much", "sent something else (1,"),
        ("/no-range-breaks", ""),
    ],
)
def test_failed_download_keeps_the_partial_file(path: str, reason: str, server: Server, tmp_path: Path) -> None:
    part = tmp_path / "set.tar.gz.part"
    part.write_bytes(CONTENT[:999_000])
    with pytest.raises(DataError, match=re.escape(f"{path}: {reason}")) as caught:
        download(archive(server, path), tmp_path, nothing)
    assert "The first 999,000 bytes are kept" in str(caught.value)
    assert sizes_in(tmp_path) == {"set.tar.gz.part": 999_000}
    assert part.read_bytes() == CONTENT[:999_000]
    assert download(archive(server, path, "/good"), tmp_path, nothing).read_bytes() == CONTENT
    assert server.asked[-1] == ("/good", "bytes=999000-")


def test_fresh_download_replaces_the_partial_file_once_longer(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(OTHER[:200_000])
    with pytest.raises(DataError, match="The first 500,000 bytes are kept"):
        download(archive(server, "/without_length-half"), tmp_path, nothing)
    assert (tmp_path / "set.tar.gz.part").read_bytes() == CONTENT[:500_000]
    assert download(archive(server, "/without_length"), tmp_path, nothing).read_bytes() == CONTENT
    assert list(sizes_in(tmp_path)) == ["set.tar.gz.part"]


@pytest.mark.parametrize(("fresh", "goes_on"), [(700_000, "bytes=700000-"), (500_000, "bytes=600000-")])
def test_killed_during_a_fresh_download(fresh: int, goes_on: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT[:600_000])
    (tmp_path / "set.tar.gz.fresh.part").write_bytes(CONTENT[:fresh])
    assert download(archive(server, "/good"), tmp_path, nothing).read_bytes() == CONTENT
    assert server.asked == [("/good", goes_on)]
    assert list(sizes_in(tmp_path)) == ["set.tar.gz.part"]


def test_partial_error_page_is_not_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(PAGE)
    assert download(archive(server, "/good"), tmp_path, nothing).read_bytes() == CONTENT
    assert server.asked == [("/good", None)]


def test_complete_partial_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    """Interrupted between the last byte and unpacking."""
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT)
    assert download(archive(server, "/missing"), tmp_path, nothing).read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("stale", [OTHER[:600_000], OTHER, OTHER * 2])
def test_partial_file_of_something_else_is_discarded(stale: bytes, server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(stale)
    assert download(archive(server, "/good"), tmp_path, nothing).read_bytes() == CONTENT


def test_broken_connections_are_resumed(server: Server, tmp_path: Path) -> None:
    assert download(archive(server, "/breaks"), tmp_path, nothing).read_bytes() == CONTENT
    ranges = [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert server.asked == [("/breaks", asked) for asked in ranges]


def test_next_mirror_resumes_where_the_first_failed(server: Server, tmp_path: Path) -> None:
    mirrors = archive(server, "/missing", "/breaks-for-good", "/good")
    assert download(mirrors, tmp_path, nothing).read_bytes() == CONTENT
    assert server.asked[-1] == ("/good", "bytes=400000-")


@pytest.mark.parametrize(
    ("path", "reason", "kept"),
    [
        ("/other", "sent something else (its hash is not the publisher's)", 0),
        ("/too-much", "sent something else", 0),
        ("/page", "sent a web page instead of the archive", 0),
        ("/packed-page", "sent a web page instead of the archive", 0),
        ("/notice", "sent something else (it does not begin like set.tar.gz)", 0),
        ("/short", "has a file of 999,999 bytes, expected 1,000,000", 0),
        ("/missing", "answered 404", 0),
        ("/busy", "answered 503", 0),
        ("/breaks-for-good", "broke off at 400,000 of 1,000,000 bytes", 400_000),
    ],
)
def test_failing_servers(path: str, reason: str, kept: int, server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"{server.url(path)}: {reason}")) as caught:
        download(archive(server, path), tmp_path, nothing)
    assert sizes_in(tmp_path) == ({"set.tar.gz.part": kept} if kept else {})
    assert ("are kept" in str(caught.value)) == bool(kept)


def test_wrong_range_is_rejected(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT[:600_000])
    with pytest.raises(DataError, match="the wrong part of the file"):
        download(archive(server, "/wrong-part"), tmp_path, nothing)
    assert sizes_in(tmp_path) == {"set.tar.gz.part": 600_000}


def test_every_failed_mirror_is_reported(server: Server, tmp_path: Path) -> None:
    mirrors = archive(server, "/missing", "/other")
    closed = replace(mirrors, urls=(*mirrors.urls, "http://127.0.0.1:9/closed"))
    with pytest.raises(DataError, match=r"(?s)could not be downloaded:.*404.*\n.*hash.*\n.*refused.*\nTry again later"):
        download(closed, tmp_path, nothing)
    assert sizes_in(tmp_path) == {}


def test_a_silent_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    server.answers["/silent"] = lambda handler: released.wait(5)
    monkeypatch.setattr(module, "_TIMEOUT", 0.2)
    try:
        with pytest.raises(DataError, match="timed out"):
            download(archive(server, "/silent"), tmp_path, nothing)
    finally:
        released.set()


def with_headers(*lines: str, content: bytes = CONTENT) -> Answer:
    """Respond with these header lines."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + content)

    return answer


DIGITS = "9" * 5000
NONSENSE: dict[str, Answer] = {
    "a length of thousands of digits": with_headers("HTTP/1.1 200 OK", f"Content-Length: {DIGITS}"),
    "a negative length": with_headers("HTTP/1.1 200 OK", "Content-Length: -5"),
    "a length in other digits": with_headers("HTTP/1.1 200 OK", "Content-Length: \u0661\u0662"),
    "a negative chunk": with_headers("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", content=b"-5\r\n" + OTHER),
    "a chunk of thousands of digits": with_headers(
        "HTTP/1.1 200 OK", "Transfer-Encoding: chunked", content=f"{DIGITS}\r\n".encode() + OTHER
    ),
    "a part of thousands of digits": with_headers("HTTP/1.1 206 Partial", f"Content-Range: bytes {DIGITS}-"),
    "no status": with_headers("HTTP/1.1 abc"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_server_with_invalid_headers_is_skipped(case: str, server: Server, tmp_path: Path) -> None:
    server.answers["/nonsense"] = NONSENSE[case]
    assert download(archive(server, "/nonsense", "/good"), tmp_path, nothing).read_bytes() == CONTENT
    (tmp_path / "set.tar.gz.part").unlink()
    with pytest.raises(DataError, match=r"(?s)not be downloaded:\n  http.*/nonsense: .*Try again later") as raised:
        download(archive(server, "/nonsense"), tmp_path, nothing)
    assert len(str(raised.value)) < 600


def head_without_end(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(100):
        handler.wfile.write(f"X-{number}: y\r\n".encode())
        time.sleep(0.05)


def byte_by_byte(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for place in range(100):
        handler.wfile.write(CONTENT[place : place + 1])
        time.sleep(0.05)


@pytest.mark.parametrize("slowly", [head_without_end, byte_by_byte])
def test_server_that_sends_byte_by_byte(
    slowly: Answer, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives in time, but not the whole file."""
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    monkeypatch.setattr(module, "_MIN_SPEED", 10_000_000)
    server.answers["/slow"] = lambda handler: suppressed(slowly, handler)
    started = time.monotonic()
    assert download(archive(server, "/slow", "/good"), tmp_path, nothing).read_bytes() == CONTENT
    (tmp_path / "set.tar.gz.part").unlink()
    with pytest.raises(DataError, match=r"/slow: is too slow: \d+ bytes after 1 seconds"):
        download(archive(server, "/slow"), tmp_path, nothing)
    assert time.monotonic() - started < 4


def test_time_limit_depends_on_the_size(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for place in range(0, len(CONTENT), 250_000):
            time.sleep(0.2)
            handler.wfile.write(CONTENT[place : place + 250_000])

    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    monkeypatch.setattr(module, "_MIN_SPEED", 250_000)
    server.answers["/slow"] = slowly
    assert download(archive(server, "/slow"), tmp_path, nothing).read_bytes() == CONTENT


def suppressed(answer: Answer, handler: BaseHTTPRequestHandler) -> None:
    """Respond until the client disconnects."""
    with suppress(OSError):
        answer(handler)


def test_unwritable_directory(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot write .*file.*choose another directory with --data"):
        download(archive(server, "/good"), tmp_path / "file" / "inner", nothing)


def test_interrupted_download(server: Server, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(archive(server, "/good"), tmp_path, stop)
    assert list(sizes_in(tmp_path)) == ["set.tar.gz.part"]
    assert download(archive(server, "/good"), tmp_path, nothing).read_bytes() == CONTENT


def test_differences_are_described(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    assert find_mismatch(path, archive(server, "/good")) is None
    path.write_bytes(OTHER)
    assert find_mismatch(path, archive(server, "/good")) == "its hash is not the publisher's"
    path.write_bytes(b"")
    assert find_mismatch(path, archive(server, "/good")) == "0 bytes, expected 1,000,000"


def test_the_catalogue_is_well_formed() -> None:
    for entry in DATA_SETS.values():
        for listed in [entry.archive] if entry.archive else []:
            assert re.fullmatch(r"[0-9a-f]{32}", listed.md5)
            assert re.fullmatch(r"[0-9a-f]{64}", listed.sha256)
            assert listed.name.startswith(listed.folder)
            assert len(listed.urls) >= 3
            assert all(re.fullmatch(r"https?://\S+/" + re.escape(listed.name), url) for url in listed.urls)
            assert listed.urls[0].startswith("https://")
