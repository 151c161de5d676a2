"""Results as people read them: one run's report, a study's table in Markdown, LaTeX and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from steppe.results.grouping import explicit_settings, group_by_settings
from steppe.results.published import Figure, notes_on_marks, published
from steppe.runtime.environment import format_machine

Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One method of a study: figures over its seeds."""

    method: str
    seeds: list[int]
    acc: Figure | None
    bwt: Figure | None
    learning_acc: Figure | None
    forgetting: Figure | None
    forward_transfer: Figure | None
    seconds: Figure | None
    paper: dict[str, Figure]
    released: dict[str, Figure]


def rows(results: Sequence[Result], measure: str | None = None) -> list[Row]:
    """Results by method and settings, in the order in which they first appear; mean and sample standard deviation. Time
    is told by a measure that serves all of them, or those that they are shown beside.
    """
    measure = measure or timed_by(results)
    groups = variants(results).items()
    return [row_of(label, [results[place] for place in places], measure) for label, places in groups]


def variants(results: Sequence[Result]) -> dict[str, list[int]]:
    """The places of results that differ in their seed alone, one for each seed, by the method's name and, where it was
    run with several settings, these.
    """
    methods: dict[str, list[int]] = {}
    for place, result in enumerate(results):
        methods.setdefault(result["method"], []).append(place)
    found = {}
    for method, places in methods.items():
        own = [results[place] for place in places]
        for label, group in group_by_settings(method, own, ("benchmark", "training", "method")).items():
            of_seed: dict[int, int] = {}
            for member in group:
                of_seed.setdefault(own[member]["seed"], places[member])
            found[label] = list(of_seed.values())
    return found


def comparable(result: Result) -> bool:
    """Whether published figures may stand beside a result: its tasks, training and method are the paper's."""
    return result["full_length"] and not explicit_settings(result, ("method",))


def timed_by(results: Iterable[Result]) -> str:
    """Which seconds of results can be compared: the processor's if all were recorded with them, else those on the wall,
    on which the machine may have done other work. Where a GPU computed, the processor's tell nothing.
    """
    cpu = all("cpu_seconds" in result and result["config"]["run"].get("device", "cpu") == "cpu" for result in results)
    return "cpu_seconds" if cpu else "seconds"


def seconds_per_task(result: Result, measure: str) -> float:
    """Time of learning, without testing, by one of the measures that `timed_by` gives."""
    seconds = result[measure]
    return float(seconds["train"] + seconds["memory"]) / max(len(result["accuracy"]), 1)


def row_of(label: str, results: Sequence[Result], measure: str) -> Row:
    """Figures over the seeds of one method with one choice of settings; of time by one of the measures that `timed_by`
    gives.
    """

    def over_seeds(value: Callable[[Result], float | None]) -> Figure | None:
        values = [found for result in results if (found := value(result)) is not None]
        if not values:  # tasks learnt together have no backward transfer
            return None
        return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    first = results[0]
    beside = all(comparable(result) for result in results)
    return Row(
        method=label,
        seeds=sorted(result["seed"] for result in results),
        acc=over_seeds(lambda result: result["acc"]),
        bwt=over_seeds(lambda result: result["bwt"]),
        learning_acc=over_seeds(lambda result: result["learning_acc"]),
        forgetting=over_seeds(lambda result: result["forgetting"]),
        forward_transfer=over_seeds(lambda result: result.get("forward_transfer")),
        seconds=over_seeds(lambda result: sum(result[measure].values())),
        paper=published(first["benchmark"], first["method"]) if beside else {},
        released=published(first["benchmark"], first["method"], "released") if beside else {},
    )


