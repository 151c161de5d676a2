"""Keep memory that a process frees and soon needs again.

The GNU C library returns large freed arrays to the system, which clears every page before it hands them out again.
Convolutions free and allocate the same arrays at every update, and wait for this every time (`bench/freed_memory.py`).
"""

from __future__ import annotations

import ctypes
import os
import platform

from steppe.fast.switch import fast_paths_enabled

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
# Bytes: larger arrays, and a larger free end of the heap, are still returned to the system. Older versions of the
# library accept at most the second value for the mmap threshold.
_MOST, _MOST_OF_OLD = 2**30, 2**25
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the process keep what it frees from now on, except for a free end of more than a gibibyte.

    This is for the command line's own processes: a library should not change its user's process. It does nothing with
    another C library, when the environment already configures malloc, or with `STEPPE_FAST=0`.

    Returns:
        Whether the process keeps its memory.
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
