from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path

import pytest
from report_runs import write_run

from steppe.report.finished_run import collect
from steppe.report.page import render_page
from steppe.results.schema import RunResult
from steppe.results.tables import as_json, run_report
from steppe.runtime import environment as module
from steppe.runtime.environment import NOT_RECORDED, format_machine, machine_info

MADE = {"processor": "an abacus", "cores": 1, "memory_gib": 0.5, "system": "wood"}


@pytest.fixture(autouse=True)
def uncached() -> None:
    machine_info.cache_clear()


def test_this_machine() -> None:
    found = machine_info()
    assert {"processor", "cores", "system"} <= found.keys()
    assert isinstance(found["cores"], int)
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert all(str(value) in format_machine(found) for value in found.values())


def test_no_host_or_user_names() -> None:
    told = json.dumps(machine_info())
    for name in (platform.node(), getpass.getuser(), str(Path.home())):
        assert len(name) < 5 or name not in told


@pytest.mark.parametrize(
    ("text", "processor"),
    [
        ("processor\t: 0\nmodel name\t: Some  CPU @ 2\x1b GHz\n\nprocessor\t: 1\n", "Some CPU @ 2 GHz"),
        ("processor : 0\ncpu : POWER9\n", "POWER9"),
        ("processor : 0\nBogoMIPS : 50\n", "by platform"),
        (None, "by platform"),
    ],
)
def test_processor_from_the_systems_information(
    text: str | None, processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "by platform")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert machine_info()["processor"] == processor


def test_unknown_properties_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {})
    found = machine_info()
    assert "memory_gib" not in found
    assert str(found["system"]).startswith(platform.system())
    assert format_machine({}) == format_machine(None) == NOT_RECORDED


def test_shown_with_the_versions(tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", "er", 0, machine=MADE)
    old = write_run(tmp_path / "old", "er", 1)
    words = "an abacus, 1 core, 0.5 GiB, wood"
    assert words in run_report(RunResult.from_dict(new))
    assert NOT_RECORDED in run_report(RunResult.from_dict(old))
    shown = render_page(collect([tmp_path]), "steppe report")
    assert f"<li>{words} (1 run)</li>" in shown
    assert f"<li>{NOT_RECORDED} (1 run)</li>" in shown
    assert json.loads(as_json([RunResult.from_dict(each) for each in (new, old)], "steppe study"))["machines"] == [MADE]
