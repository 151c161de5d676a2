"""What figures need from runs. Each check returns what is missing, in words; an empty list means nothing is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from steppe.report.finished_run import FinishedRun, benchmarks_of, by_method, on_benchmark
from steppe.results.file_names import LANDSCAPE
from steppe.results.grouping import METHOD_SECTIONS, differing_settings

if TYPE_CHECKING:
    from steppe.landscape.settings import LandscapeSettings

_MAX_NAMED = 3  # of several missing things of one kind


def same_tasks(runs: Sequence[FinishedRun], varied: str | None = None) -> list[str]:
    """Check that all runs learned the same tasks, and that runs of one method differ only in the seed.

    Args:
        runs: The runs to draw together.
        varied: A setting of the method that may differ as well.

    Returns:
        What is missing.
    """
    names = benchmarks_of(runs)
    if len(names) > 1:
        return [f"runs of one benchmark (these are of {', '.join(names)}: draw them separately)"]
    lengths = sorted({run.num_tasks for run in runs})
    if lengths == [0] or not lengths:
        return ["a run with at least one task"]
    if len(lengths) > 1:
        return [f"runs with the same number of tasks (these have {', '.join(map(str, lengths))}: draw them separately)"]
    for setting, values in differing_settings([run.result for run in runs], ("benchmark",)).items():
        given = ", ".join(map(str, values))
        return [f"runs on the same tasks ({setting} is {given}: draw them separately)"]
    return _differ_in_seed_alone(runs, varied)


def same_tasks_per_benchmark(runs: Sequence[FinishedRun]) -> list[str]:
    """Check the same for each benchmark separately."""
    return [problem for name in benchmarks_of(runs) for problem in same_tasks(on_benchmark(runs, name))]


def _differ_in_seed_alone(runs: Sequence[FinishedRun], varied: str | None) -> list[str]:
    problems = []
    for method, group in by_method(runs).items():
        for setting, values in differing_settings([run.result for run in group], METHOD_SECTIONS).items():
            if setting != f"method.{varied}":
                given = ", ".join(map(str, values))
                problems.append(f"runs of {method} with the same {setting} (it is {given}: draw them separately)")
        seen = [(run.setting(varied) if varied else None, run.result.seed) for run in group]
        repeated = sorted({seed for value, seed in seen if seen.count((value, seed)) > 1})
        if repeated and not problems:
            problems.append(f"runs of {method} with different seeds (seed {repeated[0]} appears twice; pass one)")
    return problems


def any_incremental(runs: Sequence[FinishedRun]) -> list[str]:
    """Check that at least one run learned its tasks one at a time."""
    if any(run.is_incremental for run in runs):
        return []
    return ["a run that learned its tasks one at a time (joint training does not forget)"]


def all_incremental(runs: Iterable[FinishedRun]) -> list[str]:
    """Check that all runs learned their tasks one at a time, so that there is a network after each task."""
    joint = [run.method for run in runs if not run.is_incremental][:1]
    return [
        f"methods that learn one task at a time ({name} does not: choose others by --methods)" for name in joint[:1]
    ]


def have_bwt(runs: Iterable[FinishedRun]) -> list[str]:
    """Check that all runs have a backward transfer."""
    without = [run.method for run in runs if run.result.bwt is None]
    return [f"methods with a BWT ({name} learns all tasks at once: choose others by --methods)" for name in without[:1]]


def have_landscapes(
    runs: Sequence[FinishedRun], pairs: Iterable[tuple[int, int]], *, surface: bool = False
) -> list[str]:
    """Check that at least one seed of every method has the landscapes to show.

    Args:
        runs: The runs.
        pairs: The landscapes to show, as (after, task).
        surface: Whether the surfaces are shown.

    Returns:
        What is missing, and the commands that add it.
    """
    wanted = list(pairs)
    for after, task in wanted:
        if not 1 <= task <= after <= runs[0].num_tasks:
            return [
                f"task {task} after task {after} (there are {runs[0].num_tasks} tasks, and a landscape of a task "
                "exists after itself and later tasks)"
            ]
    if any(after < runs[0].num_tasks for after, _ in wanted) and (problems := all_incremental(runs)):
        return problems
    common = next((run.landscape.settings for run in runs if run.landscape is not None), None)
    lacking = []
    for group in by_method(runs).values():
        if not any(all(_has_landscape(run, pair, surface) for pair in wanted) for run in group):
            lacking.append(_measure_command(group, wanted, common, surface))
    if len(lacking) > _MAX_NAMED:
        return [*lacking[:_MAX_NAMED], f"and the same for {len(lacking) - _MAX_NAMED} more methods"]
    return lacking or _same_landscape_settings(runs)


def _same_landscape_settings(runs: Iterable[FinishedRun]) -> list[str]:
    from steppe.landscape.settings import PROFILES

    measured = [(run.path, run.landscape.settings) for run in runs if run.landscape is not None]
    for path, settings in measured:
        first_path, first = measured[0]
        for name, value in first.differences(settings, PROFILES).items():
            values = f"{first.as_dict()[name]} in {first_path}, {value} in {path}"
            return [f"landscapes measured with the same {name} ({values}: remove one and repeat it with --{name})"]
    return []


def _has_landscape(run: FinishedRun, pair: tuple[int, int], surface: bool) -> bool:
    found = run.pair(*pair)
    return found is not None and (found.surface is not None or not surface)


def _measure_command(
    runs: Sequence[FinishedRun],
    pairs: Sequence[tuple[int, int]],
    common: LandscapeSettings | None,
    surface: bool,
) -> str:
    """What is missing for one method, and the command that adds it.

    The command uses the settings of the run's own file if there is one, else those of the other runs, so that the
    landscapes can be drawn together.

    Args:
        runs: The runs of the method. The command measures the first one with a landscape, else the first one.
        pairs: The landscapes to show, as (after, task).
        common: The settings of the other runs, if any run has a landscape.
        surface: Whether the surfaces are shown.

    Returns:
        A line for the error message.
    """
    run = next((run for run in runs if run.landscape is not None), runs[0])
    existing, file, settings, resume = run.landscape, run.path / LANDSCAPE, common, []
    lacking, first = f"{LANDSCAPE} in {run.path}", ""
    if existing is not None:
        absent = [pair for pair in pairs if not _has_landscape(run, pair, surface)]
        lacking = ", ".join(f"task {task} after task {after}" for after, task in absent) + f" in {file}"
        settings, resume = existing.settings, ["--resume"]
    if surface:
        lacking = f"a surface of {run.method}"
        if settings is not None and settings.directions < 2:  # a surface cannot be added to a file with one direction
            settings, resume = settings.replace(directions=2), []
            first = f"remove {file} and " if existing is not None else ""
    options = [*resume, *([] if settings is None else settings.options()), *(["--surface"] if surface else [])]
    afters, tasks = (",".join(map(str, sorted(set(numbers)))) for numbers in zip(*pairs, strict=True))
    command = ["steppe", "landscape", str(run.path), *options, "--after", afters, "--task", tasks]
    return f"{lacking}: {first}run {shlex.join(command)}"
