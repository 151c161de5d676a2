"""Settings from outside: parsing, ranges, unknown keys; the presets against the paper's table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import UsageError
from steppe.methods import FSDGPM
from steppe.registry import find_benchmark, find_method
from steppe.settings import Settings, _converted, setting


@dataclass(frozen=True)
class Kitchen(Settings):
    """One setting of each kind."""

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
def test_values_are_read_as_the_settings_type(name: str, given_value: Any, value: Any) -> None:
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
        ("count", 0, "count = 0 is out of range: it must be at least 1 and at most 100"),
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
        ("note", 3, "is not text"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(name: str, value: Any, message: str) -> None:
    for make in (lambda: Kitchen.from_mapping({name: value}), lambda: Kitchen(**{name: value})):
        with pytest.raises(UsageError, match=message):
            make()


def test_unknown_keys_are_refused_with_the_nearest_and_all_known() -> None:
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


def test_settings_cannot_be_changed_or_replaced_by_nonsense() -> None:
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


def test_unknown_methods_and_benchmarks_name_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown method 'fs-dgmp'\. Did you mean 'fs-dgpm'"):
        find_method("fs-dgmp")
    with pytest.raises(UsageError, match=r"unknown benchmark 'pmnits'\. Did you mean 'pmnist'"):
        find_benchmark("pmnits")


def test_signs_that_a_terminal_would_obey_are_no_text() -> None:
    for text in ("a\x1b[31m", "a\x00", "a\x9b", "\udcff"):
        with pytest.raises(UsageError, match="is not text that can be shown"):
            _converted("note", text, str, "Owner")
    for text in ("my\u00a0photos", "\u0645\u06cc\u200c\u062e", "a\tb", "日本"):  # blanks and joiners of other scripts
        assert _converted("note", text, str, "Owner") == text
