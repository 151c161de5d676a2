"""Search spaces: every method's own is valid, and what has no effect is not searched."""

from __future__ import annotations

import pytest

from steppe import ER, FSDGPM, GPM, SGP, LaMAML, UsageError
from steppe.registry import METHODS
from steppe.settings import SearchRange, linear_range, log_range, one_of
from steppe.tuning.space import as_plain, build_space, from_plain, parse_ranges


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_valid_space_around_each_preset(name: str) -> None:
    entry = METHODS[name]
    for benchmark in ("", *entry.presets):
        settings = entry.settings.from_mapping(entry.values(benchmark))
        space = build_space(settings, entry.search_space(settings), {})
        assert space
        assert not space.keys() & entry.variant.keys()
        for key, tried in space.items():
            for end in tried.ends():
                settings.replace(**{key: end})
            value = settings.as_dict()[key]
            assert value in tried.values if tried.values else tried.low <= value <= tried.high  # type: ignore[operator]
        assert from_plain(as_plain(space)) == space


def test_settings_without_effect_are_left_out() -> None:
    assert "ascent_lr" not in ER().search_space()
    assert "ascent_lr" in ER(ascent_steps=2).search_space()
    assert {"importance_lr", "alpha"} & FSDGPM().search_space().keys() == {"importance_lr"}
    assert {"importance_lr", "alpha"} & FSDGPM(importance="spectral").search_space().keys() == {"alpha"}
    assert "lr" not in LaMAML().search_space()
    assert "lr" in LaMAML(asynchronous=False).search_space()
    assert SGP().search_space().keys() - GPM().search_space().keys() == {"alpha"}


def test_the_settings_to_start_from_are_in_the_space() -> None:
    settings = ER(lr=0.9)
    space = build_space(settings, {"lr": log_range(1e-3, 0.1)}, {"buffer": one_of(50, 100)})
    assert space == {"lr": log_range(1e-3, 0.9), "buffer": one_of(50, 100, 200)}
    assert build_space(ER(clip=0), {}, {"clip": log_range(0.1, 1)})["clip"] == log_range(0.1, 1)  # 0 has no logarithm


def test_ranges_from_the_command_line() -> None:
    texts = ["lr=0.001:0.1:log", "method.momentum=0:0.9", "buffer = 100, 200"]
    assert parse_ranges(texts, ER) == {
        "lr": log_range(0.001, 0.1),
        "momentum": linear_range(0, 0.9),
        "buffer": one_of("100", "200"),
    }
    assert build_space(ER(), {}, parse_ranges(texts, ER))["buffer"] == one_of(100, 200)
    for text in ("lr", "lr=", "lr=a:b", "lr=1:2:3:4"):
        with pytest.raises(UsageError, match="expected KEY=LOW:HIGH"):
            parse_ranges([text], ER)
    with pytest.raises(UsageError, match="given twice"):
        parse_ranges(["lr=1:2", "lr=1:3"], ER)
    with pytest.raises(UsageError, match="a range needs a setting that is a number"):
        build_space(FSDGPM(), {}, {"importance": linear_range(0, 1)})
    with pytest.raises(UsageError, match="nothing to search"):
        build_space(ER(), {}, {})


@pytest.mark.parametrize("data", [None, {}, {"lr": 3}, {"lr": {"low": 2, "high": 1, "log": False, "values": []}}])
def test_damaged_spaces(data: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        from_plain(data)


def test_ranges_are_shown() -> None:
    assert str(SearchRange(0.001, 0.3, log=True)) == "0.001 to 0.3 (log)"
    assert str(one_of("a", "b")) == "a, b"
