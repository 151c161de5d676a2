"""Memory that a process frees and soon wants again.

The GNU C library gives large arrays back to the system as soon as they are freed, and the system clears every page of
them before it hands them out again. Convolutions free and take the same arrays at every update, and wait for their
pages to be cleared every time (`bench/freed_memory.py`).
"""

from __future__ import annotations

import ctypes
import os
import platform

from steppe.fast.switch import fast_paths_enabled

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
# Bytes: larger arrays, and what lies free at the end beyond this, still go back to the system. Older versions of the
# library take no more than the second for the first of the two.
_MOST, _MOST_OF_OLD = 2**30, 2**25
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the process keep what it frees, from now on, but for a free end of more than a gibibyte; whether it will.

    For processes of our own: a library has no business to change its user's. It does nothing where the C library is
    another one, or where the environment says already how memory is to be handled.
    """
    own_settings = any(os.environ.get(name) for name in _VARIABLES)
    if platform.libc_ver()[0] != "glibc" or own_settings or not fast_paths_enabled():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another allocator in its place
        return False
    mapped = any(mallopt(_MMAP_THRESHOLD, most) == 1 for most in (_MOST, _MOST_OF_OLD))
    return mapped and mallopt(_TRIM_THRESHOLD, _MOST) == 1