SECONDS = {"seconds": "seconds", "cpu_seconds": "CPU seconds"}
"""What each measure of time is called."""
_HEADER = ("method", "seeds", "ACC", "BWT", "paper ACC", "paper BWT", "released ACC", "released BWT", "seconds")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, for any of the formats."""
    return (
        row.method,
        str(len(row.seeds)),
        _text(row.acc),
        _text(row.bwt),
        *(_text(source.get(measure)) for source in (row.paper, row.released) for measure in ("acc", "bwt")),
        "" if row.seconds is None else f"{row.seconds.mean:.0f}",
    )


def markdown(results: Sequence[Result]) -> str:
    """The study's table in Markdown."""
    lines = [_line(_HEADER), _line(["---"] * len(_HEADER)), *(_line(cells(each)) for each in rows(results))]
    seconds = SECONDS[timed_by(results)]
    notes = ["", f"ACC and BWT (over T−1) in percent, mean ± standard deviation over seeds; {seconds} per run."]
    notes += [*notes_on_runs(results), *notes_on_marks("".join(lines)), *_remarks(results)]
    return "\n".join([*lines, *notes]) + "\n"


def notes_on_runs(results: Sequence[Result]) -> list[str]:
    """Why published figures are missing beside some results, where they are for a reason, and what was left out."""
    notes = []
    if not all(result["full_length"] for result in results):
        notes.append("Tasks or training differ from the benchmark's own, so published figures do not apply.")
    elif not all(comparable(result) for result in results):
        notes.append("Where a method's settings differ from its preset, published figures do not apply.")
    if repeated := len(results) - sum(map(len, variants(results).values())):
        notes.append(f"{repeated} run(s) with a seed that is there already, and the same settings, are left out.")
    for label, places in variants(results).items():
        told = [results[place]["versions"] for place in places]
        plugins = dict.fromkeys(name for versions in told for name in versions if name.endswith(".py"))
        if differing := [name for name in plugins if len({versions.get(name) for versions in told}) > 1]:
            notes.append(f"The runs of {label} are of different versions of {', '.join(differing)}.")
    return notes


def _remarks(results: Sequence[Result]) -> list[str]:
    """What a reader must know about the tasks, each once."""
    found = dict.fromkeys(remark for result in results for remark in result.get("remarks", []))
    return [f"{remark[0].upper()}{remark[1:]}" for remark in found]


def latex(results: Sequence[Result]) -> str:
    """The study's table in LaTeX (booktabs)."""

    def line(values: Sequence[str]) -> str:
        return " & ".join(values) + r" \\"

    body = [line([_latex_text(cells(row)[0]), *map(_latex_number, cells(row)[1:])]) for row in rows(results)]
    columns = "l" + "r" * (len(_HEADER) - 1)
    notes = [*notes_on_marks("".join(text for row in rows(results) for text in cells(row))), *_remarks(results)]
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(_HEADER), r"\midrule", *body, r"\bottomrule"]
        + [rf"\multicolumn{{{len(_HEADER)}}}{{l}}{{\footnotesize {_latex_text(note)}}} \\" for note in notes]
        + [r"\end{tabular}", ""]
    )


def as_json(results: Sequence[Result], command: str) -> str:
    """The study's table with everything that identifies it."""

    def plain(figure: Figure | None) -> dict[str, Any] | None:
        if figure is None:
            return None
        return {
            "mean": figure.mean,
            "std": figure.std,
            **({"note": notes_on_marks(figure.mark)} if figure.mark else {}),
        }

    table = [
        {
            "method": row.method,
            "seeds": row.seeds,
            **{name: plain(getattr(row, name)) for name in ("acc", "bwt", "learning_acc", "forgetting", "seconds")},
            **({} if row.forward_transfer is None else {"forward_transfer": plain(row.forward_transfer)}),
            "paper": {measure: plain(figure) for measure, figure in row.paper.items()},
            "released": {measure: plain(figure) for measure, figure in row.released.items()},
        }
        for row in rows(results)
    ]
    versions = [dict(pairs) for pairs in dict.fromkeys(tuple(result["versions"].items()) for result in results)]
    machines = [dict(pairs) for pairs in dict.fromkeys(tuple(result.get("machine", {}).items()) for result in results)]
    identified = {
        "benchmark": results[0]["benchmark"],
        "command": command,
        "full_length": all(result["full_length"] for result in results),
        "remarks": _remarks(results),
        "versions": versions,
        "timed_by": timed_by(results),
        "machines": [machine for machine in machines if machine],
        "rows": table,
    }
    return json.dumps(identified, indent=1) + "\n"


