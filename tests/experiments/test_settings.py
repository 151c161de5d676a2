"""Settings from outside: parsing, ranges, unknown keys; and the presets against the paper's table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import UsageError
from steppe.methods import ER, FSDGPM
from steppe.registry import METHODS, find_benchmark, find_method
from steppe.settings import Settings, _convert, setting


@dataclass(frozen=True)
class Kitchen(Settings):
    """One setting of each type."""

    count: int = setting(3, "a number of things", at_least=1, at_most=100)
    share: float = setting(0.5, "a share", above=0, below=1)
    level: float = setting(0.0, "any finite number")
    fast: bool = setting(False, "a switch")
    mode: str = setting("dry", "a choice", choices=("dry", "wet"))
    note: str = setting("", "any text")


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("share", "1e-2", 0.01),
        ("level", "-3", -3.0),
        ("level", 4, 4.0),
        ("fast", "true", True),
        ("fast", "No", False),
        ("fast", 1, True),
        ("mode", "wet", "wet"),
        ("note", "3", "3"),
    ],
)
def test_values_are_converted_to_the_type_of_the_setting(name: str, given_value: Any, value: Any) -> None:
    found = getattr(Kitchen.from_mapping({name: given_value}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", "seven", "count = 'seven' is not a whole number"),
        ("count", 2.5, "count = 2.5 is not a whole number"),
        ("count", "2.5", "is not a whole number"),
        ("count", True, "is not a whole number"),
        ("count", None, "is not a whole number"),
        ("count", 0, "count = 0 is out of range; it must be at least 1 and at most 100"),
        ("count", 101, "count = 101"),
        ("share", 0, "share = 0.0 .*above 0 and below 1"),
        ("share", 1, "share = 1.0"),
        ("share", "half", "is not a number"),
        ("share", False, "is not a number"),
        ("level", "nan", "level = nan .*finite"),
        ("level", float("inf"), "level = inf .*finite"),
        ("fast", "maybe", "is not true or false"),
        ("fast", 2, "is not true or false"),
        ("mode", "damp", "mode = 'damp' .*one of dry, wet"),
        ("note", 3, "is not printable text"),
    ],
)
def test_invalid_values_are_rejected_by_name(name: str, value: Any, message: str) -> None:
    for make in (lambda: Kitchen.from_mapping({name: value}), lambda: Kitchen(**{name: value})):
        with pytest.raises(UsageError, match=message):
            make()


def test_unknown_keys_are_rejected_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"setting of Kitchen 'counts'\. Did you mean 'count'\? Known: count, fast"):
        Kitchen.from_mapping({"counts": 3})
    with pytest.raises(UsageError, match=r"'zzz'\. Known:"):
        Kitchen.from_mapping({"zzz": 3})


kitchens = st.builds(
    Kitchen,
    count=st.integers(1, 100),
    share=st.floats(0, 1, exclude_min=True, exclude_max=True),
    level=st.floats(allow_nan=False, allow_infinity=False),
    fast=st.booleans(),
    mode=st.sampled_from(["dry", "wet"]),
    note=st.text("ab 1=", max_size=5),
)


@given(kitchens)
def test_round_trips(kitchen: Kitchen) -> None:
    """Through plain values, and through the text of a command line."""
    assert Kitchen.from_mapping(kitchen.as_dict()) == kitchen
    assert Kitchen.from_mapping({name: str(value) for name, value in kitchen.as_dict().items()}) == kitchen
    assert kitchen.replace(count=5, note="x").as_dict() == {**kitchen.as_dict(), "count": 5, "note": "x"}
    assert kitchen.replace() == kitchen


def test_settings_are_frozen_and_replace_validates() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Kitchen().count = 5  # type: ignore[misc]
    with pytest.raises(UsageError, match="count = 0"):
        Kitchen().replace(count=0)


# The paper's values: η3, η1, η2, buffer, samples for the bases, ε0, Δε.
PAPER = {
    "pmnist": (0.01, 0.05, 0.01, 200, 200, 0.99, 0.0005),
    "cifar100-split": (0.01, 0.001, 0.01, 1000, 125, 0.97, 0.003),
    "cifar100-superclass": (0.01, 0.01, 0.01, 1000, 125, 0.98, 0.001),
    "tiny-imagenet": (0.01, 0.001, 0.01, 400, 200, 0.90, 0.0025),
}


@pytest.mark.parametrize("benchmark", PAPER)
@pytest.mark.parametrize("name", ["fs-dgpm", "fs-gpm", "dgpm", "la-dgpm"])
def test_presets_are_the_papers(name: str, benchmark: str) -> None:
    found = FSDGPM.from_mapping(find_method(name).values(benchmark))
    keys = ("lr", "ascent_lr", "importance_lr", "buffer", "basis_samples", "threshold", "threshold_step")
    assert tuple(getattr(found, key) for key in keys) == PAPER[benchmark]
    protocol = (found.ascent_steps, found.momentum, found.clip, found.ascent_clamp, found.temperature)
    assert protocol == (2, 0.9, 2.0, 2.0, 10.0)


def test_presets_of_fs_sgpm() -> None:
    """The paper's values, except on Permuted MNIST, where we tuned the ascent (docs/methods/fs-dgpm.md)."""
    entry = find_method("fs-sgpm")
    for benchmark in PAPER:
        ours = FSDGPM.from_mapping(entry.values(benchmark))
        papers = FSDGPM.from_mapping(find_method("fs-dgpm").values(benchmark))
        apart = {"ascent_form": "chunked", "ascent_lr": 0.075} if benchmark == "pmnist" else {}
        assert ours == papers.replace(importance="spectral", alpha=25.0, **apart)


