"""The same command gives the same bits: every method's weights and predictions equal those recorded on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import golden_bits
import pytest
from golden_bits import FITTING, VARIANTS
from small_runs import OWN

from steppe.fast.switch import fast_paths_enabled
from steppe.registry import METHODS

RECORDED = golden_bits.known()
Digests = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def computed() -> tuple[str, Digests]:
    """This machine's fingerprint, and the digests computed in a new process."""
    command = [sys.executable, "-W", "ignore", str(Path(golden_bits.__file__))]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    ((here, found),) = json.loads(told.stdout).items()
    return here, found


@pytest.fixture
def both(computed: tuple[str, Digests]) -> tuple[Digests, Digests]:
    """The digests recorded on a machine like this, and those computed now."""
    here, found = computed
    if not fast_paths_enabled():
        pytest.skip("the bits were recorded with fast paths: unset STEPPE_FAST")
    if here not in RECORDED:
        pytest.skip(
            f"no bits are recorded of a machine with the fingerprint {here}: check out a commit whose bits are right "
            "and run python tests/golden_bits.py --record"
        )
    return RECORDED[here], found


def test_all_cases_are_recorded(both: tuple[Digests, Digests]) -> None:
    recorded, found = both
    assert recorded.keys() == found.keys()


@pytest.mark.parametrize("name", next(iter(RECORDED.values()), {}))
def test_bits_equal_the_recorded_ones(name: str, both: tuple[Digests, Digests]) -> None:
    recorded, found = both
    assert found[name] == recorded[name]


def test_a_loaded_learner_has_the_same_bits(computed: tuple[str, Digests]) -> None:
    """On any machine."""
    found = {name: parts for name, parts in computed[1].items() if "loaded" in parts}
    assert len(found) > 2 * len(METHODS)
    assert [name for name, parts in found.items() if parts["loaded"] != parts["after both"]] == []


def test_every_method_is_recorded() -> None:
    for recorded in RECORDED.values():
        for method in METHODS:
            assert f"pictures, {method}" in recorded
    assert FITTING.keys() >= OWN.keys()


def test_variants_differ_from_their_base() -> None:
    """Otherwise its digest would say nothing about it."""
    for recorded in RECORDED.values():
        for benchmark in ("pmnist", "pictures"):
            for variant, (method, _) in VARIANTS.items():
                one, other = (recorded[f"{benchmark}, {name}"]["after both"] for name in (variant, method))
                assert one != other, variant
