"""CIFAR-100's Python files, read without executing anything.

The publisher's files are pickles: programs for a small stack machine. This is that machine with just the instructions
these files use (protocols 2 and 3). Nothing is imported and nothing is called: the three names that a numpy array
needs are symbols here, and the array is built from its bytes, whose number must fit its shape. What comes out is a
dictionary of numbers, strings, flat lists of these and arrays of bytes; all else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steppe.errors import DataError

Content = dict[str, Any]

_MAX_INSTRUCTIONS = 2_000_000  # the training file has about 260,000
_RECONSTRUCT, _NDARRAY, _DTYPE = "reconstruct", "ndarray", "dtype"
_SYMBOLS = {
    b"numpy.core.multiarray\n_reconstruct\n": _RECONSTRUCT,
    b"numpy._core.multiarray\n_reconstruct\n": _RECONSTRUCT,
    b"numpy\nndarray\n": _NDARRAY,
    b"numpy\ndtype\n": _DTYPE,
}
_LONGEST_SYMBOL = max(map(len, _SYMBOLS))


class _RefusedError(Exception):
    """Why the content is not what these files hold."""


class _Symbol:
    def __init__(self, name: str) -> None:
        self.name = name


class _ByteType:
    """The type uint8, as an array announces it."""


class _Draft:
    """An array whose bytes are yet to come."""

    array: NDArray[np.uint8] | None = None


def read(raw: bytes, file: str) -> Content:
    """The dictionary in a file's content; `file` names it in errors."""
    try:
        return _checked(_Machine(raw).run())
    except _RefusedError as why:
        raise DataError(f"{file} is not one of CIFAR-100's Python files ({why}): get it again.") from None


