"""A study's detailed table: accuracies, ranks of the bases, importances, time and memory of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from steppe.results.log import read_task_log
from steppe.results.published import footnotes
from steppe.results.schema import RunResult, TimeMeasure, is_number
from steppe.results.tables import (
    Row,
    build_row,
    common_time_measure,
    format_score,
    group_by_variant,
    notes_on_runs,
    seconds_per_task,
    table_header,
)

_HEADER = (
    *("method", "seeds", "ACC", "BWT", "paper ACC", "paper BWT", "learning accuracy", "forgetting"),
    "forward transfer",
    *("ranks", "λ", "λ, first decile", "s / task", "kB kept", "kB working"),
)
_NOTE = (
    "Mean ± standard deviation over seeds, in percent. Ranks and λ per layer at the end (λ: mean over layers; first "
    "decile of the lowest layer). kB: memory besides the network that must be kept between tasks, and "
    "working memory that can be rebuilt from it. s / task: training {cpu}time without testing."
)


def details(runs: Mapping[Path, RunResult]) -> str:
    """The detailed table of one benchmark's runs in Markdown.

    Args:
        runs: Results by run directory; ranks and importances come from the logs there.

    Returns:
        The table, without columns that would be empty, and notes on it.
    """
    body, paths, results = [], list(runs), list(runs.values())
    measure = common_time_measure(results)
    for label, indices in group_by_variant(results).items():
        group = {paths[index]: results[index] for index in indices}
        body.append(_cells(build_row(label, list(group.values()), measure), group, measure))
    columns = [column for column in range(len(_HEADER)) if any(cells[column] for cells in body)]
    lines = [
        [cells[column] for column in columns]
        for cells in (table_header(results, _HEADER), ["---"] * len(_HEADER), *body)
    ]
    table = [f"| {' | '.join(line)} |" for line in lines]
    note = _NOTE.format(cpu="CPU " if measure == "cpu_seconds" else "")
    return "\n".join([*table, "", note, *notes_on_runs(results), *footnotes("".join(table))]) + "\n"


def _cells(row: Row, runs: Mapping[Path, RunResult], measure: TimeMeasure) -> Sequence[str]:
    # If the log is cut short, its last record is another task's: no ranks or importances then.
    final = [read_task_log(path).diagnostics.get(result.num_tasks - 1, {}) for path, result in runs.items()]
    means, first_deciles = _importances(final)
    scores = (row.acc, row.bwt, row.paper.get("acc"), row.paper.get("bwt"), row.learning_acc, row.forgetting)
    return (
        row.method,
        str(len(row.seeds)),
        *map(format_score, (*scores, row.forward_transfer)),
        _ranks(final),
        _format_share(means),
        _format_share(first_deciles),
        _format_short(fmean(seconds_per_task(result, measure) for result in runs.values())),
        f"{fmean(result.kept_bytes for result in runs.values()) / 1000:.0f}",
        f"{fmean(result.working_bytes for result in runs.values()) / 1000:.0f}",
    )


def _ranks(final: Sequence[Mapping[str, Any]]) -> str:
    """The mean rank of each layer's basis over seeds, rounded."""
    ranks: dict[str, list[tuple[float, float]]] = {}
    for diagnostics in final:
        for layer, entry in _as_mapping(diagnostics.get("ranks")).items():
            rank, size = _as_mapping(entry).get("rank"), _as_mapping(entry).get("of")
            if is_number(rank) and is_number(size):
                ranks.setdefault(layer, []).append((rank, size))
    return ", ".join(f"{fmean(r for r, _ in pairs):.0f}/{max(of for _, of in pairs):.0f}" for pairs in ranks.values())


def _importances(final: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """For each seed the mean λ over layers, and the lowest of the layers' first deciles."""
    means, first_deciles = [], []
    for diagnostics in final:
        layers = [_as_mapping(entry) for entry in _as_mapping(diagnostics.get("importances")).values()]
        layer_means = [mean for layer in layers if is_number(mean := layer.get("mean"))]
        deciles = [each for layer in layers if isinstance(each := layer.get("deciles"), list) and len(each) == 11]
        firsts = [each[1] for each in deciles if is_number(each[1])]
        means += [fmean(layer_means)] if layer_means else []
        first_deciles += [min(firsts)] if firsts else []
    return means, first_deciles


def _as_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _format_share(values: Sequence[float]) -> str:
    """A mean share with three decimals, or five if three would round it to 1."""
    if not values:
        return ""
    mean = fmean(values)
    return f"{mean:.5f}" if 0.9995 <= mean < 1 else f"{mean:.3f}"


def _format_short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
