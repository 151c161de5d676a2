"""The reader of CIFAR-100's Python files: what their publisher wrote it reads, whatever else it refuses unharmed."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steppe.data.restricted_pickle import read
from steppe.errors import DataError


def old_string(text: bytes) -> bytes:
    """A `str` as Python 2 pickled it."""
    return b"U" + bytes((len(text),)) + text if len(text) < 256 else b"T" + struct.pack("<I", len(text)) + text


def old_number(value: int) -> bytes:
    return b"K" + bytes((value,)) if value < 256 else b"M" + struct.pack("<H", value)


def publishers(images: np.ndarray, fine: list[int], coarse: list[int]) -> bytes:
    """A file instruction by instruction as Python 2's cPickle wrote it, memo and all."""
    places = iter(range(1, 1 << 16))

    def put() -> bytes:
        place = next(places)
        return b"q" + bytes((place,)) if place < 256 else b"r" + struct.pack("<I", place)

    def numbers(values: list[int]) -> bytes:
        return b"]" + put() + b"(" + b"".join(map(old_number, values)) + b"e"

    names = b"".join(old_string(b"image_%d.png" % place) + put() for place in range(len(fine)))
    rows, columns = images.shape
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
    array += b"K\0\x85" + put() + old_string(b"b") + put() + b"\x87" + put() + b"R" + put()
    array += b"(K\1" + old_number(rows) + old_number(columns) + b"\x86" + put()
    array += b"cnumpy\ndtype\n" + put() + old_string(b"u1") + put() + b"K\0K\1\x87" + put() + b"R" + put()
    array += b"(K\3" + old_string(b"|") + put() + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\0tb"
    array += b"\x89" + b"T" + struct.pack("<I", images.size) + images.tobytes() + put() + b"tb"
    entries = old_string(b"filenames") + put() + b"]" + put() + b"(" + names + b"e"
    entries += old_string(b"batch_label") + put() + old_string(b"training batch 1 of 1") + put()
    entries += old_string(b"fine_labels") + put() + numbers(fine)
    entries += old_string(b"coarse_labels") + put() + numbers(coarse)
    entries += old_string(b"data") + put() + array
    return b"\x80\2}" + put() + b"(" + entries + b"u."


IMAGES = np.arange(3 * 3072, dtype=np.int64).astype(np.uint8).reshape(3, 3072)
GENUINE = publishers(IMAGES, [99, 0, 7], [13, 4, 7])


def test_the_publishers_form() -> None:
    content = read(GENUINE, "train")
    assert list(content) == ["filenames", "batch_label", "fine_labels", "coarse_labels", "data"]
    assert content["filenames"] == [b"image_0.png", b"image_1.png", b"image_2.png"]
    assert (content["fine_labels"], content["coarse_labels"]) == ([99, 0, 7], [13, 4, 7])
    assert content["data"].dtype == np.uint8
    assert np.array_equal(content["data"], IMAGES)


def test_the_hand_made_file_is_what_python_reads() -> None:
    """That the hand-made file is a genuine one, the standard library says."""
    theirs = pickle.loads(GENUINE, encoding="bytes")
    assert {key.decode() for key in theirs} == set(read(GENUINE, "train"))
    assert np.array_equal(theirs[b"data"], IMAGES)


@given(st.integers(0, 5), st.booleans(), st.booleans())
def test_arrays_that_python_3_wrote(rows: int, fortran: bool, text_keys: bool) -> None:
    images = np.random.default_rng(rows).integers(0, 256, (rows, 3072), np.uint8)
    stored = np.asfortranarray(images) if fortran else images
    content: dict[Any, Any] = {b"fine_labels": list(range(rows)), b"data": stored, b"batch_label": b"x" * 300}
    if text_keys:
        content = {key.decode(): value for key, value in content.items()}
    read_back = read(pickle.dumps(content, 3), "train")
    assert read_back["fine_labels"] == list(range(rows))
    assert np.array_equal(read_back["data"], images)


