"""A run's configuration: presets, overrides, and the file from which it reruns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.config import RunConfig
from steppe.errors import UsageError
from steppe.registry import METHODS


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_round_trips_through_toml(method: str, tmp_path: Path) -> None:
    config = RunConfig.make("pmnist", method, ["benchmark.tasks=3", "lr=0.5"], seed=7, threads=2)
    (tmp_path / "config.toml").write_text(config.as_toml(), encoding="utf-8")
    assert RunConfig.load(tmp_path / "config.toml") == config


@given(
    lr=st.floats(1e-9, 1e3),
    samples=st.integers(1, 60_000),
    seed=st.integers(0, 2**63 - 1),
    form=st.sampled_from(["whole", "chunked"]),
    second=st.booleans(),
)
def test_any_values_survive_the_file(
    tmp_path_factory: pytest.TempPathFactory, lr: float, samples: int, seed: int, form: str, second: bool
) -> None:
    overrides = [f"lr={lr!r}", f"samples={samples}", f"ascent_form={form}", f"second_order={second}"]
    config = RunConfig.make("pmnist", "fs-dgpm", overrides, seed=seed)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config.as_toml(), encoding="utf-8")
    assert RunConfig.load(path) == config


def test_presets_then_variants_then_overrides() -> None:
    assert RunConfig.make("pmnist", "er").method_settings.as_dict()["lr"] == 0.005
    assert RunConfig.make("pmnist", "fs-er").method_settings.as_dict()["ascent_steps"] == 2
    assert RunConfig.make("pmnist", "fs-gpm").method_settings.as_dict()["importance"] == "ones"
    assert RunConfig.make("pmnist", "fs-gpm", ["importance=spectral"]).changes() == {"method.importance": "spectral"}
    assert RunConfig.make("pmnist", "multitask").training.epochs == 5


def test_what_makes_a_run_comparable() -> None:
    assert RunConfig.make("pmnist", "er", ["lr=0.1"]).full_length
    assert not RunConfig.make("pmnist", "er", ["tasks=3"]).full_length
    assert not RunConfig.make("pmnist", "er", ["epochs=2"]).full_length


def test_the_command_gives_the_run_again() -> None:
    config = RunConfig.make("pmnist", "fs-dgpm", ["tasks=3", "method.alpha=2"], seed=4)
    words = config.command().split()
    assert words[:4] == ["steppe", "run", "pmnist", "fs-dgpm"]
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert RunConfig.make("pmnist", "fs-dgpm", sets, seed=int(words[words.index("--seed") + 1])) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[run]\nmethod = 'er'", "benchmark"),
        ("[run]\nbenchmark = 'pmnist'\nmethod = 'er'\nspeed = 1", "speed"),
        ("[run]\nbenchmark = 'pmnist'\nmethod = 'er'\n[metod]\nlr = 1", "metod"),
        ("[run]\nbenchmark = 'pmnist'\nmethod = 'er'\n[method]\nrate = 1", "rate"),
        ("[run]\nbenchmark = 'pmnist'\nmethod = 'er'\n[method]\nlr = -1", "lr"),
        ("[run]\nbenchmark = 'pmnist'\nmethod = 'er'\nseed = -1", "seed"),
        ("[run]\nbenchmark = 'pmnist'\nmethod = 'er'\nthreads = 0", "threads"),
        ("[run\n", "cannot be read"),
    ],
)
def test_bad_files_are_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=named):
        RunConfig.load(tmp_path / "config.toml")


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


@pytest.mark.parametrize(("content", "named"), [("1 / 0", "ZeroDivisionError"), (None, "no Python file")])
def test_a_bad_plugin_is_refused(content: str | None, named: str, tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    if content is not None:
        plugin.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=named):
        RunConfig.make("pmnist", "er", plugins=[str(plugin)])
