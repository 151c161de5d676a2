"""The machine that a result was had on: its processor, cores, memory, GPU and operating system. No names of hosts or
users, no paths.
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
_NAMES = ("model name", "cpu model", "cpu", "Hardware")  # of the processor in it, by architecture


@functools.cache
def machine(device: str = "cpu") -> Machine:
    """What times, and the last bits of numbers, may depend on, of work on the device; what the system does not tell is
    left out.
    """
    found: Machine = {"processor": printable(_processor()), "cores": usable_cores(), "system": printable(_system())}
    if device != "cpu":
        import torch

        found["gpu"] = printable(torch.cuda.get_device_name(device))
    if memory := _memory():
        found["memory_gib"] = round(memory / 2**30, 1)
    return {name: value for name, value in found.items() if value}


def described(found: Mapping[str, Any] | None) -> str:
    """A machine in words; results of older versions have none."""
    if not found:
        return NOT_RECORDED
    cores = found.get("cores")
    memory = found.get("memory_gib")
    parts = [
        found.get("processor"),
        cores and f"{cores} core{'' if cores == 1 else 's'}",
        memory and f"{memory} GiB",
        found.get("gpu"),
        found.get("system"),
    ]
    return ", ".join(str(part) for part in parts if part) or NOT_RECORDED


def processor_maker() -> str:
    """By the name that x86 processors tell, such as GenuineIntel; empty where the system does not tell."""
    told = _cpuinfo().get("vendor_id") or platform.processor()  # which on Windows ends with it
    return told.split()[-1] if told else ""


def _processor() -> str:
    told = _cpuinfo()
    return next((told[name] for name in _NAMES if told.get(name)), "") or platform.processor() or platform.machine()


def _cpuinfo() -> dict[str, str]:
    """What Linux tells of the last of its processors; empty elsewhere."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def usable_cores() -> int:
    """How many cores this process may use; 0 where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _memory() -> int:
    """Bytes of it in the machine, 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _system() -> str:
    """The operating system with its version; of Linux the distribution."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def printable(text: str) -> str:
    """A text that somebody else wrote, on one line and without what a terminal would take for commands."""
    return "".join(sign for sign in re.sub(r"\s+", " ", text) if sign.isprintable()).strip()
