"""Raise an exception at each instant of a call in turn at which another thread or a signal could raise one.

The interpreter looks for such exceptions where a function begins and after each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class SplitError(BaseException):
    """Raised between two calls."""


def split_everywhere(call: Callable[[], object], *functions: Callable[..., Any]) -> Iterator[int]:
    """Run `call` again and again, each time raising one instant later within the named functions.

    Args:
        call: What to interrupt.
        functions: Where to raise: functions or generators, without their decorators.

    Yields:
        The number of the instant, after each call that was interrupted; it ends when a call gets through.
    """
    codes = {_code_of(function) for function in functions}
    instant = 0
    while True:
        instant += 1
        if not _interrupt(call, codes, instant):
            return
        yield instant


def _code_of(function: Callable[..., Any]) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code


def _interrupt(call: Callable[[], object], codes: set[CodeType], at: int) -> bool:
    passed = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal passed
        if frame.f_code in codes and event in ("call", "c_call", "c_return"):
            passed += 1
            if passed == at:
                raise SplitError

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except SplitError:
        return True
    finally:
        sys.setprofile(before)
    return False