def test_ascent_of_fs_er() -> None:
    """As docs/methods/er.md says: FS-DGPM's, except on the short Permuted MNIST, where it is the released script's."""
    for benchmark in (*PAPER, "pmnist-60k"):
        found = ER.from_mapping(find_method("fs-er").values(benchmark))
        theirs = FSDGPM.from_mapping(find_method("fs-dgpm").values(benchmark))
        assert found.ascent_lr == (0.01 if benchmark == "pmnist" else theirs.ascent_lr)


# The paper's values for the methods it compares with, and those of the code it ran. Where these are silent or
# contradict each other, the values are ours, with the reason.
SGD = {"momentum": 0.9, "clip": 2.0}  # in the released code; the paper says only "SGD"
UNCLIPPED = {"momentum": 0.9, "clip": 0.0}  # GPM's own code does not clip, and clipping falls short of the paper
MEMORY = {"pmnist": 200, "cifar100-split": 1000, "cifar100-superclass": 1000, "tiny-imagenet": 400}
LA_MAML_IMAGES = {"second_order": True, "inner_relu": False, "inner_clamp": 1.0, "clip": 1.0, "inner_steps": 5}
COMPARED: dict[str, dict[str, dict[str, Any]]] = {
    "finetune": {benchmark: {**SGD, "lr": 0.01} for benchmark in MEMORY},  # not in the paper: multitask's step size
    "multitask": {benchmark: {**SGD, "lr": 0.01} for benchmark in MEMORY},
    "er": {
        "pmnist": {**SGD, "lr": 0.005, "buffer": 200},
        "cifar100-split": {**SGD, "lr": 0.03, "buffer": 1000},
        "cifar100-superclass": {**SGD, "lr": 0.01, "buffer": 1000},
        "tiny-imagenet": {**SGD, "lr": 0.01, "buffer": 400},  # La-MAML's: its lr, but not its replay of a single sample
    },
    "ewc": {  # the number of samples for F is not reported: 10 in GEM's code, where a larger batch counts as one
        "pmnist": {**SGD, "lr": 0.01, "strength": 100.0, "samples": 10},
        "cifar100-split": {**SGD, "lr": 0.005, "strength": 5000.0, "samples": 64},
        "cifar100-superclass": {**SGD, "lr": 0.03, "strength": 1000.0, "samples": 64},
        "tiny-imagenet": {**SGD, "lr": 0.01, "strength": 1000.0, "samples": 64},  # not reported
    },
    "gem": {
        "pmnist": {**SGD, "lr": 0.01, "strength": 0.0, "memory": 200, "tasks": 20},
        "cifar100-split": {**SGD, "lr": 0.01, "strength": 0.5, "memory": 1000, "tasks": 10},
        "cifar100-superclass": {**SGD, "lr": 0.03, "strength": 0.5, "memory": 1000, "tasks": 20},
        "tiny-imagenet": {**SGD, "lr": 0.03, "strength": 0.5, "memory": 400, "tasks": 40},
    },
    "icarl": {  # not defined on Permuted MNIST
        "cifar100-split": {**SGD, "lr": 0.03, "distillation": 0.1, "exemplars": 1000},
        "cifar100-superclass": {**SGD, "lr": 0.01, "distillation": 0.5, "exemplars": 1000},
        "tiny-imagenet": {**SGD, "lr": 0.01, "distillation": 1.0, "exemplars": 400},
    },
    "la-maml": {
        "pmnist": {  # five slices, not the code's ten steps of one sample: they reach the published accuracy
            **{"rate": 0.15, "rate_lr": 0.3, "buffer": 200, "inner_steps": 5, "second_order": False},
            **{"inner_relu": True, "inner_clamp": 0.0, "clip": 2.0, "asynchronous": True, "replay_batch": 10},
        },
        "cifar100-split": {**LA_MAML_IMAGES, "rate": 0.1, "rate_lr": 0.5, "buffer": 1000},
        "cifar100-superclass": {**LA_MAML_IMAGES, "rate": 0.1, "rate_lr": 0.5, "buffer": 1000},
        "tiny-imagenet": {**LA_MAML_IMAGES, "rate": 0.1, "rate_lr": 0.4, "buffer": 400},
    },
    "gpm": {  # on Permuted MNIST that code's ε, since the model stops learning with the paper's
        "pmnist": {
            **UNCLIPPED,
            "lr": 0.01,
            "basis_samples": 300,
            "thresholds": "0.95,0.99,0.99",
            "threshold_step": 0.0,
        },
        "cifar100-split": {
            **UNCLIPPED,
            "lr": 0.01,
            "basis_samples": 125,
            "thresholds": "0.97",
            "threshold_step": 0.003,
        },
        "cifar100-superclass": {
            **UNCLIPPED,
            "lr": 0.01,
            "basis_samples": 125,
            "thresholds": "0.98",
            "threshold_step": 0.001,
        },
        "tiny-imagenet": {
            **UNCLIPPED,
            "lr": 0.005,
            "basis_samples": 200,
            "thresholds": "0.9",
            "threshold_step": 0.0025,
        },
    },
}


