"""Put results into the documents that quote them, so that no number is typed by hand.

A document marks a place with `<!-- results:begin FILE -->` and `<!-- results:end -->`. What stands between them is
written here: for a study's table.md its table (`table.md#er,fs-er`: the rows of these methods), for a run's result.json
the summary that `steppe run` prints, for other JSON a table of one of its lists (`update_cost.json#updates`), for a
study's directory what each method keeps in the end (`pmnist#bytes`).
`--check` changes nothing and fails where a document is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from steppe.tables import summary

ROOT = Path(__file__).parents[1]
_MARKED = re.compile(r"(<!-- results:begin (\S+) -->\n)(.*?)(<!-- results:end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The document with every marked place up to date."""
    return _MARKED.sub(lambda place: place[1] + _content(*place[2].partition("#")[::2]) + place[4], text)


def _content(file: str, methods: str) -> str:
    source = ROOT / file
    if source.is_dir() and methods == "bytes":
        return _bytes_table(source)
    if source.suffix == ".md":
        header, rule, *rows = [line for line in source.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        by_method = {row.split("|")[1].strip(): row for row in rows}
        chosen = [by_method[name] for name in methods.split(",")] if methods else rows
        return "\n".join([header, rule, *chosen, ""])
    if methods:
        return _bench_table(json.loads(source.read_text(encoding="utf-8"))[methods])
    lines = summary(json.loads(source.read_text(encoding="utf-8"))).splitlines()
    return "\n".join(["```text", *(line for line in lines if " updates in " not in line), "```", ""])


def _bytes_table(study: Path) -> str:
    """What the first seed of each method holds after its last task, by kind, in kilobytes."""
    order = [row["method"] for row in json.loads((study / "table.json").read_text(encoding="utf-8"))["rows"]]
    files = {method: study / method / "seed-0" / "result.json" for method in order}
    held = {method: json.loads(file.read_text(encoding="utf-8"))["bytes"] for method, file in files.items()}
    kinds = list(dict.fromkeys(kind for part in held.values() for kind in part))
    lines = [["method", *kinds, "sum"], ["---"] * (len(kinds) + 2)]
    for method, part in held.items():
        kilobytes = [f"{part[kind] / 1000:.0f}" if part.get(kind) else "" for kind in kinds]
        lines.append([method, *kilobytes, f"{sum(part.values()) / 1000:.0f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _bench_table(found: list[dict[str, object]] | dict[str, dict[str, object]]) -> str:
    """Rows of plain values, with their names if they have some, numbers to three digits; what is nested stays in the
    file.
    """
    rows = found if isinstance(found, list) else [{"": name, **row} for name, row in found.items()]
    columns = [key for key, value in rows[0].items() if not isinstance(value, (dict, list))]
    lines = [columns, ["---"] * len(columns), *([_short(row[column]) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    """Fill every document, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document is out of date")
    check = parser.parse_args().check
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = document.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(str(document.relative_to(ROOT)))
            if not check:
                document.write_text(after, encoding="utf-8")
    print("\n".join(stale) if stale else "everything is up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