class Call:
    """Pickles to a call of whatever it is given."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class Stateful:
    def __setstate__(self, state: object) -> None:
        raise AssertionError("the state of an object was set")

    def __getstate__(self) -> object:
        return {"a": 1}


def laughs(doublings: int) -> bytes:
    """Lists of the list before, twice each: 2^n elements in n instructions."""
    steps = b"".join(b"](h%ch%ceq%c" % (place, place, place + 1) for place in range(doublings))
    return b"\x80\2}U\1a]q\0" + steps + b"s."


def described(shape: bytes, kind: bytes = b"u1", content: bytes = b"U\1x") -> bytes:
    start = b"\x80\2}U\4datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R(K\1"
    return start + shape + b"cnumpy\ndtype\nU\2" + kind + b"K\0K\1\x87R\x89" + content + b"tbs."


HOSTILE = {
    "os.system": pickle.dumps({"a": Call(os.system, "exit 1")}, 2),
    "eval": pickle.dumps({"a": Call(eval, "1/0")}, 2),
    "eval, protocol 4": pickle.dumps({"a": Call(eval, "1/0")}, 4),
    "numpy's own loader": b"\x80\2}U\1acnumpy\nload\nU\1x\x85Rs.",
    "a name that begins like ours": b"\x80\2}U\1acnumpy\ndtypes\nU\1x\x85Rs.",
    "an object with a state": pickle.dumps({"a": Stateful()}, 2),
    "a float": pickle.dumps({"a": 1.5}, 2),
    "text protocol": pickle.dumps({"a": 1}, 0),
    "billion laughs": laughs(60),
    "huge length": b"\x80\3}U\1aB\xff\xff\xff\xff" + b"x" * 10,
    "huge string": b"\x80\2}U\1aT\xff\xff\xff\x7fxs.",
    "deep": b"\x80\2}U\1a" + b"(" * 200_000 + b"t" * 200_000 + b"s.",
    "nested": b"\x80\2}U\1a" + b"]" * 1000 + b"a" * 999 + b"s.",
    "a list in itself": b"\x80\2}U\1a]q\0h\0as.",
    "persistent id": b"\x80\2}U\1aU\1xQs.",
    "extension code": b"\x80\2}U\1a\x82\1s.",
    "new object": b"\x80\2}U\1acnumpy\nndarray\nK\1\x85\x81s.",
    "duplicated top": b"\x80\2}U\1a]22s.",
    "array of objects": described(b"K\1\x85", b"O8"),
    "array of another shape": described(b"K\2\x85"),
    "array of a negative shape": described(b"J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86"),
    "array without bytes": described(b"K\1\x85", content=b"]"),
    "array of nothing, but huge": described(b"(" + b"J\xff\xff\xff\x7f" * 3 + b"K\0t", content=b"U\0"),
    "array of many axes": described(b"(" + b"K\1" * 40 + b"t"),
    "array never filled": b"\x80\2}U\1acnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87Rs.",
    "a memo that is not there": b"\x80\2}U\1ah\7s.",
    "a key twice": b"\x80\3}(U\1aK\1X\1\0\0\0aK\2u.",
    "a key that is a list": b"\x80\2}]K\1s.",
    "no dictionary": b"\x80\2]K\1a.",
    "something behind the end": GENUINE + b"x",
    "another protocol": b"\x80\5}.",
    "nothing": b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str) -> None:
    started = time.monotonic()
    with pytest.raises(DataError, match=r"train is not one of CIFAR-100's Python files \(.*\): get it again"):
        read(HOSTILE[case], "train")
    assert time.monotonic() - started < 5


def test_the_error_names_what_was_asked_for() -> None:
    with pytest.raises(DataError, match=r"asks for 'posix\.system', and only numpy arrays are read"):
        read(HOSTILE["os.system"], "train")


@pytest.mark.parametrize("length", [*range(0, 200, 7), len(GENUINE) - 3000, len(GENUINE) - 1])
def test_truncated_files_are_refused(length: int) -> None:
    with pytest.raises(DataError, match="train is not"):
        read(GENUINE[:length], "train")


PIECES = [
    b"\x80\2",
    b"}",
    b"(",
    b"U\1a",
    b"K\1",
    b"]",
    b"q\0",
    b"h\0",
    b"e",
    b"u",
    b"s",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
]
PIECES += [b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"R", b"b", b"N", b"."]


@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join)))
@example(b"\x80\2}b.")
@example(b"\x80\2NR.")
def test_whatever_the_bytes_they_are_read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(DataError):
        assert isinstance(read(raw, "file"), dict)


@given(st.integers(0, len(GENUINE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(place: int, value: int) -> None:
    changed = bytearray(GENUINE)
    changed[place] = value
    with contextlib.suppress(DataError):
        read(bytes(changed), "file")
