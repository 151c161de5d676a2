"""Grouping runs that may be compared: a section for each set of tasks, in it a variant for each method and settings."""

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
    """One method with one choice of settings.

    Attributes:
        label: The method's name, with settings if need be.
        runs: One run for each seed.
        changes: Settings that differ from the preset.
    """

    label: str
    runs: list[FinishedRun]
    changes: Settings

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [run.result.seed for run in self.runs]

    def by_seed(self, measure: str) -> dict[int, float]:
        """A measure by seed.

        Args:
            measure: An attribute of `RunResult`, such as `acc`.

        Returns:
            The values, without seeds whose value is None.
        """
        found = {run.result.seed: getattr(run.result, measure) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Section:
    """One benchmark with one choice of settings.

    Attributes:
        title: The benchmark's name, with settings if need be.
        benchmark: Its name.
        variants: The methods, best first.
        tasks: Names of the tasks; empty where they differ between runs.
        changes: Settings of the tasks that differ from the benchmark's own.
        remarks: Remarks on the runs.
        studies: The studies that the runs may belong to.
    """

    title: str
    benchmark: str
    variants: list[Variant]
    tasks: list[str]
    changes: Settings
    remarks: list[str]
    studies: list[Study]

    @property
    def timed_by(self) -> TimeMeasure:
        """The measure of time by which its runs can be compared."""
        return common_time_measure(run.result for variant in self.variants for run in variant.runs)


def build_sections(collected: Collection) -> list[Section]:
    """Group runs by benchmark and its settings, in order of first appearance."""
    made = []
    for benchmark, runs in _by(collected.runs, "benchmark").items():
        studies = [study for study in collected.studies if study.benchmark == benchmark]
        for title, alike in _group(benchmark, runs, ("benchmark",)):
            made.append(_section(title, benchmark, alike, studies))
    return made


def _section(title: str, benchmark: str, runs: Sequence[FinishedRun], studies: list[Study]) -> Section:
    variants, remarks = [], []
    for method, own in _by(runs, "method").items():
        for label, alike in _group(method, own, METHOD_SECTIONS):
            seeds: dict[int, FinishedRun] = {}
            for run in alike:
                if seeds.setdefault(run.result.seed, run) is not run:
                    repeated = f"{label} has two runs with seed {run.result.seed}: {run.name} is left out."
                    remarks.append(repeated)
            kept = [seeds[seed] for seed in sorted(seeds)]
            variants.append(Variant(label, kept, explicit_settings(kept[0].result, METHOD_SECTIONS)))
    variants.sort(key=lambda variant: fmean(variant.by_seed("acc").values()), reverse=True)
    kept = [run for variant in variants for run in variant.runs]
    names_by_remark: dict[str, list[str]] = {}
    for run in kept:
        for remark in run.remarks:
            names_by_remark.setdefault(remark, []).append(run.name)
    for remark, names in names_by_remark.items():  # no names if it holds for all runs
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


def _group(name: str, runs: Sequence[FinishedRun], parts: tuple[str, ...]) -> list[tuple[str, list[FinishedRun]]]:
    """Groups of runs with equal settings in these sections of the configuration, by label."""
    groups = group_by_settings(name, [run.result for run in runs], parts)
    return [(label, [runs[place] for place in places]) for label, places in groups.items()]


def _task_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Each task's name if it is the same in all runs; the order of tasks may depend on the seed."""
    count = max(run.result.num_tasks for run in runs)
    names = [{run.log.names[place] for run in runs if run.log.names.get(place)} for place in range(count)]
    return [next(iter(found)) if len(found) == 1 else "" for found in names]


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