_MEASURES = {
    "acc": "ACC",
    "bwt": "BWT",
    "learning_acc": "learning accuracy",
    "forgetting": "forgetting",
    "forward_transfer": "forward transfer",
}


def summary(result: Result) -> str:
    """One run in a few lines, the published figures beside it."""
    measured = {words: result[key] for key, words in _MEASURES.items() if result.get(key) is not None}
    lines = [
        f"{result['benchmark']} · {result['method']} · seed {result['seed']}",
        "  " + "   ".join(f"{words} {value:.2f}" for words, value in measured.items()),
    ]
    for source, words in (("paper", "paper"), ("released", "its released code")):
        figures = published(result["benchmark"], result["method"], source) if comparable(result) else {}
        if figures:
            seeds = " (5 seeds)" if any(figure.std is not None for figure in figures.values()) else ""
            lines.append(
                f"  {words}{seeds}: " + "   ".join(f"{name.upper()} {figure}" for name, figure in figures.items())
            )
            lines += [f"  {note}" for note in notes_on_marks(lines[-1])]
    if not result["full_length"]:
        lines.append("  tasks or training differ from the benchmark's own: published figures do not apply")
    elif not comparable(result):
        lines.append("  the method's settings differ from its preset: published figures do not apply")
    lines += [f"  {remark}" for remark in result.get("remarks", [])]
    seconds = result["seconds"]
    cpu = f", {sum(spent.values()):.0f} CPU s" if (spent := result.get("cpu_seconds")) else ""
    lines.append(
        f"  {result['updates']} updates in {sum(seconds.values()):.0f} s{cpu} "
        f"(training {seconds['train']:.0f}, testing {seconds['evaluate']:.0f}, memory {seconds['memory']:.1f}); "
        + ", ".join(f"{kind} {size / 2**20:.2f} MiB" for kind, size in result["bytes"].items())
    )
    return "\n".join(lines)


def run_report(result: Result) -> str:
    """report.md of one run: figures, settings, and the accuracy matrix."""
    matrix = result["accuracy"]
    names = [str(place + 1) for place in range(len(matrix))]
    table = [
        _line(["after task", *names]),
        _line(["---:"] * (len(names) + 1)),
        *(
            _line([name, *("" if value is None else f"{value:.1f}" for value in row)])
            for name, row in zip(names, matrix, strict=True)
        ),
    ]
    settings = [
        f"- `{section}.{key}` = `{value}`"
        for section in ("benchmark", "training", "method")
        for key, value in result["config"][section].items()
    ]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    on = format_machine(result.get("machine"))
    return "\n".join(
        [f"# {result['benchmark']}, {result['method']}, seed {result['seed']}", "", "```", summary(result), "```", ""]
        + ["## Test accuracy on each task (column) after each task (row), percent", "", *table, ""]
        + ["## How to run it again", "", "```", result["command"], "```", "", versions, "", on, ""]
        + ["## Settings", "", *settings, ""]
    )


def _text(figure: Figure | None) -> str:
    return "" if figure is None else str(figure)


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _latex_text(cell: str) -> str:
    for special in "_&%#":
        cell = cell.replace(special, "\\" + special)
    return cell.replace("†", r"\dag{}").replace("‡", r"\ddag{}")


def _latex_number(cell: str) -> str:
    """A number with its deviation in maths mode, so that the minus and the ± are set right."""
    maths = cell.replace(" ± ", r" \pm ").replace("†", r"^\dagger").replace("‡", r"^\ddagger")
    return f"${maths}$" if cell else "--"
