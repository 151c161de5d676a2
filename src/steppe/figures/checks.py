"""What figures need of runs, as checks that name what is missing; several of them can be asked at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from steppe.report.finished_run import FinishedRun, benchmarks_of, by_method, on_benchmark

if TYPE_CHECKING:
    from steppe.landscape.settings import LandscapeSettings

_SHOWN = 3  # of things of one kind that are missing, the first few are named


def same_tasks(runs: Sequence[FinishedRun], but: str | None = None) -> list[str]:
    """Runs on the same tasks, whatever their methods, and the runs of a method alike (see `_alike` on `but`)."""
    names = benchmarks_of(runs)
    if len(names) > 1:
        return [f"runs of one benchmark (these are of {', '.join(names)}: draw them apart)"]
    lengths = sorted({run.num_tasks for run in runs})
    if lengths == [0] or not lengths:
        return ["a run with at least one task"]
    if len(lengths) > 1:
        return [f"runs of one length (these have {', '.join(map(str, lengths))} tasks: draw them apart)"]
    for setting, values in _differing(runs, ("benchmark",)).items():
        given = ", ".join(map(str, values))
        return [f"runs on the same tasks (of {setting} there are {given}: draw them apart)"]
    return _alike(runs, but)


def same_tasks_per_benchmark(runs: Sequence[FinishedRun]) -> list[str]:
    """The same, for each benchmark by itself."""
    return [problem for name in benchmarks_of(runs) for problem in same_tasks(on_benchmark(runs, name))]


def _alike(runs: Sequence[FinishedRun], but: str | None) -> list[str]:
    """The runs of a method may differ in the seed, and in the setting `but`, alone: else they cannot be averaged."""
    found = []
    for method, own in by_method(runs).items():
        for setting, values in _differing(own, ("method", "training")).items():
            if setting != f"method.{but}":
                given = ", ".join(map(str, values))
                found.append(f"runs of {method} with the same {setting} (there are {given}: draw them apart)")
        seen = [(run.setting(but) if but else None, run.result.seed) for run in own]
        twice = sorted({seed for value, seed in seen if seen.count((value, seed)) > 1})
        if twice and not found:
            found.append(f"runs of {method} that differ (seed {twice[0]} is there twice: give one of them)")
    return found


def _differing(runs: Iterable[FinishedRun], sections: Sequence[str]) -> dict[str, list[object]]:
    """Settings of these sections that are not the same in all runs; those that only some runs know of came with a later
    version, and do not count.
    """
    values: dict[str, list[object]] = {}
    for run in runs:
        for section in sections:
            for key, value in run.result.config.get(section, {}).items():
                known = values.setdefault(f"{section}.{key}", [])
                if value not in known:
                    known.append(value)
    return {setting: known for setting, known in values.items() if len(known) > 1}


def any_incremental(runs: Sequence[FinishedRun]) -> list[str]:
    """At least one run that learnt its tasks one after another."""
    if any(run.is_incremental for run in runs):
        return []
    return ["a run that learnt its tasks one after another (there is no forgetting in learning them together)"]


def all_incremental(runs: Iterable[FinishedRun]) -> list[str]:
    """Methods whose network is there after each task; learning all together leaves that after the last one alone."""
    together = [run.method for run in runs if not run.is_incremental]
    return [
        f"methods that learn tasks one by one ({name} does not: choose others by --methods)" for name in together[:1]
    ]


def has_landscapes(
    runs: Sequence[FinishedRun], pairs: Iterable[tuple[int, int]], *, surface: bool = False
) -> list[str]:
    """For every method, at least one seed with these pairs (after, task) of its landscape, or with their surfaces."""
    wanted = list(pairs)
    for after, task in wanted:
        if not 1 <= task <= after <= runs[0].num_tasks:
            return [f"task {task} after task {after} (there are {runs[0].num_tasks} tasks, and a task is learnt first)"]
    if any(after < runs[0].num_tasks for after, _ in wanted) and (problems := all_incremental(runs)):
        return problems
    usual = next((run.landscape.settings for run in runs if run.landscape is not None), None)
    lacking = []
    for own in by_method(runs).values():
        if not any(all(_measured(run, pair, surface) for pair in wanted) for run in own):
            lacking.append(_to_measure(own, wanted, usual, surface))
    if len(lacking) > _SHOWN:
        return [*lacking[:_SHOWN], f"and the same of {len(lacking) - _SHOWN} more methods"]
    return lacking or _measured_alike(runs)


def _measured_alike(runs: Iterable[FinishedRun]) -> list[str]:
    """Landscapes that may be drawn together."""
    from steppe.landscape.settings import PROFILES

    measured = [run for run in runs if run.landscape is not None]
    for run in measured:
        own, first = (each.landscape.settings for each in (run, measured[0]))  # type: ignore[union-attr]
        for name, value in first.differences(own, PROFILES).items():
            there = f"{first.as_dict()[name]} in {measured[0].path}, {value} in {run.path}"
            return [f"landscapes measured with the same {name} ({there}: remove one and measure it with --{name})"]
    return []


def _measured(run: FinishedRun, pair: tuple[int, int], surface: bool) -> bool:
    found = run.pair(*pair)
    return found is not None and (found.surface is not None or not surface)


def _to_measure(
    runs: Sequence[FinishedRun], pairs: Sequence[tuple[int, int]], usual: LandscapeSettings | None, surface: bool
) -> str:
    """The command that adds what lacks, for the first of a method's runs: with the settings of its file, else with
    those of the others, beside which it is to be drawn.
    """
    run = next((run for run in runs if run.landscape is not None), runs[0])
    kept, file, settings, resume = run.landscape, run.path / "landscape.json", usual, []
    lacks, first = f"landscape.json in {run.path}", ""
    if kept is not None:
        lacking = [pair for pair in pairs if not _measured(run, pair, surface)]
        lacks = ", ".join(f"task {task} after task {after}" for after, task in lacking) + f" in {file}"
        settings, resume = kept.settings, ["--resume"]
    if surface:
        lacks = f"a surface of {run.method}"
        if settings is not None and settings.directions < 2:  # a file of one direction cannot take a surface in
            settings, resume = settings.replace(directions=2), []
            first = f"remove {file} and " if kept is not None else ""
    options = [*resume, *([] if settings is None else settings.options()), *(["--surface"] if surface else [])]
    afters, tasks = (",".join(map(str, sorted(set(places)))) for places in zip(*pairs, strict=True))
    command = ["steppe", "landscape", str(run.path), *options, "--after", afters, "--task", tasks]
    return f"{lacks}: {first}run {shlex.join(command)}"
