"""Which run a landscape belongs to, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_result, write_landscape, write_run

from steppe.errors import RunError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import read_result
from steppe.landscape.files import identities, identity, read_landscape_of
from steppe.landscape.measure import Request, measure
from steppe.landscape.settings import LandscapeSettings
from steppe.results.schema import RunResult

NAME = {"benchmark": "pmnist", "method": "er", "seed": 0}
QUICK = LandscapeSettings(samples=5, directions=1, points=3, radius=1.0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "one"
    run(RunConfig.make("split-mnist", "finetune", ["tasks=2", "samples=20"]), out)
    return out


def test_identity_depends_on_settings_but_not_on_the_machine() -> None:
    def changed(**sections: Any) -> dict[str, Any]:
        return identity(**NAME, config={**made_result("er", 0)["config"], **sections})

    own = identity(**NAME, config=made_result("er", 0)["config"])
    assert NAME.items() < own.items()
    assert changed(run={"threads": 8, "device": "cuda"}) == own
    for other in ({"method": {"buffer": 1}}, {"benchmark": {"tasks": 4}}, {"training": {"epochs": 2}}):
        assert changed(**other)["config"] != own["config"]
    assert identity(**{**NAME, "seed": 1}, config=made_result("er", 0)["config"])["config"] != own["config"]
    assert identities(RunResult.from_dict(made_result("er", 0)))[0] == own


def test_a_run_without_a_landscape(tmp_path: Path) -> None:
    assert read_landscape_of(tmp_path, RunResult.from_dict(made_result())) is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (made_result("gpm"), "method er, not gpm"),
        (made_result("er", 1), "seed 0, not 1"),
        (made_result("er", benchmark="pmnist-60k"), "benchmark pmnist, not pmnist-60k"),
        (made_result("er", buffer=200), "other settings"),
    ],
)
def test_landscape_of_another_run_is_rejected(other: dict[str, Any], told: str, tmp_path: Path) -> None:
    own = write_landscape(write_run(tmp_path / "own", made_result("er")))
    assert read_landscape_of(own.path, own.result) is not None
    with pytest.raises(RunError, match=rf"landscape\.json is the landscape of another run \({told}\); remove it"):
        read_landscape_of(own.path, RunResult.from_dict(other))


def test_a_measured_landscape_belongs_to_its_run(finished: Path) -> None:
    out = finished / "landscape.json"
    measure(finished, out, QUICK, Request(after=[1]))
    assert read_landscape_of(finished, read_result(finished)) is not None
    out.unlink()
    # A result from before a setting existed: measured today, it still belongs to that run.
    result = read_result(finished)
    result.config["method"].pop("lr")
    (finished / "result.json").write_text(json.dumps(result.as_dict()), encoding="utf-8")
    for resume in (False, True):
        measure(finished, out, QUICK, Request(after=[1]), resume=resume)
        assert read_landscape_of(finished, read_result(finished)) is not None


def test_a_landscape_of_an_earlier_version_still_belongs_to_its_run(finished: Path) -> None:
    """It recorded settings added after the run, with their defaults."""
    out = finished / "landscape.json"
    out.unlink(missing_ok=True)
    whole = RunConfig.load(finished / "config.toml").as_dict()
    result = read_result(finished)
    measure(finished, out, QUICK, Request(after=[1]))
    told = json.loads(out.read_text(encoding="utf-8"))
    named = result.benchmark, result.method, result.seed
    told["run"]["config"] = identity(*named, whole)["config"]
    out.write_text(json.dumps(told), encoding="utf-8")
    result.config["training"].pop("freeze_statistics", None)
    (finished / "result.json").write_text(json.dumps(result.as_dict()), encoding="utf-8")
    assert identity(*named, result.config)["config"] != told["run"]["config"]
    assert read_landscape_of(finished, read_result(finished)) is not None
    measure(finished, out, QUICK, Request(after=[1]), resume=True)
    result.config["run"]["plugins"] = ["nowhere.py"]  # a plugin, which is not executed for this
    with pytest.raises(RunError, match="other settings"):
        read_landscape_of(finished, result)
