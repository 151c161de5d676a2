"""Text from outside, shown on a terminal that would interpret some of its characters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from steppe.cli.progress import BarDisplay, LineDisplay
from steppe.experiments.study import Failed
from steppe.learning.events import RunStarted
from steppe.runtime.terminal import escape_controls, say

CLEARS = "\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größer als λ\n\tzwei", "größer als λ\n\tzwei"),
        (CLEARS, "\\x1b[2J"),
        ("a\rb\x07", "a\\rb\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("\udcff", "\\udcff"),
        ("file\u202egnp.exe", "file\\u202egnp.exe"),
        ("one\u2028two", "one\\u2028two"),
        ("👩‍🔬", "👩‍🔬"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


def test_values_are_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say(CLEARS, 5, end="!")
    assert capsys.readouterr().out == "\\x1b[2J 5!"


def test_progress_lines_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    display = LineDisplay([f"er {CLEARS}"])
    display(0, RunStarted(1, 1, [f"remark {CLEARS}"]))
    display(0, Failed(f"reason {CLEARS}", ""))
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert told.count("\\x1b[2J") == 4


def test_progress_bars_are_escaped() -> None:
    stream = io.StringIO()
    display = BarDisplay([f"er {CLEARS}"], Console(file=stream, width=200))
    display(0, RunStarted(1, 1, [f"remark {CLEARS}"]))
    display(0, Failed(f"reason {CLEARS}", ""))
    with display:
        pass
    assert CLEARS not in stream.getvalue()
    assert "remark \\x1b[2J" in stream.getvalue()
    assert display._bars.tasks[0].description == "failed: reason \\x1b[2J"
