"""`steppe landscape`: edge cases, the commands recorded in its file, advice that works as printed, NaN and infinity."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steppe.cli.main import main
from steppe.errors import DivergedError, UsageError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import lock_directory
from steppe.landscape.bound import NoisyLoss
from steppe.landscape.files import Landscape, Pair, read_landscape
from steppe.landscape.flatness import Estimate, Flatness
from steppe.landscape.settings import LandscapeSettings

FEW = ["--samples", "5", "--directions", "2", "--points", "3", "--radius", "1"]
WRITTEN = "steppe landscape RUN --samples 5 --directions 2 --points 3 --radius 1.0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "one"
    run(RunConfig.make("split-mnist", "er", ["tasks=3", "samples=20"]), out)
    return out


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change, with a name that a shell would split."""
    shutil.copytree(finished, tmp_path / "a study" / "er")
    return tmp_path / "a study" / "er"


def command(path: Path) -> str:
    return read_landscape(path).command


def test_the_file_records_its_command(own: Path) -> None:
    first, later = f"{WRITTEN} --after 1", f"{WRITTEN} --after 3 --hessian --resume"
    for arguments, expected in (
        (["--after", "1"], first),
        (["--resume", "--after", "1"], first),  # nothing new
        (["--resume", "--after", "3", "--hessian"], f"{first} && {later}"),
        (["--resume", "--after", "3"], f"{first} && {later}"),  # everything is measured already
        (["--resume", "--after", "3", "--hessian"], f"{first} && {later}"),
        (["--resume", "--after", "1", "--surface"], f"{first} && {later} && {first} --surface --resume"),
    ):
        assert main(["landscape", str(own), *FEW, *arguments]) == 0
        assert command(own) == expected


def test_recorded_commands_reproduce_the_file(own: Path, tmp_path: Path) -> None:
    for arguments in (["--after", "1"], ["--resume", "--after", "3", "--hessian"], ["--resume", "--task", "2"]):
        assert main(["landscape", str(own), *FEW, *arguments]) == 0
    whole = read_landscape(own).as_dict()
    again = tmp_path / "again"
    shutil.copytree(own, again, ignore=shutil.ignore_patterns("landscape.json"))
    for line in command(own).split(" && "):
        assert main([str(again) if word == "RUN" else word for word in shlex.split(line)[1:]]) == 0
    assert read_landscape(again).as_dict() == whole


def test_only_one_process_measures_a_run(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two would lose each other's work, also when resuming; finished runs of a study in progress can be measured."""
    other = own.with_name("other")
    shutil.copytree(own, other)
    with lock_directory(own):
        for option in ([], ["--resume"], ["-o", str(own.with_name("o.json"))]):
            assert main(["landscape", str(own), *FEW, *option]) == 2
            assert capsys.readouterr().err == f"steppe: another process is using {own}; wait for it.\n"
    assert {file.name for file in own.parent.rglob("*.json")} == {"result.json"}
    with lock_directory(own.parent):
        assert main(["landscape", str(own.parent), *FEW]) == 0
    assert (own / "landscape.json").exists()
    assert (other / "landscape.json").exists()


def test_a_run_is_locked_while_it_is_measured(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refused = Landscape.write, []

    def written(landscape: Landscape, path: Path) -> None:
        with pytest.raises(UsageError, match="another process is using"), lock_directory(own):
            pass
        refused.append(path)
        write(landscape, path)

    monkeypatch.setattr(Landscape, "write", written)
    assert main(["landscape", str(own), *FEW]) == 0
    assert refused
    with lock_directory(own):
        pass


def test_read_only_run_is_measured_to_another_file(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / ".lock").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["landscape", str(own), *FEW, "-o", str(tmp_path / "o.json")]) == 0
    assert not (own / ".lock").exists()


def test_each_command_that_measures_is_recorded(own: Path) -> None:
    assert main(["landscape", str(own), *FEW]) == 0
    file = own / "checkpoints" / "task-002.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    assert main(["landscape", str(own), *FEW, "--resume", "--after", "2"]) == 0
    assert command(own) == f"{WRITTEN} && {WRITTEN} --after 2 --resume"


@pytest.mark.parametrize("figure", ["landscapes", "surface"])
@pytest.mark.parametrize("measured", [["--samples", "5"], ["--seed", "1", "--directions", "1"], None])
def test_command_suggested_by_a_figure_works(
    figure: str, measured: list[str] | None, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    few = ["--points", "3", "--radius", "1"]
    if measured is not None:
        assert main(["landscape", str(own), *few, *measured, "--after", "1"]) == 0
    draw = ["figures", figure, str(own), "-o", str(tmp_path / "a.png")]
    assert main(draw) == 2
    asked = capsys.readouterr().err.rstrip(".\n").partition("run steppe ")[2]
    if "--directions 2" in asked:  # a surface cannot be added to a file with one direction
        (own / "landscape.json").unlink()
    assert main(shlex.split(asked)) == 0
    assert main(draw) == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--sigma", "1e-156"], 2, "sigma = 1e-156 is out of range; it must be at least 1e-30"),
        (["--sigma", "1e-170"], 2, "sigma = 1e-170 is out of range"),
        (["--range", "1e-200", "--radius", "1e-200"], 2, "range = 1e-200 is out of range"),
        (["--range", "1e30", "--radius", "1e30"], 1, "pass a smaller --range"),
        (["--range", "1e300", "--radius", "1e300"], 2, "range = 1e+300 is out of range"),
        (["--sigma", "1e25"], 1, "not finite with noise of sigma = 1e+25; pass a smaller --sigma"),
        (["--sigma", "1e200"], 2, "sigma = 1e+200 is out of range"),
    ],
)
def test_settings_with_non_finite_losses_are_named(
    options: list[str], code: int, message: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["landscape", str(own), *FEW, *options]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    errors = [line for line in captured.err.splitlines() if not line.endswith((" % of 18", " % of 36"))]  # progress
    assert len(errors) == 1
    assert not (own / "landscape.json").exists()


@pytest.mark.parametrize(
    "options", [["--sigma", "1e-30"], ["--range", "1e-30", "--radius", "1e-30"], ["--delta", "1e-320"]]
)
def test_smallest_accepted_settings_can_be_read_again(options: list[str], own: Path) -> None:
    assert main(["landscape", str(own), *FEW, *options]) == 0
    assert sorted(read_landscape(own).bounds) == [2, 3]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_unreadable_file_is_not_written(value: float, tmp_path: Path) -> None:
    still, spoilt = Estimate(0.0, None, None), Estimate(value, None, None)
    pair = Pair([[0.0] * 3], Flatness(0.0, still, still, spoilt), NoisyLoss(0.0, 0.0, still, still))
    run = {"benchmark": "pmnist", "method": "er", "seed": 0, "config": ""}
    found = Landscape(run, LandscapeSettings(directions=1, points=3, radius=1.0), "", {}, pairs={(1, 1): pair})
    with pytest.raises(DivergedError, match=r"landscape\.json is not written.*--range.*--sigma"):
        found.write(tmp_path / "landscape.json")
    assert not list(tmp_path.iterdir())


def test_non_finite_eigenvalue_is_none(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.landscape.hessian.eigsh", lambda *given, **options: torch.tensor([float("nan")]))
    assert main(["landscape", str(own), *FEW, "--hessian", "--after", "1"]) == 0
    assert json.loads((own / "landscape.json").read_text(encoding="utf-8"))["hessian"] == {}
