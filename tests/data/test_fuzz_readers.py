"""A short form of the fuzzer: every reader reads or rejects a file, quickly and with little memory."""

from __future__ import annotations

from fuzz_readers import SHARES, fuzz


def test_a_few_thousand_damaged_files() -> None:
    found = fuzz(3000, seed=1)
    assert found["faults"] == []
    assert found["inputs"] == found["refused"] + found["accepted"] == 3000
    assert set(found["readers"]) == set(SHARES)
    for name, one in found["readers"].items():
        assert one["refused"] > 0, name
        assert one["accepted"] > 0 or name == "cifar-100", name  # where every image is checked by hash
