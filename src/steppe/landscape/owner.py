"""Which run a landscape is of: its file names the run, and is read only where that run lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steppe.config import RunConfig
from steppe.errors import RunError, SteppeError
from steppe.landscape.files import LANDSCAPE, Landscape, read_landscape


def identity(result: Mapping[str, Any]) -> dict[str, Any]:
    """What names a run: benchmark, method and seed, and a digest of all settings that its numbers depend on.

    Of a result.json, or of as much of it as is known before the end.
    """
    named = {key: result[key] for key in ("benchmark", "method", "seed")}
    settings = {section: values for section, values in result["config"].items() if section != "run"}
    described = json.dumps({"seed": result["seed"], **settings}, sort_keys=True)
    return {**named, "config": hashlib.sha256(described.encode()).hexdigest()[:16]}


def read_landscape_of(path: Path, result: Mapping[str, Any]) -> Landscape | None:
    """The landscape in a finished run's directory, None where there is none; one of another run is refused."""
    file = path / LANDSCAPE
    if not file.exists():
        return None
    found, own = read_landscape(file), identity(result)
    for key in ("benchmark", "method", "seed"):
        if found.run[key] != own[key]:
            raise _of_another(file, f"{key} {found.run[key]}, not {own[key]}")
    if found.run["config"] not in (own["config"], _with_later_settings(result)):
        raise _of_another(file, "other settings")
    return found


def _with_later_settings(result: Mapping[str, Any]) -> str | None:
    """The digest of the run with the defaults of settings that came after it, as earlier versions took it. Nobody's
    plugin is run for it.
    """
    if result["config"]["run"].get("plugins"):
        return None
    try:
        filled = RunConfig.from_mapping(result["config"]).as_dict()
    except SteppeError:  # settings of a later version, or of a method of somebody's own
        return None
    return str(identity({**result, "config": filled})["config"])


def _of_another(file: Path, told: str) -> RunError:
    return RunError(f"{file} is the landscape of another run ({told}): remove it and measure again.")
