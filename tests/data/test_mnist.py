"""The bundled MNIST, and the reader of its format."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steppe.data import idx, mnist
from steppe.errors import DataError

PUBLISHED_MD5 = {
    "train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
}
FOLDER = Path(mnist.__file__).parent / "mnist"


@pytest.mark.parametrize("name", PUBLISHED_MD5)
def test_the_files_are_the_publishers(name: str) -> None:
    content = gzip.decompress((FOLDER / name).read_bytes())
    assert hashlib.md5(content).hexdigest() == PUBLISHED_MD5[name]


def test_shapes_and_labels() -> None:
    digits = mnist.load()
    assert digits.train_x.shape == (60_000, 784)
    assert digits.train_x.dtype == torch.uint8
    assert digits.test_x.shape == (10_000, 784)
    assert digits.train_y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert digits.train_y[:5].tolist() == [5, 0, 4, 1, 9]


def test_damaged_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mnist._SHA256, "t10k-labels-idx1-ubyte.gz", "0" * 64)
    mnist.load.cache_clear()
    with pytest.raises(DataError, match=r"t10k-labels.*damaged.*reinstall steppe"):
        mnist.load()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_idx_round_trip(shape: list[int], data: st.DataObject) -> None:
    size = int(torch.tensor(shape).prod())
    content = data.draw(st.binary(min_size=size, max_size=size))
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    array = idx.parse_idx(header + content, "file")
    assert list(array.shape) == shape
    assert bytes(array.flatten().tolist()) == content


@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_rejected(raw: bytes) -> None:
    try:
        array = idx.parse_idx(raw, "file")
    except DataError:
        return
    assert array.numel() == len(raw) - 4 - 4 * raw[3]