@pytest.mark.parametrize(("name", "benchmark"), [(name, each) for name in COMPARED for each in COMPARED[name]])
def test_presets_of_the_papers_baselines(name: str, benchmark: str) -> None:
    entry, wanted = find_method(name), COMPARED[name][benchmark]
    found = entry.settings.from_mapping(entry.values(benchmark)).as_dict()
    assert {key: found[key] for key in wanted} == wanted
    assert set(entry.presets[benchmark]) <= {
        *wanted,
        "ascent_lr",
    }  # exactly those of the table; the exception is FS-ER's


def test_presets_that_differ_from_the_defaults() -> None:
    """As docs/benchmarks/folder.md says, whose runs start from the defaults."""
    apart = {}
    for name, entry in METHODS.items():
        default = entry.settings.from_mapping(entry.values("")).as_dict()
        preset = entry.settings.from_mapping(entry.values("pmnist")).as_dict()
        apart[name] = {key for key in default if default[key] != preset[key]}
    assert apart.pop("fs-er") >= {"lr", "ascent_lr"}
    assert {name: keys for name, keys in apart.items() if keys} == {
        **{name: {"lr"} for name in ("er", "sam-er")},
        "der++": {"lr", "alpha", "beta"},
        "gpm": {"thresholds", "basis_samples"},
        "sgp": {"thresholds", "basis_samples", "alpha"},
        "fs-sgpm": {"ascent_form", "ascent_lr"},
        "fs-rgpm": {"ascent_form", "ascent_lr", "first_inputs", "ridge_first"},
    }


def test_unknown_methods_and_benchmarks_name_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown method 'fs-dgmp'\. Did you mean 'fs-dgpm'"):
        find_method("fs-dgmp")
    with pytest.raises(UsageError, match=r"unknown benchmark 'pmnits'\. Did you mean 'pmnist'"):
        find_benchmark("pmnits")


def test_control_characters_are_rejected() -> None:
    for text in ("a\x1b[31m", "a\x00", "a\x9b", "\udcff"):
        with pytest.raises(UsageError, match="is not printable text"):
            _convert("note", text, str, "Owner")
    for text in ("my\u00a0photos", "\u0645\u06cc\u200c\u062e", "a\tb", "日本"):  # spaces and joiners of other scripts
        assert _convert("note", text, str, "Owner") == text
