"""The content of the marked places in documents: tables of studies, summaries of runs, single values."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from filling.studies import by_number, methods_in_order
from steppe.experiments.run_directory import RESULT, read_result
from steppe.learning.accuracy_matrix import AccuracyMatrix
from steppe.results.detailed_table import details
from steppe.results.tables import summary

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(<!-- results:begin (\S+) -->\n)(.*?)(<!-- results:end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- result: ([^>]+?) -->)([^<]*)(<!-- end -->)")
_DIFFERENCE = " - "
_BESIDE = "beside="


def fill_places(text: str) -> str:
    """Update every marked place of a document.

    Args:
        text: The document.
    """
    text = BLOCK.sub(lambda place: place[1] + _content(*place[2].partition("#")[::2]) + place[4], text)
    return VALUE.sub(lambda place: place[1] + _value(place[2], place[3]) + place[4], text)


def _content(file: str, chosen: str) -> str:
    source = ROOT / file
    if source.is_dir():
        if chosen.startswith(_BESIDE):
            return _first_tasks(source, ROOT / chosen.removeprefix(_BESIDE))
        return {"bytes": _bytes_table, "details": _details, "parts": _parts_table}[chosen](source)
    if source.suffix == ".md":
        return _study_table(source, chosen.split(",") if chosen else None)
    if chosen:
        return _bench_table(json.loads(source.read_text(encoding="utf-8"))[chosen])
    lines = summary(read_result(source.parent)).splitlines()
    return "\n".join(["```text", *(line for line in lines if " updates in " not in line), "```", ""])


def _value(address: str, current: str) -> str:
    """A value, or a difference of values, with as many decimals as the current text; `- #PATH` is in the same file."""
    first, *others = address.split(_DIFFERENCE)
    file = first.partition("#")[0]
    value = look_up(first) - sum(look_up(other if other[0] != "#" else file + other) for other in others)
    decimals = len(current.partition(".")[2])
    return f"{value:.{decimals}f}"


def look_up(address: str) -> float:
    """Look up the number at FILE#PATH in a JSON or TOML file.

    Args:
        address: PATH consists of keys and indices separated by dots; in a list of rows a key selects the row that
            contains it as a value.
    """
    file, _, path = address.partition("#")
    text = (ROOT / file).read_text(encoding="utf-8")
    found: Any = tomllib.loads(text) if file.endswith(".toml") else json.loads(text)
    for name in path.split("."):
        if isinstance(found, list):
            found = found[int(name)] if name.isdigit() else next(row for row in found if name in row.values())
        else:
            found = found[name]
    return float(found)


def _study_table(file: Path, methods: list[str] | None) -> str:
    """A study's table, all rows or those of some methods, with memory instead of seconds: other runs were running at
    the same time.
    """
    header, *rows = _table_cells(file)
    by_method = {row[0]: row[:-1] for row in rows}
    lines = [[*by_method[method], *_kilobytes(file.parent / method)] for method in methods or by_method]
    assert header[-1] == "seconds"
    return _lines([[*header[:-1], "kB kept", "kB working"], *lines])


def _kilobytes(runs: Path) -> tuple[str, str]:
    """A method's memory besides the network at the end, kept and working, mean over its runs."""
    results = [read_result(file.parent) for file in runs.glob(f"*/{RESULT}")]
    sizes = [result.kept_bytes for result in results], [result.working_bytes for result in results]
    kept, working = (f"{fmean(each) / 1000:.0f}" for each in sizes)
    return kept, working


def _details(study: Path) -> str:
    """The table of `steppe show --details`, methods in the order of the study's table."""
    runs = [path.parent for name in methods_in_order(study) for path in sorted((study / name).glob(f"*/{RESULT}"))]
    return details({run: read_result(run) for run in runs})


def _table_cells(file: Path) -> list[list[str]]:
    """Header and rows of a study's table."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [header, *rows]


def _lines(cells: list[list[str]]) -> str:
    """Header and rows as a table."""
    header, *rows = cells
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *rows])


def _parts_table(recipe: Path) -> str:
    """ACC and BWT of all methods in all studies of a recipe, one line each."""
    lines = []
    for part in sorted((file.parent for file in recipe.glob("*/table.md")), key=by_number):
        header, *rows = _table_cells(part / "table.md")
        shown = [header.index(name) for name in ("method", "seeds", "ACC", "BWT")]
        lines += [[part.name, *(row[column] for column in shown)] for row in rows]
    return _lines([["study", "method", "seeds", "ACC", "BWT"], *lines])


def _first_tasks(study: Path, longer: Path) -> str:
    """The runs of a study on the first tasks only, and those of a longer study after the same number of tasks."""
    lines = [["study", "method", "seed", "tasks", "ACC", "BWT", "learning accuracy", "forgetting"]]
    for file in sorted(study.glob(f"*/*/{RESULT}")):
        tasks = read_result(file.parent).num_tasks
        for each in (longer, study):
            run = read_result(each / file.parent.relative_to(study))
            matrix = AccuracyMatrix([row[:place] for place, row in enumerate(run.accuracy[:tasks], start=1)])
            measures = (matrix.acc, matrix.bwt, matrix.learning_acc, matrix.forgetting)
            named = [str(each.relative_to(ROOT / "results")), run.method, str(run.seed), str(tasks)]
            lines.append([*named, *(f"{measure:.2f}" for measure in measures)])
    return _lines(lines)


def _bytes_table(study: Path) -> str:
    """Memory of each method's first seed after its last task, by kind, in kilobytes."""
    files = {method: study / method / "seed-0" / RESULT for method in methods_in_order(study)}
    held = {method: read_result(file.parent) for method, file in files.items()}
    kinds = list(dict.fromkeys(kind for result in held.values() for kind in result.bytes))
    lines = [["method", *kinds, "kept", "working"]]
    for method, result in held.items():
        part = result.bytes
        kilobytes = [f"{part[kind] / 1000:.0f}" if part.get(kind) else "" for kind in kinds]
        lines.append([method, *kilobytes, f"{result.kept_bytes / 1000:.0f}", f"{result.working_bytes / 1000:.0f}"])
    return _lines(lines)


def _bench_table(found: list[dict[str, object]] | dict[str, dict[str, object]]) -> str:
    """A table of rows of plain values, with their names if they have some; nested values are left out."""
    rows = found if isinstance(found, list) else [{"": name, **row} for name, row in found.items()]
    columns = [key for key, value in rows[0].items() if not isinstance(value, (dict, list))]
    header = [column.replace("_", " ") for column in columns]  # spaces, so that wide tables can wrap
    return _lines([header, *([_short(row[column]) for column in columns] for row in rows)])


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
