"""Results for readers: the summary and report of one run; a study's table in Markdown, LaTeX and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from steppe.results.grouping import ALL_SECTIONS, explicit_settings, group_by_settings
from steppe.results.published import PublishedScore, footnotes, published_scores
from steppe.results.schema import RunResult, TimeMeasure
from steppe.results.statistics import MeanStd, mean_std
from steppe.runtime.environment import format_machine


@dataclass(frozen=True)
class Row:
    """One method of a study: its figures over seeds; None where the method has none."""

    method: str
    seeds: list[int]
    acc: MeanStd | None
    bwt: MeanStd | None
    learning_acc: MeanStd | None
    forgetting: MeanStd | None
    forward_transfer: MeanStd | None
    seconds: MeanStd | None
    paper: dict[str, PublishedScore]
    released: dict[str, PublishedScore]


def rows(results: Sequence[RunResult], measure: TimeMeasure | None = None) -> list[Row]:
    """The rows of a table.

    Args:
        results: The results of one benchmark.
        measure: How to measure time; None for the best measure that all results have.

    Returns:
        One row for each method and choice of settings, in order of first appearance.
    """
    measure = measure or common_time_measure(results)
    groups = group_by_variant(results).items()
    return [build_row(label, [results[index] for index in indices], measure) for label, indices in groups]


def group_by_variant(results: Sequence[RunResult]) -> dict[str, list[int]]:
    """Group results that differ in the seed alone; a repeated seed is left out.

    Returns:
        The indices of the results in each group, by the method's name, with the settings that set the group apart if
        the method was run with several.
    """
    methods: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        methods.setdefault(result.method, []).append(index)
    variants = {}
    for method, indices in methods.items():
        same_method = [results[index] for index in indices]
        for label, group in group_by_settings(method, same_method, ALL_SECTIONS).items():
            by_seed: dict[int, int] = {}
            for member in group:
                by_seed.setdefault(same_method[member].seed, indices[member])
            variants[label] = list(by_seed.values())
    return variants


def is_comparable(result: RunResult) -> bool:
    """Whether published figures apply to a result: its tasks, training and method are the paper's."""
    return result.is_canonical and not explicit_settings(result, ("method",))


def common_time_measure(results: Iterable[RunResult]) -> TimeMeasure:
    """The measure of time by which all results can be compared.

    CPU time is better, as other work on the machine does not change it. But results of earlier versions may lack it,
    and it means nothing for a GPU.

    Args:
        results: The results.

    Returns:
        `cpu_seconds` if all results have it and ran on the CPU, else `seconds`.
    """
    cpu = all(result.cpu_seconds is not None and result.device == "cpu" for result in results)
    return "cpu_seconds" if cpu else "seconds"


def seconds_per_task(result: RunResult, measure: TimeMeasure) -> float:
    """Training time per task, without testing."""
    seconds = result.time(measure)
    return float(seconds["train"] + seconds["memory"]) / max(result.num_tasks, 1)


def build_row(label: str, results: Sequence[RunResult], measure: TimeMeasure) -> Row:
    """Build the row of results that differ only in the seed.

    Args:
        label: The method's name, with settings if needed.
        results: The results, one for each seed.
        measure: How to measure time.

    Returns:
        The row.
    """

    def over_seeds(value: Callable[[RunResult], float | None]) -> MeanStd | None:
        return mean_std(map(value, results))

    first = results[0]
    comparable = all(is_comparable(result) for result in results)
    return Row(
        method=label,
        seeds=sorted(result.seed for result in results),
        acc=over_seeds(lambda result: result.acc),
        bwt=over_seeds(lambda result: result.bwt),
        learning_acc=over_seeds(lambda result: result.learning_acc),
        forgetting=over_seeds(lambda result: result.forgetting),
        forward_transfer=over_seeds(lambda result: result.forward_transfer),
        seconds=over_seeds(lambda result: sum(result.time(measure).values())),
        paper=published_scores(first.benchmark, first.method) if comparable else {},
        released=published_scores(first.benchmark, first.method, "released") if comparable else {},
    )


TIME_LABELS: dict[TimeMeasure, str] = {"seconds": "seconds", "cpu_seconds": "CPU seconds"}
VALIDATION_NOTE = "Accuracies are on validation data: training samples that the tasks do not use, not test data."
_HEADER = ("method", "seeds", "ACC", "BWT", "paper ACC", "paper BWT", "released ACC", "released BWT", "seconds")


