"""What a search leaves: a table of its trials as Markdown and JSON, the best configuration, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steppe.errors import RunError
from steppe.figures.output import SUFFIXES, save
from steppe.figures.search import draw_search
from steppe.results.file_names import BEST, TRIALS
from steppe.results.grouping import format_setting
from steppe.runtime.files import explain_write_errors, require_inside, write_atomic
from steppe.settings import Value
from steppe.tuning.space import Space, as_plain
from steppe.tuning.trials import Trial, Trials

PICTURE = "search"
VALIDATION_ACCURACY = "validation ACC"


def trials_table(trials: Sequence[Trial], best: Trial | None, measure: str = VALIDATION_ACCURACY) -> str:
    """The trials as a Markdown table, the best one first.

    Args:
        trials: All trials.
        best: The best one, which is marked.
        measure: The name of the objective.

    Returns:
        The table.
    """
    names = sorted({name for trial in trials for name in trial.values})
    first = [] if best is None else [best]
    lines = [["trial", measure, "tasks", *names, "state"], ["---:", "---:", "---:", *["---:"] * len(names), "---"]]
    for trial in [*first, *(trial for trial in trials if trial != best)]:
        score = trial.score if trial.score is not None else list(trial.scores.values())[-1] if trial.scores else None
        lines.append(
            [
                f"**{trial.number}**" if trial == best else str(trial.number),
                "" if score is None else f"{score:.2f}",
                str(max(trial.scores, default=0)),
                *(format_value(trial.values.get(name)) for name in names),
                trial.state + (f": {trial.note}" if trial.note else ""),
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def format_value(value: Value | None) -> str:
    """A value of a setting, rounded for reading; nothing for None."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else format_setting(value)


def write_outcome(
    out: Path,
    trials: Trials,
    space: Space,
    about: Mapping[str, Any],
    best_config: str | None,
    measure: str = VALIDATION_ACCURACY,
) -> tuple[str, list[str]]:
    """Write trials.md, trials.json, best.toml and, with matplotlib, the picture.

    Args:
        out: The directory of the search.
        trials: The trials.
        space: What was searched.
        about: What trials.json says about the search.
        best_config: The content of best.toml; None writes none.
        measure: The name of the objective.

    Returns:
        The table, and the names of the files.
    """
    every, best = trials.all(), trials.best()
    table = trials_table(every, best, measure)
    data = {
        **about,
        "measure": measure,
        "space": as_plain(space),
        "importances": trials.importances(),
        "best": None if best is None else best.number,
        "trials": [asdict(trial) for trial in every],
    }
    contents = {TRIALS[0]: table, TRIALS[1]: json.dumps(data, indent=1) + "\n"}
    if best_config is not None:
        contents[BEST] = best_config
    for name, text in contents.items():
        with explain_write_errors(out / name):
            write_atomic(require_inside(out, out / name), text.encode())
    names = list(contents)
    if best is not None:
        try:
            save(draw_search(data), [require_inside(out, out / f"{PICTURE}{suffix}") for suffix in SUFFIXES])
            names.append(f"{PICTURE}.pdf, .svg and .png")
        except RunError:
            names.append("no picture, which needs matplotlib")
    return table, names