class _Machine:
    def __init__(self, raw: bytes) -> None:
        self.raw = memoryview(raw)
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each open mark
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MAX_INSTRUCTIONS):
            code = self.number(1)
            if code == _STOP:
                if self.below or len(self.stack) != 1 or self.at != len(self.raw):
                    raise _RefusedError("it does not end where it should")
                return self.stack[0]
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise _RefusedError(f"instruction {code:#04x} at byte {self.at - 1} has no place in it")
            instruction(self)
        raise _RefusedError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")

    # What instructions are made of.

    def take(self, count: int) -> bytes:
        """The next bytes of the file."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.raw):
            raise _RefusedError(f"it ends within {count:,} bytes that begin at byte {start:,}")
        return bytes(self.raw[start : self.at])

    def number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def pop(self) -> Any:
        if not self.stack:
            raise _RefusedError("it takes a value where there is none")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        if not self.below:
            raise _RefusedError("it closes a group that it never opened")
        items, self.stack = self.stack, self.below.pop()
        return items

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise _RefusedError(f"it fills a {kind.__name__} where there is none")
        return self.stack[-1]

    # The instructions.

    def protocol(self) -> None:
        if (version := self.number(1)) not in (2, 3) or self.at != 2:
            raise _RefusedError(f"it is of protocol {version}")

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def put(self, width: int) -> None:
        self.memo[self.number(width)] = self.top(object)

    def get(self, width: int) -> None:
        place = self.number(width)
        if place not in self.memo:
            raise _RefusedError(f"it refers to value {place}, which is not there")
        self.stack.append(self.memo[place])

    def text(self) -> None:
        try:
            self.stack.append(self.take(self.number(4)).decode())
        except UnicodeDecodeError:
            raise _RefusedError("a text in it is not UTF-8") from None

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def tuple_since_mark(self) -> None:
        items = tuple(self.since_mark())  # which changes the stack
        self.stack.append(items)

    def append(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise _RefusedError("a key in it has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (bytes, str)):
                raise _RefusedError(f"a key in it is of type {type(key).__name__}")
            target[key] = value

    def symbol(self) -> None:
        ahead = bytes(self.raw[self.at : self.at + _LONGEST_SYMBOL])
        for line, name in _SYMBOLS.items():
            if ahead.startswith(line):
                self.at += len(line)
                self.stack.append(_Symbol(name))
                return
        asked = b".".join(ahead.split(b"\n")[:2]).decode("ascii", "replace")
        raise _RefusedError(f"it asks for {asked!r}, and only numpy arrays are read")

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, _Symbol) or not isinstance(arguments, tuple) or len(arguments) != 3:
            raise _RefusedError("it calls something")
        first, second, third = arguments
        if called.name == _RECONSTRUCT:
            right = isinstance(first, _Symbol) and first.name == _NDARRAY and second == (0,) and third in (b"b", "b")
            made: object = _Draft()
        else:
            right = called.name == _DTYPE and first in (b"u1", "u1") and second in (0, 1) and third in (0, 1)
            made = _ByteType()
        if not right:
            raise _RefusedError(f"it calls {called.name} with other values than an array of bytes has")
        self.stack.append(made)

    def build(self) -> None:
        state = self.pop()
        target = self.top(object)
        if not isinstance(state, tuple) or not isinstance(target, (_Draft, _ByteType)):
            raise _RefusedError("it sets the state of something that is no array")
        if isinstance(target, _Draft):
            target.array = _array(state)
        elif state[1:3] not in ((b"|", None), ("|", None)):
            raise _RefusedError("its array is not of plain bytes")


def _array(state: tuple[Any, ...]) -> NDArray[np.uint8]:
    """The array that numpy would make of its version, shape, type, order of axes and bytes."""
    if len(state) != 5:
        raise _RefusedError("an array in it is not described by five values")
    _, shape, kind, fortran, content = state
    if not (isinstance(shape, tuple) and 1 <= len(shape) <= 4 and all(_is_number(n) and 0 <= n < 2**31 for n in shape)):
        raise _RefusedError("an array in it has no proper shape")
    if not isinstance(kind, _ByteType) or not isinstance(content, bytes):
        raise _RefusedError("an array in it is not of plain bytes")
    if math.prod(shape) != len(content):
        raise _RefusedError(f"an array of shape {shape} in it has {len(content):,} bytes")
    try:
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # dimensions whose product NumPy cannot hold, beside one of 0
        raise _RefusedError(f"an array of shape {shape} in it cannot be") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(value: Any) -> Content:
    """The dictionary with text for keys; refused where a value is not of a kind that these files have."""
    if not isinstance(value, dict):
        raise _RefusedError("it is no dictionary")
    content: Content = {}
    for key, item in value.items():
        if isinstance(item, _Draft) and item.array is not None:
            item = item.array
        elif isinstance(item, list):
            if not all(isinstance(part, (bytes, str)) or _is_number(part) for part in item):
                raise _RefusedError("a list in it holds something else than numbers and strings")
        elif not isinstance(item, (bytes, str)) and not _is_number(item):
            raise _RefusedError("a value in it is no number, string, list or array")
        name = key.decode("latin-1") if isinstance(key, bytes) else key
        if name in content:
            raise _RefusedError(f"{name!r} is in it twice")
        content[name] = item
    return content


_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: _Machine.protocol,
    ord("("): _Machine.mark,
    ord("q"): lambda machine: machine.put(1),
    ord("r"): lambda machine: machine.put(4),
    ord("h"): lambda machine: machine.get(1),
    ord("j"): lambda machine: machine.get(4),
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("K"): lambda machine: machine.stack.append(machine.number(1)),
    ord("M"): lambda machine: machine.stack.append(machine.number(2)),
    ord("J"): lambda machine: machine.stack.append(machine.number(4, signed=True)),
    ord("U"): lambda machine: machine.stack.append(machine.take(machine.number(1))),  # Python 2's str
    ord("T"): lambda machine: machine.stack.append(machine.take(machine.number(4))),
    ord("C"): lambda machine: machine.stack.append(machine.take(machine.number(1))),  # Python 3's bytes
    ord("B"): lambda machine: machine.stack.append(machine.take(machine.number(4))),
    ord("X"): _Machine.text,
    ord("]"): lambda machine: machine.stack.append([]),
    ord("a"): lambda machine: machine.append([machine.pop()]),
    ord("e"): lambda machine: machine.append(machine.since_mark()),
    ord("}"): lambda machine: machine.stack.append({}),
    ord("s"): lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    ord("u"): lambda machine: machine.set_items(machine.since_mark()),
    ord(")"): lambda machine: machine.stack.append(()),
    ord("t"): _Machine.tuple_since_mark,
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("c"): _Machine.symbol,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
}