def table_header(results: Sequence[RunResult], header: Sequence[str] = _HEADER) -> list[str]:
    """The header of a table, which says so where accuracies are on validation data."""
    measured = "validation " if all(result.on_validation for result in results) else ""
    return [f"{measured}{name}" if name in ("ACC", "BWT") else name for name in header]


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, for all formats."""
    return (
        row.method,
        str(len(row.seeds)),
        format_score(row.acc),
        format_score(row.bwt),
        *(format_score(source.get(measure)) for source in (row.paper, row.released) for measure in ("acc", "bwt")),
        "" if row.seconds is None else f"{row.seconds.mean:.0f}",
    )


def markdown(results: Sequence[RunResult]) -> str:
    """A study's table in Markdown, with notes."""
    header = table_header(results)
    lines = [_line(header), _line(["---"] * len(_HEADER)), *(_line(cells(row)) for row in rows(results))]
    seconds = TIME_LABELS[common_time_measure(results)]
    notes = ["", f"ACC and BWT (over T−1) in percent, mean ± standard deviation over seeds; {seconds} per run."]
    notes += [*notes_on_runs(results), *footnotes("".join(lines)), *_remarks(results)]
    return "\n".join([*lines, *notes]) + "\n"


def notes_on_runs(results: Sequence[RunResult]) -> list[str]:
    """Why published figures are missing, which runs were left out, and whose plugins changed."""
    notes = [VALIDATION_NOTE] if any(result.on_validation for result in results) else []
    if not all(result.is_canonical or result.on_validation for result in results):
        notes.append("Tasks or training differ from the benchmark's own, so published figures do not apply.")
    elif not all(is_comparable(result) or result.on_validation for result in results):
        notes.append("Where a method's settings differ from its preset, published figures do not apply.")
    variants = group_by_variant(results)
    if repeated := len(results) - sum(map(len, variants.values())):
        notes.append(f"{repeated} run(s) left out: a run with the same settings and seed is already included.")
    for label, indices in variants.items():
        versions = [results[index].versions for index in indices]
        plugins = dict.fromkeys(name for each in versions for name in each if name.endswith(".py"))
        if differing := [name for name in plugins if len({each.get(name) for each in versions}) > 1]:
            notes.append(f"The runs of {label} used different versions of {', '.join(differing)}.")
    return notes


def _remarks(results: Sequence[RunResult]) -> list[str]:
    """The remarks of all runs, each once."""
    unique = dict.fromkeys(remark for result in results for remark in result.remarks)
    return [f"{remark[0].upper()}{remark[1:]}" for remark in unique]


def latex(results: Sequence[RunResult]) -> str:
    """A study's table in LaTeX (booktabs)."""

    def line(values: Sequence[str]) -> str:
        return " & ".join(values) + r" \\"

    body = [line([_latex_text(cells(row)[0]), *map(_latex_number, cells(row)[1:])]) for row in rows(results)]
    columns = "l" + "r" * (len(_HEADER) - 1)
    notes = [VALIDATION_NOTE] if any(result.on_validation for result in results) else []
    notes += [*footnotes("".join(text for row in rows(results) for text in cells(row))), *_remarks(results)]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(table_header(results)),
            r"\midrule",
            *body,
            r"\bottomrule",
        ]
        + [rf"\multicolumn{{{len(_HEADER)}}}{{l}}{{\footnotesize {_latex_text(note)}}} \\" for note in notes]
        + [r"\end{tabular}", ""]
    )


def as_json(results: Sequence[RunResult], command: str) -> str:
    """A study's table in JSON, with versions, machines and the command.

    Args:
        results: The results of one benchmark.
        command: The command line of the study.

    Returns:
        The JSON text.
    """
    table = [
        {
            "method": row.method,
            "seeds": row.seeds,
            **{name: _as_dict(getattr(row, name)) for name in ("acc", "bwt", "learning_acc", "forgetting", "seconds")},
            **({} if row.forward_transfer is None else {"forward_transfer": _as_dict(row.forward_transfer)}),
            "paper": {measure: _as_dict(score) for measure, score in row.paper.items()},
            "released": {measure: _as_dict(score) for measure, score in row.released.items()},
        }
        for row in rows(results)
    ]
    versions = [dict(pairs) for pairs in dict.fromkeys(tuple(result.versions.items()) for result in results)]
    machines = [dict(pairs) for pairs in dict.fromkeys(tuple(result.machine.items()) for result in results)]
    content = {
        "benchmark": results[0].benchmark,
        "command": command,
        "full_length": all(result.is_canonical for result in results),
        **({"report": "validation"} if any(result.on_validation for result in results) else {}),
        "remarks": _remarks(results),
        "versions": versions,
        "timed_by": common_time_measure(results),
        "machines": [machine for machine in machines if machine],
        "rows": table,
    }
    return json.dumps(content, indent=1) + "\n"


