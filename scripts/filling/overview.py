"""The overview of all results, results/README.md: what is complete, what was shortened, on what machine, which code."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filling.studies import SHORTER, Studies, counted_seeds, short_commit
from steppe.machine import described
from steppe.reproduction import RECIPES
from steppe.runs import RESULT

_HEAD = """\
# Results

Written by `scripts/fill_results.py` from the files beside it; a test checks that it is up to date. The files are
written by `steppe` and by the programs in `bench/`, never by hand. In a study's directory `table.md`, `table.tex` and
`table.json` hold its table, the last with the command, the seeds and the versions behind every row; each run's
`result.json` has its own, and `log.jsonl` what happened in it. The weights after each task are not kept here; the
command brings them back.

*Complete* means: the benchmark's own tasks and training, every setting its preset's, and all methods and seeds of the
recipe (`steppe reproduce`) if there is one. Differences are from the presets of today.
"""


def overview(results: Path) -> str:
    """The whole page."""
    folders = [path for path in sorted(results.iterdir()) if path.is_dir()]
    studies = [Studies.read(path) for path in folders if next(path.rglob(RESULT), None)]
    others = [path for path in folders if not next(path.rglob(RESULT), None)]
    parts = [_HEAD, _table(["directory", "tasks", "methods", "seeds", "state"], map(_line, studies))]
    parts += [_section(study) for study in studies]
    parts += [_programs(folder) for folder in others]
    return "\n".join(parts)


def _line(studies: Studies) -> list[str]:
    name = studies.path.name
    methods = ", ".join(f"`{method}`" for method in studies.methods)
    many = f"{len(studies.methods)} methods"
    return [
        f"[`{name}`](#{name})",
        f"`{studies.benchmark}`",
        methods if len(studies.methods) < 6 else many,
        _seeds(studies).removeprefix("seeds ").removeprefix("seed "),
        _state(studies),
    ]


def _state(studies: Studies) -> str:
    """Complete, or why not."""
    length = [(key, value) for key, value in studies.shared if key in SHORTER]
    words = []
    own = {change for changes in studies.own_changes.values() for change in changes}
    wanted = studies.path.name == studies.recipe  # then settings that vary are what is studied
    others = {change for change in studies.shared | (set() if wanted else own) if change[0] not in SHORTER}
    asked = {change for change in others if any(f"{change[0]}=" in result["command"] for result in studies.results)}
    if asked:
        words.append(f"other settings: {_assigned(asked)}")
    if others - asked:
        words.append(f"the presets of the time: {_assigned(others - asked)}")
    if studies.missing:
        words.append(f"without {', '.join(studies.missing)}")
    if length:
        return "; ".join([f"shortened: {_assigned(length)}", *words])
    if not studies.full_length:
        return "; ".join(["other tasks or training than the benchmark's own", *words])
    return "; ".join(["full length", *words]) if words else "complete"


def _section(studies: Studies) -> str:
    state = _state(studies)
    facts = [
        f"**State:** {state}.",
        f"**Methods:** {', '.join(f'`{method}`' for method in studies.methods)}; {_seeds(studies)}.",
        f"**Settings:** {_settings(studies)}.",
        f"**Machine:** {', '.join(studies.machines).removeprefix('machine ')}.",
        f"**Code:** {', '.join(studies.versions)}; {', '.join(studies.commits)}.",
        *(f"**Remark:** {remark}" for remark in _remarks(studies)),
        *([f"**Landscapes:** {landscapes}."] if (landscapes := _landscapes(studies.path)) else []),
    ]
    commands = "\n".join(f"$ {command}" for command in studies.commands)
    listed = "\n".join(f"- {fact}" for fact in facts)
    return f"## {studies.path.name}\n\n{_purpose(studies)}\n\n{listed}\n\n```console\n{commands}\n```\n"


def _purpose(studies: Studies) -> str:
    """What it is for, as the recipe or the catalogue has it."""
    if studies.recipe is not None:
        return f"{RECIPES[studies.recipe].text} (`steppe reproduce {studies.recipe}`)"
    file = Path(__file__).parents[2] / "src" / "steppe" / "catalogue.json"
    first = str(json.loads(file.read_text(encoding="utf-8"))[studies.benchmark]).splitlines()[0]
    return first.partition(": ")[2]


def _settings(studies: Studies) -> str:
    own = [f"in `{name}` {_assigned(changes)}" for name, changes in studies.own_changes.items()]
    told = [*([_assigned(studies.shared)] if studies.shared else []), *own]
    return "; ".join(told) + "; otherwise the presets'" if told else "the presets'"


def _seeds(studies: Studies) -> str:
    """Of all methods alike, or method by method."""
    by_group = {group.name: counted_seeds(group.seeds) for group in studies.groups}
    alike = set(by_group.values())
    if len(alike) == 1:
        return alike.pop()
    return ", ".join(f"{seeds} of `{name}`" for name, seeds in by_group.items())


def _remarks(studies: Studies) -> list[str]:
    found = dict.fromkeys(remark for result in studies.results for remark in result.get("remarks", []))
    return [f"{remark[:1].upper()}{remark[1:]}" for remark in found]


def _landscapes(path: Path) -> str:
    runs = len(list(path.rglob("landscape.json")))
    summed_up = ", `flatness.json` sums them up" if (path / "flatness.json").exists() else ""
    return f"`landscape.json` beside {runs} run{'' if runs == 1 else 's'}{summed_up}" if runs else ""


def _programs(folder: Path) -> str:
    """What programs printed: a line for each file."""
    files = sorted(folder.glob("*.json"))
    found = {file: json.loads(file.read_text(encoding="utf-8")) for file in files}
    lines = [_program_line(file, told) for file, told in found.items()]
    return f"## {folder.name}\n\n" + _table(["file", "what", "command", "machine", "code"], lines)


def _program_line(file: Path, told: dict[str, Any]) -> list[str]:
    program = file.parents[2] / str(told["command"]).split()[1]
    what = (ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    where = described(told.get("machine")).removeprefix("machine ")
    return [f"`{file.name}`", " ".join(what.split()), f"`{told['command']}`", where, short_commit(told["versions"])]


def _assigned(changes: Iterable[tuple[str, Any]]) -> str:
    shown = ((key, str(value).lower() if isinstance(value, bool) else value) for key, value in sorted(changes))
    return ", ".join(f"`{key}={value}`" for key, value in shown)


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines])
