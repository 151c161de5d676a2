"""The contents of a directory of results: its runs, how they differ from presets, and what is missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from steppe.experiments.config import RunConfig
from steppe.experiments.paper_results import RECIPES, Part
from steppe.experiments.run_directory import RESULT, find_runs, read_result
from steppe.results.schema import RunResult
from steppe.runtime.environment import format_machine

SHORTER = ("benchmark.tasks", "benchmark.samples", "benchmark.test_samples", "training.epochs")
Changes = frozenset[tuple[str, Any]]


@dataclass(frozen=True)
class Group:
    """The runs of one method in one study."""

    part: str  # the study's directory within the results', "." where it is the same
    method: str
    results: list[RunResult]

    @property
    def name(self) -> str:
        """The method, with the study where there are several."""
        return self.method if self.part == "." else f"{self.part}/{self.method}"

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return sorted(result.seed for result in self.results)

    @cached_property
    def changes(self) -> Changes:
        """Settings that differ from today's presets."""
        return frozenset(RunConfig.from_mapping(self.results[0].config).changes().items())


@dataclass(frozen=True)
class Studies:
    """One directory of results: a study, or the studies of a recipe."""

    path: Path
    groups: list[Group]

    @classmethod
    def read(cls, path: Path) -> Studies:
        """Read all runs in a directory, method by method in the order of the tables."""
        groups = []
        for study in sorted({run.parent.parent for run in find_runs(path)[0]}, key=by_number):
            for method in methods_in_order(study):
                runs = sorted(file.parent for file in (study / method).glob(f"seed-*/{RESULT}"))
                groups.append(Group(str(study.relative_to(path)), method, [read_result(run) for run in runs]))
        return cls(path, groups)

    @property
    def results(self) -> list[RunResult]:
        """The results of all runs."""
        return [result for group in self.groups for result in group.results]

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        (name,) = {result.benchmark for result in self.results}
        return name

    @property
    def methods(self) -> list[str]:
        """The methods, each once."""
        return list(dict.fromkeys(group.method for group in self.groups))

    @property
    def is_canonical(self) -> bool:
        """Whether tasks and training are the benchmark's own in all runs."""
        return all(result.is_canonical for result in self.results)

    @cached_property
    def shared(self) -> Changes:
        """Settings that differ from presets in the same way in all runs."""
        return frozenset.intersection(*(group.changes for group in self.groups))

    @property
    def own_changes(self) -> dict[str, Changes]:
        """Further settings that differ from presets in some runs, by study or method."""
        found: dict[str, Changes] = {}
        for part, members in groupby(self.groups, key=lambda group: group.part):
            groups = list(members)
            common = frozenset.intersection(*(group.changes for group in groups)) - self.shared
            found |= {part: common} if common else {}
            own = {group.name: group.changes - common - self.shared for group in groups}
            found |= {name: changes for name, changes in own.items() if changes}
        return found

    @cached_property
    def recipe(self) -> str | None:
        """The recipe of the same name or, for a single study, with the same tasks and settings, possibly shortened."""
        if self.path.name in RECIPES:
            return self.path.name
        kept = {key: value for key, value in self.shared if key not in SHORTER}
        for name, recipe in RECIPES.items():
            first = recipe.parts[0]
            single = len(recipe.parts) == len({group.part for group in self.groups}) == 1
            if single and first.benchmark == self.benchmark and _changes(first) == kept:
                return name
        return None

    @property
    def missing(self) -> list[str]:
        """What the recipe contains and the directory lacks, in words."""
        if self.recipe is None:
            return []
        recipe = RECIPES[self.recipe]
        there = {(group.part, group.method): set(group.seeds) for group in self.groups}
        if self.path.name != self.recipe:
            there = {(recipe.parts[0].name, method): seeds for (_, method), seeds in there.items()}
        wanted = [(part.name, method) for part in recipe.parts for method in part.methods]
        several = len(recipe.parts) > 1
        named = {key: f"`{key[1]}`" + (f" in `{key[0]}`" if several else "") for key in wanted}
        lacking = {key: sorted(set(range(recipe.seeds)) - there[key]) for key in wanted if key in there}
        seeds = {key: describe_seeds(found) for key, found in lacking.items() if found}
        if len(seeds) == len(lacking) and len(set(seeds.values())) == 1:  # the same for all
            incomplete = [next(iter(seeds.values()))]
        else:
            incomplete = [f"{words} of {named[key]}" for key, words in seeds.items()]
        return [*(named[key] for key in wanted if key not in there), *incomplete]

    @property
    def commands(self) -> list[str]:
        """The commands that repeat it: of the recipe of its name, or those in its tables."""
        if self.path.name == self.recipe:
            return [_reproduce(self)]
        return [_read_table(self.path / part)["command"] for part in dict.fromkeys(group.part for group in self.groups)]

    @property
    def machines(self) -> list[str]:
        """The machines in words, with the number of runs if there are several."""
        return _counted(format_machine(result.machine) for result in self.results)

    @property
    def versions(self) -> list[str]:
        """The versions of steppe and torch."""
        return _counted(
            f"steppe {v['steppe']} with torch {v['torch']}" for v in (result.versions for result in self.results)
        )

    @property
    def commits(self) -> list[str]:
        """The commits, shortened, with the number of runs if there are several."""
        return _counted(short_commit(result.versions) for result in self.results)


