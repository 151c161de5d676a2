"""The machine that a result was computed on: processor, cores, memory, GPU and operating system. No host names, user
names or paths.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Machine = dict[str, str | int | float]

NOT_RECORDED = "machine not recorded"
_CPUINFO = Path("/proc/cpuinfo")
_MODEL_KEYS = ("model name", "cpu model", "cpu", "Hardware")  # in /proc/cpuinfo, by architecture


@functools.cache
def machine_info(device: str = "cpu") -> Machine:
    """The hardware and system that timings, and the last bits of results, may depend on.

    Args:
        device: The device of the work; for a GPU its name is included.

    Returns:
        The properties of this machine by name, without unknown ones.
    """
    info: Machine = {"processor": printable(_processor()), "cores": usable_cores(), "system": printable(_system())}
    if device != "cpu":
        import torch

        info["gpu"] = printable(torch.cuda.get_device_name(device))
    if memory := _memory():
        info["memory_gib"] = round(memory / 2**30, 1)
    return {name: value for name, value in info.items() if value}


def format_machine(info: Mapping[str, Any] | None) -> str:
    """Format the result of `machine_info`.

    Args:
        info: The properties by name; results of earlier versions have none.

    Returns:
        The text.

    Example:
        >>> format_machine({"processor": "Xeon", "cores": 2, "memory_gib": 16.0})
        'Xeon, 2 cores, 16.0 GiB'
    """
    if not info:
        return NOT_RECORDED
    cores = info.get("cores")
    memory = info.get("memory_gib")
    parts = [
        info.get("processor"),
        cores and f"{cores} core{'' if cores == 1 else 's'}",
        memory and f"{memory} GiB",
        info.get("gpu"),
        info.get("system"),
    ]
    return ", ".join(str(part) for part in parts if part) or NOT_RECORDED


def processor_maker() -> str:
    """The vendor ID of an x86 processor, such as GenuineIntel; empty if unknown."""
    vendor = _cpuinfo().get("vendor_id") or platform.processor()  # on Windows, the vendor is its last word
    return vendor.split()[-1] if vendor else ""


def _processor() -> str:
    info = _cpuinfo()
    return next((info[key] for key in _MODEL_KEYS if info.get(key)), "") or platform.processor() or platform.machine()


def _cpuinfo() -> dict[str, str]:
    """Linux's entry for the last processor; empty on other systems."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def usable_cores() -> int:
    """How many cores this process may use; 0 if unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _memory() -> int:
    """The machine's memory in bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _system() -> str:
    """The operating system and its version; on Linux the distribution."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def printable(text: str) -> str:
    """Text from outside on one line, without characters that a terminal would interpret."""
    return "".join(sign for sign in re.sub(r"\s+", " ", text) if sign.isprintable()).strip()