def _as_dict(score: MeanStd | None) -> dict[str, Any] | None:
    if score is None:
        return None
    note = {"note": footnotes(score.mark)} if isinstance(score, PublishedScore) and score.mark else {}
    return {"mean": score.mean, "std": score.std, **note}


_MEASURES = {
    "acc": "ACC",
    "bwt": "BWT",
    "learning_acc": "learning accuracy",
    "forgetting": "forgetting",
    "forward_transfer": "forward transfer",
}


def summary(result: RunResult) -> str:
    """One run in a few lines, with the published figures."""
    measured = {words: value for name, words in _MEASURES.items() if (value := getattr(result, name)) is not None}
    lines = [
        f"{result.benchmark} · {result.method} · seed {result.seed}",
        "  " + "   ".join(f"{words} {value:.2f}" for words, value in measured.items()),
    ]
    for source, words in (("paper", "paper"), ("released", "its released code")):
        scores = published_scores(result.benchmark, result.method, source) if is_comparable(result) else {}
        if scores:
            seeds = " (5 seeds)" if any(score.std is not None for score in scores.values()) else ""
            lines.append(
                f"  {words}{seeds}: " + "   ".join(f"{name.upper()} {score}" for name, score in scores.items())
            )
            lines += [f"  {note}" for note in footnotes(lines[-1])]
    if result.on_validation:
        lines.append(f"  {VALIDATION_NOTE[0].lower()}{VALIDATION_NOTE[1:-1]}")
    elif not result.is_canonical:
        lines.append("  tasks or training differ from the benchmark's own: published figures do not apply")
    elif not is_comparable(result):
        lines.append("  the method's settings differ from its preset: published figures do not apply")
    lines += [f"  {remark}" for remark in result.remarks]
    seconds = result.seconds
    cpu = f", {sum(result.cpu_seconds.values()):.0f} CPU s" if result.cpu_seconds else ""
    lines.append(
        f"  {result.updates} updates in {sum(seconds.values()):.0f} s{cpu} "
        f"(training {seconds['train']:.0f}, testing {seconds['evaluate']:.0f}, memory {seconds['memory']:.1f}); "
        + _format_memory(result)
    )
    return "\n".join(lines)


def _format_memory(result: RunResult) -> str:
    """Memory by kind, that which is kept first."""

    def listed(working: bool) -> str:
        kinds = [kind for kind in result.bytes if (kind in result.working) == working]
        return ", ".join(f"{kind} {result.bytes[kind] / 2**20:.2f} MiB" for kind in kinds)

    return listed(False) + (f"; working memory: {listed(True)}" if result.working_bytes else "")


def run_report(result: RunResult) -> str:
    """The text of report.md: summary, accuracy matrix, command and settings of one run."""
    names = [str(number) for number in range(1, result.num_tasks + 1)]
    table = [
        _line(["after task", *names]),
        _line(["---:"] * (len(names) + 1)),
        *(
            _line([name, *("" if value is None else f"{value:.1f}" for value in row)])
            for name, row in zip(names, result.accuracy, strict=True)
        ),
    ]
    settings = [
        f"- `{section}.{key}` = `{value}`" for section in ALL_SECTIONS for key, value in result.config[section].items()
    ]
    versions = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    measured = "Validation" if result.on_validation else "Test"
    return "\n".join(
        [f"# {result.benchmark}, {result.method}, seed {result.seed}", "", "```", summary(result), "```", ""]
        + [f"## {measured} accuracy on each task (column) after each task (row), percent", "", *table, ""]
        + ["## How to repeat this run", "", "```", result.command, "```", "", versions, ""]
        + [format_machine(result.machine), "", "## Settings", "", *settings, ""]
    )


def format_score(score: MeanStd | None) -> str:
    """Mean ± standard deviation, or nothing."""
    return "" if score is None else str(score)


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _latex_text(cell: str) -> str:
    for special in "_&%#":
        cell = cell.replace(special, "\\" + special)
    return cell.replace("†", r"\dag{}").replace("‡", r"\ddag{}")


def _latex_number(cell: str) -> str:
    """A number in math mode, so that minus and ± are typeset correctly."""
    math = cell.replace(" ± ", r" \pm ").replace("†", r"^\dagger").replace("‡", r"^\ddagger")
    return f"${math}$" if cell else "--"
