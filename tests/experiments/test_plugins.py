"""Users' plugins: what a result records of them, and runs whose plugin has moved."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steppe.cli.main import main
from steppe.experiments import plugins
from steppe.experiments.config import RunConfig
from steppe.experiments.plugins import load_plugins, plugin_digests
from steppe.experiments.run import run
from steppe.experiments.run_directory import read_result
from steppe.learning.events import EpochEnded, Event
from steppe.registry import METHODS

TEXT = "import steppe\nsteppe.register_method('mine', steppe.Finetune, 'mine', variant={'lr': 0.125})\n"
SHORT = ["--set", "benchmark.samples=20", "--set", "benchmark.test_samples=20", "--tasks", "2"]


@pytest.fixture(autouse=True)
def _in_an_empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_DIGESTS", {})
    yield
    forget()


def forget() -> None:
    """As in a new process."""
    METHODS.pop("mine", None)
    plugins._DIGESTS.clear()
    for name in [name for name in sys.modules if name.startswith("steppe_plugin_")]:
        del sys.modules[name]


def put(path: str, text: str = TEXT) -> str:
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return path


def digest(text: str = TEXT) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def moved(old: str, new: str) -> str:
    """Move a plugin, as seen by a new process."""
    forget()
    Path(new).parent.mkdir(exist_ok=True)
    Path(old).rename(new)
    return new


def test_results_record_digests_of_plugins() -> None:
    assert main(["run", "pmnist", "mine", "--plugin", put("mine.py"), *SHORT, "--out", "r"]) == 0
    assert read_result(Path("r")).versions["mine.py"] == digest()
    assert digest() in Path("r/report.md").read_text(encoding="utf-8")


def test_two_plugins_of_one_name_are_both_recorded() -> None:
    other = "import steppe\n"
    found = load_plugins([put("a/mine.py"), put("b/mine.py", other)])
    assert found == tuple(str(Path(place, "mine.py").resolve()) for place in "ab")
    assert plugin_digests(found) == {"mine.py": f"{digest()} and {digest(other)}"}


class BrokenError(Exception):
    """As if the process had been killed."""


def broken_off(plugin: str, out: str) -> None:
    """A run that stops in its second task, with a checkpoint."""

    def callback(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.task == 1:
            raise BrokenError

    changes = ["benchmark.samples=20", "benchmark.test_samples=20", "benchmark.tasks=2"]
    with pytest.raises(BrokenError):
        run(RunConfig.make("pmnist", "mine", changes, plugins=[plugin]), Path(out), callback)


def test_resume_after_the_plugin_moved(capsys: pytest.CaptureFixture[str]) -> None:
    put("old/mine.py")
    assert main(["run", "pmnist", "mine", "--plugin", "old/mine.py", *SHORT, "--out", "whole"]) == 0
    broken_off("old/mine.py", "r")
    new = moved("old/mine.py", "new/mine.py")
    assert main(["resume", "r"]) == 2
    assert "mine.py does not exist; if it has moved, pass its new location as --plugin FILE" in capsys.readouterr().err
    assert main(["resume", "r", "--plugin", new]) == 0
    assert read_result(Path("r")).accuracy == read_result(Path("whole")).accuracy
    assert not [remark for remark in read_result(Path("r")).remarks if "other versions" in remark]
    assert RunConfig.load(Path("r/config.toml"), [new]).plugins == (str(Path(new).resolve()),)


def test_a_changed_plugin_is_reported() -> None:
    broken_off(put("mine.py"), "r")
    forget()
    put("mine.py", TEXT + "# changed\n")
    assert main(["resume", "r", "--plugin", "mine.py"]) == 0
    result = read_result(Path("r"))
    assert result.versions["mine.py"] == digest(TEXT + "# changed\n")
    (remark,) = [remark for remark in result.remarks if "other versions" in remark]
    assert digest() in remark


def test_a_renamed_plugin_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    broken_off(put("mine.py"), "r")
    new = moved("mine.py", "renamed.py")
    assert main(["resume", "r", "--plugin", new]) == 2
    assert "mine.py does not exist" in capsys.readouterr().err
    put("mine.py")
    for words in (["resume", "r"], ["run", "--config", "r/config.toml", "--out", "again"], ["landscape", "r"]):
        assert main([*words, "--plugin", new]) == 2  # rather than continue with the old one
        assert "this needs the plugin" in capsys.readouterr().err
        assert main([*words, "--plugin", new, "--trust-plugins"]) == 2
        assert "renamed.py: expected a file named mine.py" in capsys.readouterr().err


def test_a_plugin_may_be_a_link() -> None:
    put("versions/mine_3.py")
    Path("mine.py").symlink_to("versions/mine_3.py")
    broken_off("mine.py", "r")
    assert main(["resume", "r", "--plugin", "mine.py"]) == 0


def test_different_versions_of_a_plugin_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    study = ["study", "pmnist", "mine", "--jobs", "1", *SHORT, "--out", "s", "--plugin", "mine.py"]
    put("mine.py")
    assert main([*study, "--seeds", "1"]) == 0
    assert "different versions" not in capsys.readouterr().out
    forget()
    put("mine.py", TEXT + "# changed\n")
    assert main([*study, "--seeds", "2", "--resume"]) == 0
    assert "The runs of mine used different versions of mine.py." in capsys.readouterr().out
    first = Path("s/mine/seed-0/result.json")  # as in a version that did not name plugins
    first.write_text(first.read_text(encoding="utf-8").replace('"mine.py": ', '"unnamed": '), encoding="utf-8")
    assert main(["show", "s"]) == 0
    assert "The runs of mine used different versions of mine.py." in capsys.readouterr().out


def test_a_custom_method_can_be_added_to_a_study() -> None:
    """Existing runs, finished or not, keep the plugins they were started with; new ones name all that are given."""
    options = ["--seeds", "1", "--jobs", "1", *SHORT, "--out", "s", "--resume"]
    assert main(["study", "pmnist", "finetune", "er", *options]) == 0
    kept = Path("s/finetune/seed-0/result.json").read_bytes()
    Path("s/er/seed-0/result.json").unlink()
    options += ["--plugin", put("mine.py")]
    assert main(["study", "pmnist", "finetune", "er", "mine", "gpm", *options]) == 0
    assert Path("s/finetune/seed-0/result.json").read_bytes() == kept
    named = {name: read_result(Path(f"s/{name}/seed-0")).versions.get("mine.py") for name in ("er", "mine", "gpm")}
    assert named == {"er": None, "mine": digest(), "gpm": digest()}
    assert "--plugin mine.py" in json.loads(Path("s/table.json").read_text(encoding="utf-8"))["command"]
    forget()
    Path("s/mine/seed-0/result.json").unlink()
    new = moved("mine.py", "elsewhere/mine.py")
    assert main(["resume", "s", "--plugin", new]) == 0
    assert read_result(Path("s/mine/seed-0")).versions["mine.py"] == digest()


def test_a_run_keeps_the_plugins_it_was_started_with() -> None:
    options = ["--seeds", "1", "--jobs", "1", *SHORT, "--out", "s", "--resume", "--plugin", put("mine.py")]
    assert main(["study", "pmnist", "mine", *options]) == 0
    second = put("second.py", TEXT.replace("'mine'", "'another'", 1))
    try:
        assert main(["study", "pmnist", "mine", "another", *options, "--plugin", second]) == 0
        assert list(read_result(Path("s/another/seed-0")).config["run"]["plugins"]) == [
            str(Path(name).resolve()) for name in ("mine.py", "second.py")
        ]
        assert main(["resume", "s", "--plugin", "mine.py", "--plugin", second]) == 0
    finally:
        METHODS.pop("another", None)


def test_a_study_is_not_resumed_without_its_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["study", "pmnist", "finetune", "--seeds", "1", "--jobs", "1", *SHORT, "--out", "s", "--resume"]
    assert main([*options, "--plugin", put("mine.py")]) == 0
    assert main(options) == 2
    assert "different settings" in capsys.readouterr().err


@pytest.mark.parametrize("named", [3, "mine.py", [3]])
def test_invalid_plugin_lists_are_different_settings(named: object, capsys: pytest.CaptureFixture[str]) -> None:
    study = ["study", "pmnist", "finetune", "--seeds", "1", "--jobs", "1", *SHORT, "--out", "s"]
    assert main(study) == 0
    file = Path("s/finetune/seed-0/result.json")
    result = json.loads(file.read_text(encoding="utf-8"))
    result["config"]["run"]["plugins"] = named
    file.write_text(json.dumps(result), encoding="utf-8")
    assert main([*study, "--resume"]) == 2
    assert "different settings" in capsys.readouterr().err


def test_resume_a_study_after_its_plugin_moved() -> None:
    """Finished runs stay, missing ones run in other processes, and study.json records the new path."""
    study = ["study", "pmnist", "mine", "finetune", "--seeds", "1", "--jobs", "1", *SHORT, "--out", "s"]
    assert main([*study, "--plugin", put("mine.py")]) == 0
    kept = Path("s/mine/seed-0/result.json").read_bytes()
    Path("s/finetune/seed-0/result.json").unlink()
    new = moved("mine.py", "elsewhere/mine.py")
    assert main(["resume", "s", "--plugin", new]) == 0
    assert Path("s/mine/seed-0/result.json").read_bytes() == kept
    plan = json.loads(Path("s/study.json").read_text(encoding="utf-8"))
    assert [entry["config"]["run"]["plugins"] for entry in plan["runs"]] == [[str(Path(new).resolve())]] * 2
    forget()
    assert main(["resume", "s", "--trust-plugins"]) == 0
    forget()
    assert main([*study, "--plugin", put("third/mine.py"), "--resume"]) == 0


def test_config_and_landscape_after_the_plugin_moved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "pmnist", "mine", "--plugin", put("mine.py"), *SHORT, "--out", "r"]) == 0
    new = moved("mine.py", "elsewhere/mine.py")
    assert main(["run", "--config", "r/config.toml", "--plugin", new, "--out", "again"]) == 0
    assert read_result(Path("again")).accuracy == read_result(Path("r")).accuracy
    forget()
    small = ["--samples", "10", "--directions", "1", "--points", "11", "--after", "2", "--task", "1"]
    assert main(["landscape", "r", *small]) == 2
    assert "mine.py does not exist" in capsys.readouterr().err
    assert main(["run", "pmnist", "finetune", *SHORT, "--out", "plain"]) == 0
    assert main(["landscape", "plain", "r", *small, "--plugin", new]) == 0  # naming one of them is enough
    assert main(["report", "r", "-o", "page.html"]) == 0
