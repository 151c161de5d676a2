"""A run's configuration: presets, overrides, and the file it can be rerun from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from steppe.cli.main import main
from steppe.errors import UsageError
from steppe.experiments.config import RunConfig
from steppe.registry import BENCHMARKS, METHODS
from steppe.settings import Limits, TrainingConfig


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_round_trips_through_toml(method: str, tmp_path: Path) -> None:
    config = RunConfig.make("pmnist", method, ["benchmark.tasks=3", "lr=0.5"], seed=7, threads=2)
    (tmp_path / "config.toml").write_text(config.as_toml(), encoding="utf-8")
    assert RunConfig.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pmnist", "er", "--tasks", "2", "--set", "tasks=1"], "benchmark.tasks is set twice, to '1' and '2'"),
        (["pmnist", "er", "--epochs", "3", "--set", "epochs=2"], "training.epochs is set twice, to '2' and '3'"),
        (["pmnist", "er", "--set", "lr=0.1", "--set", "lr=0.2"], "method.lr is set twice, to '0.1' and '0.2'"),
        (["pmnist", "er", "--set", "lr=0.1", "--set", "method.lr=0.2"], "method.lr is set twice"),
        (["folder:a", "er", "--set", "path=b"], "benchmark.path is set twice, to 'a' and 'b'"),
        (["pmnist", "er", "--set", "lr=0.1", "--set", "lr=fast"], "lr = 'fast' is not a number"),
    ],
)
@pytest.mark.parametrize("command", ["run", "study"])
def test_a_setting_given_twice_must_be_the_same(
    command: str,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_same_value_given_twice_is_fine() -> None:
    twice = ["lr=0.1", "method.lr=1e-1", "tasks=2", "benchmark.tasks=2", "patience=0", "patience= 0"]
    assert RunConfig.make("pmnist", "er", twice) == RunConfig.make("pmnist", "er", ["lr=0.1", "tasks=2", "patience=0"])


def values_of(kind: type, limits: Limits) -> st.SearchStrategy[Any]:
    """Any valid value of a setting; free texts keep their defaults."""
    if limits.choices:
        return st.sampled_from(limits.choices)
    if kind is bool:
        return st.booleans()
    least = limits.at_least if limits.at_least is not None else limits.above
    most = limits.at_most if limits.at_most is not None else limits.below
    if kind is int:
        return st.integers(0 if least is None else int(least), 2**63 - 1 if most is None else int(most))
    return st.floats(least, most, allow_nan=False, allow_infinity=False).filter(limits.allows)


@pytest.mark.parametrize("benchmark", sorted(BENCHMARKS))
@pytest.mark.parametrize("method", sorted(METHODS))
@settings(max_examples=5)
@given(st.data())
def test_any_valid_values_round_trip_through_toml(method: str, benchmark: str, data: st.DataObject) -> None:
    kinds = {
        "benchmark": BENCHMARKS[benchmark].settings,
        "method": METHODS[method].settings,
        "training": TrainingConfig,
    }
    overrides = [
        f"{section}.{name}={data.draw(values_of(kind, limits), label=name)!r}".replace("'", "")
        for section, settings in kinds.items()
        for name, (kind, limits) in settings.schema().items()
        if (kind is not str or limits.choices) and data.draw(st.booleans())
    ]
    try:
        config = RunConfig.make(benchmark, method, overrides, seed=data.draw(st.integers(0, 2**63 - 1)))
    except UsageError:  # values that contradict each other
        reject()
    assert RunConfig.from_toml(config.as_toml()) == config
    assert RunConfig.from_mapping(json.loads(json.dumps(config.as_dict()))) == config


def test_presets_then_variants_then_overrides() -> None:
    assert RunConfig.make("pmnist", "er").method_settings.as_dict()["lr"] == 0.005
    assert RunConfig.make("pmnist-60k", "fs-er").method_settings.as_dict()["ascent_steps"] == 2
    assert RunConfig.make("pmnist", "fs-gpm").method_settings.as_dict()["importance"] == "ones"
    assert RunConfig.make("pmnist", "fs-gpm", ["importance=spectral"]).changes() == {"method.importance": "spectral"}
    assert RunConfig.make("pmnist", "multitask").training.epochs == 5


def test_is_canonical() -> None:
    assert RunConfig.make("pmnist", "er", ["lr=0.1"]).is_canonical
    assert not RunConfig.make("pmnist", "er", ["tasks=3"]).is_canonical
    assert not RunConfig.make("pmnist", "er", ["epochs=2"]).is_canonical


def test_a_run_on_validation_data_says_so_and_is_another_experiment() -> None:
    on_test, on_validation = (RunConfig.make("pmnist", "er", report=report) for report in ("test", "validation"))
    assert not on_validation.is_canonical
    assert on_validation.command() == "steppe run pmnist er --seed 0 --report validation"
    assert RunConfig.from_toml(on_validation.as_toml()) == on_validation
    assert "report" not in on_test.as_toml()  # so that older versions read it
    assert not on_test.matches(on_validation.as_dict())
    assert not on_validation.matches(on_test.as_dict())
    with pytest.raises(UsageError, match="data to report on"):
        RunConfig.make("pmnist", "er", report="train")


def test_the_command_repeats_the_run() -> None:
    config = RunConfig.make("pmnist", "fs-dgpm", ["tasks=3", "method.alpha=2"], seed=4)
    words = config.command().split()
    assert words[:4] == ["steppe", "run", "pmnist", "fs-dgpm"]
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert RunConfig.make("pmnist", "fs-dgpm", sets, seed=int(words[words.index("--seed") + 1])) == config


def test_blanks_around_values_are_stripped_except_in_free_text() -> None:
    given = ["training.freeze_norms = true", "ascent_form= chunked ", " buffer = 5"]
    config = RunConfig.make("pmnist", "fs-dgpm", given).as_dict()
    assert config["training"]["freeze_norms"] is True
    assert (config["method"]["ascent_form"], config["method"]["buffer"]) == ("chunked", 5)
    assert RunConfig.make("folder", "er", ["path=/a b "]).as_dict()["benchmark"]["path"].endswith("/a b ")


def test_a_config_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    config = RunConfig.make("pmnist", "er")
    (tmp_path / "config.toml").write_text(config.as_toml(), encoding="utf-8-sig")
    assert RunConfig.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize("words", ["run folder:~nobody-of-that-name/x er", "data where"])
def test_an_unknown_home_directory(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPPE_DATA", "~nobody-of-that-name/x")
    assert main(words.split()) == 2
    assert "~nobody-of-that-name/x: no such home directory" in capsys.readouterr().err


def test_a_plugin_adds_a_method(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import steppe\nsteppe.register_method('mine', steppe.Finetune, 'mine', variant={'lr': 0.125})\n",
        encoding="utf-8",
    )
    try:
        config = RunConfig.make("pmnist", "mine", plugins=[str(plugin)])
        assert config.method_settings.as_dict()["lr"] == 0.125
    finally:
        METHODS.pop("mine", None)