def short_commit(versions: dict[str, str]) -> str:
    """The short form of a recorded commit."""
    commit, plus, changes = versions.get("commit", "").partition("+")
    return f"`{commit[:7]}{plus}{changes}`" if commit else "commit not recorded"


def describe_seeds(seeds: Sequence[int]) -> str:
    """Seeds in words."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    ends = f"{seeds[0]} {'and' if len(seeds) == 2 else 'to'} {seeds[-1]}"
    return f"seeds {ends}" if len(seeds) == seeds[-1] - seeds[0] + 1 else f"seeds {', '.join(map(str, seeds))}"


def _reproduce(studies: Studies) -> str:
    """The command of the recipe that gives these results."""
    recipe = RECIPES[studies.path.name]
    words = ["steppe", "reproduce", studies.path.name]
    if any(method not in studies.methods for part in recipe.parts for method in part.methods):
        words += ["--methods", ",".join(studies.methods)]
    seeds = max(len(group.seeds) for group in studies.groups)
    if seeds != recipe.seeds:
        words += ["--seeds", str(seeds)]
    if samples := dict(studies.shared).get("benchmark.samples"):
        words += ["--samples", str(samples)]
    return " ".join(words)


def _changes(part: Part) -> dict[str, Any]:
    return RunConfig.make(part.benchmark, part.methods[0], part.changes).changes()


def _counted(words: Iterable[str]) -> list[str]:
    counts = Counter(words)
    if len(counts) == 1:
        return list(counts)
    return [f"{word} ({count} run{'' if count == 1 else 's'})" for word, count in counts.items()]


def methods_in_order(study: Path) -> list[str]:
    """The methods with a finished run, in the order of the study's table; those not in it come last."""
    tabled = [row["method"] for row in _read_table(study).get("rows", [])]
    return list(dict.fromkeys([*tabled, *sorted({file.parts[-3] for file in study.glob(f"*/seed-*/{RESULT}")})]))


def _read_table(study: Path) -> dict[str, Any]:
    """The study's table, or its plan if it is not finished."""
    file = next(file for name in ("table.json", "study.json") if (file := study / name).exists())
    return dict(json.loads(file.read_text(encoding="utf-8")))


def by_number(path: Path) -> tuple[str, int]:
    """A sort key that puts `buffer-50` before `buffer-100`."""
    stem, _, number = path.name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (path.name, 0)
