"""What may be compared, put together: a section for each set of tasks, in it a variant for each method and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from steppe.report.finished_run import Collection, FinishedRun, Study
from steppe.results.grouping import METHOD_SECTIONS, explicit_settings, group_by_settings
from steppe.results.schema import TimeMeasure
from steppe.results.tables import common_time_measure

Settings = dict[str, Any]  # by dotted key


@dataclass(frozen=True)
class Variant:
    """One method with one choice of settings: its runs, one for each seed."""

    label: str
    runs: list[FinishedRun]
    changes: Settings  # where it differs from its preset

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [run.result.seed for run in self.runs]

    def by_seed(self, measure: str) -> dict[int, float]:
        """A measure's value for each seed that has one."""
        found = {run.result.seed: getattr(run.result, measure) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Section:
    """One benchmark with one choice of its settings; its methods in the order of their accuracy."""

    title: str
    benchmark: str
    variants: list[Variant]
    tasks: list[str]
    changes: Settings  # where its tasks differ from the benchmark's own
    remarks: list[str]
    studies: list[Study]

    @property
    def timed_by(self) -> TimeMeasure:
        """Which seconds of its runs can be compared."""
        return common_time_measure(run.result for variant in self.variants for run in variant.runs)


def build_sections(collected: Collection) -> list[Section]:
    """The runs by benchmark and by its settings, in the order in which they were found."""
    made = []
    for benchmark, runs in _by(collected.runs, "benchmark").items():
        studies = [study for study in collected.studies if study.benchmark == benchmark]
        for title, alike in _alike(benchmark, runs, ("benchmark",)):
            made.append(_section(title, benchmark, alike, studies))
    return made


def _section(title: str, benchmark: str, runs: Sequence[FinishedRun], studies: list[Study]) -> Section:
    variants, remarks = [], []
    for method, own in _by(runs, "method").items():
        for label, alike in _alike(method, own, METHOD_SECTIONS):
            seeds: dict[int, FinishedRun] = {}
            for run in alike:
                if seeds.setdefault(run.result.seed, run) is not run:
                    repeated = f"{label} has seed {run.result.seed} twice: {run.name} is left out."
                    remarks.append(repeated)
            kept = [seeds[seed] for seed in sorted(seeds)]
            variants.append(Variant(label, kept, explicit_settings(kept[0].result, METHOD_SECTIONS)))
    variants.sort(key=lambda variant: fmean(variant.by_seed("acc").values()), reverse=True)
    kept = [run for variant in variants for run in variant.runs]
    told: dict[str, list[str]] = {}
    for run in kept:
        for remark in run.remarks:
            told.setdefault(remark, []).append(run.name)
    for remark, names in told.items():  # what holds for every run needs no names
        remarks.append(remark if len(names) == len(kept) else f"{_named(names)}: {remark}")
    return Section(
        title,
        benchmark,
        variants,
        _task_names(kept),
        explicit_settings(kept[0].result, ("benchmark",)),
        remarks,
        studies,
    )


def _by(runs: Sequence[FinishedRun], key: str) -> dict[str, list[FinishedRun]]:
    found: dict[str, list[FinishedRun]] = {}
    for run in runs:
        found.setdefault(getattr(run.result, key), []).append(run)
    return found


def _alike(name: str, runs: Sequence[FinishedRun], parts: tuple[str, ...]) -> list[tuple[str, list[FinishedRun]]]:
    """Runs with equal settings in these parts of the configuration, labelled by what tells them apart."""
    groups = group_by_settings(name, [run.result for run in runs], parts)
    return [(label, [runs[place] for place in places]) for label, places in groups.items()]


def _task_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Each task's name, where all runs call it the same: the order of tasks may be drawn from the seed."""
    count = max(run.result.num_tasks for run in runs)
    names = [{run.log.names[place] for run in runs if run.log.names.get(place)} for place in range(count)]
    return [next(iter(found)) if len(found) == 1 else "" for found in names]


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
