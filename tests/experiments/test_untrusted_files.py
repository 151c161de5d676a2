"""Files in untrusted directories: no pipe blocks a command, and no file takes long or exhausts the memory.

Their plugins and links are tested in `test_untrusted_plugins.py` and `test_untrusted_links.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import made_result, write_run
from plugin_runs import LOOK, time_limit, unfinish

from steppe.cli.main import main
from steppe.errors import UsageError
from steppe.experiments.config import RunConfig
from steppe.results.file_names import RESULT

PIPES: dict[str, list[str]] = {
    "r/config.toml": ["resume", "r"],
    "s/study.json": ["resume", "s"],
    "r/result.json": ["show", "r"],
    "r/log.jsonl": ["resume", "r", "--trust-plugins"],
    "r/report.html": ["resume", "r", "--trust-plugins"],
    "r/.lock": ["resume", "r", "--trust-plugins"],
    "s/.lock": ["resume", "s", "--trust-plugins"],
    "r/landscape.json": ["landscape", "r", "--trust-plugins", *LOOK],
    "r/checkpoints/task-001.safetensors": ["landscape", "r", "--trust-plugins", *LOOK],
    "theirs.py": ["resume", "r", "--trust-plugins"],
}


@pytest.mark.parametrize("name", PIPES)
def test_pipes_do_not_block(name: str, downloaded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "resume" in PIPES[name]:
        unfinish(downloaded)
    (downloaded / name).unlink(missing_ok=True)
    os.mkfifo(downloaded / name)
    with time_limit(20):
        assert main(PIPES[name]) in (1, 2)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log.jsonl", "landscape.json"])
def test_report_ignores_pipes(name: str, downloaded: Path) -> None:
    (downloaded / "r" / name).unlink(missing_ok=True)
    os.mkfifo(downloaded / "r" / name)
    with time_limit(20):
        assert main(["report", "r"]) == 0


HUGE: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" + b"[]," * 33_000_000 + b"0]",
    "objects": lambda: b"[" + b"{}," * 10_000_000 + b"0]",
    "texts": lambda: b"[" + b'"ab",' * 6_000_000 + b"0]",
    "depth": lambda: b"[" * 900 + b"]" * 900,
    "quotes": lambda: b'"' + b'\\"' * 1_000_000,
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_huge_result_is_rejected_at_once(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", made_result())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / RESULT).write_bytes(HUGE[kind]())
    (tmp_path / "bad" / "table.json").write_bytes(HUGE[kind]())
    started = time.process_time()
    assert main(["show", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert time.process_time() - started < 5
    assert "as a result: it " in capsys.readouterr().err or kind == "quotes"


def test_a_huge_log_is_ignored(tmp_path: Path) -> None:
    made = write_run(tmp_path / "r", made_result(), [{}])
    record = json.dumps({"event": "TaskEnded", "task": 0, "method": {"x": 0}}).encode()
    huge = record.replace(b"0}", b"[" + b"[]," * 400_000 + b"0]}")
    (made.path / "log.jsonl").write_bytes(b"\n".join([huge] * 20 + [record]))
    started = time.process_time()
    assert made.log.diagnostics == {0: {"x": 0}}
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", ["a." * 20_000 + "b = 1", "a = " + "{a=" * 15_000, "[" + "a." * 20_000 + "a]"])
def test_a_deeply_nested_configuration_is_rejected_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    started = time.process_time()
    with pytest.raises(UsageError, match="as a run configuration: it has"):
        RunConfig.load(tmp_path / "config.toml")
    assert time.process_time() - started < 1


def test_the_result_of_a_thousand_tasks_is_readable(tmp_path: Path) -> None:
    result = made_result(tasks=1000)
    result["accuracy"] = [[90.123456789012 if seen else None for seen in _seen(row)] for row in range(1000)]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")
    assert main(["report", str(tmp_path / "r"), "-o", str(tmp_path / "page.html")]) == 0


def _seen(row: int) -> list[bool]:
    return [column <= row for column in range(1000)]
