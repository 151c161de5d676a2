"""The text of `steppe list`: methods and benchmarks with their settings, limits, presets and published results.

It is stored in catalogue.json, because importing the methods themselves loads torch and takes seconds.
"""

from __future__ import annotations

import steppe.benchmarks  # noqa: F401 - registers its classes
import steppe.methods  # noqa: F401 - registers its classes
from steppe.errors import unknown_name
from steppe.registry import BENCHMARKS, METHODS, BenchmarkEntry, MethodEntry
from steppe.results.published import footnotes, published_scores
from steppe.settings import Settings, TrainingConfig


def render(name: str | None = None) -> str:
    """Render the overview, or the page of one method or benchmark, from the registry.

    Args:
        name: The method or benchmark; None for the overview.

    Returns:
        The text.

    Raises:
        UsageError: The name is unknown.
    """  # noqa: DOC501
    if name is None:
        return _render_overview()
    if name in METHODS:
        return _render_method(METHODS[name])
    if name in BENCHMARKS:
        return _render_benchmark(BENCHMARKS[name])
    raise unknown_name("method or benchmark", name, [*METHODS, *BENCHMARKS])


def render_all() -> dict[str, str]:
    """Render all pages by name, the overview under an empty name: the content of catalogue.json."""
    return {"": render(), **{name: render(name) for name in (*BENCHMARKS, *METHODS)}}


def _render_overview() -> str:
    width = max(len(name) for name in (*METHODS, *BENCHMARKS)) + 2
    lines = ["Benchmarks"]
    lines += [f"  {entry.name:<{width}}{entry.summary}" for entry in BENCHMARKS.values()]
    lines += ["", "Methods"]
    lines += [f"  {entry.name:<{width}}{entry.summary}" for entry in METHODS.values()]
    lines += ["", "Show settings and presets with: steppe list NAME. Train with: steppe run BENCHMARK METHOD."]
    return "\n".join(lines)


def _render_method(entry: MethodEntry) -> str:
    presets = {benchmark: entry.settings.from_mapping(entry.values(benchmark)) for benchmark in entry.presets}
    lines = [f"{entry.name}: {entry.summary}", "", "Settings (--set method.KEY=VALUE)"]
    lines += _render_settings(entry.settings.from_mapping(entry.values("")))
    if space := entry.search_space(entry.settings.from_mapping(entry.values(""))):
        lines += ["", f"Searched by default (steppe search BENCHMARK {entry.name})"]
        lines += [f"  {name}: {values}" for name, values in space.items()]
    if presets:
        lines += ["", "Presets (only what differs from the values above)"]
        defaults = entry.settings.from_mapping(entry.values("")).as_dict()
        for benchmark, preset in presets.items():
            changed = [f"{key}={value}" for key, value in preset.as_dict().items() if value != defaults[key]]
            lines.append(f"  {benchmark}: {', '.join(changed) or 'no changes'}")
    results = [
        f"  {benchmark}: " + ", ".join(f"{measure.upper()} {value}" for measure, value in values.items())
        for benchmark in ("pmnist", "pmnist-60k", "cifar100-split", "cifar100-superclass", "tiny-imagenet")
        if (values := published_scores(benchmark, entry.name))
    ]
    if results:
        lines += ["", "Published results", *results, *(f"  {note}" for note in footnotes("".join(results)))]
    return "\n".join(lines)


def _render_benchmark(entry: BenchmarkEntry) -> str:
    benchmark = entry.settings()
    training = getattr(benchmark, "training", TrainingConfig())
    return "\n".join(
        [f"{entry.name}: {entry.summary}", "", "Settings (--set benchmark.KEY=VALUE)", *_render_settings(benchmark)]
        + ["", "Training (--set training.KEY=VALUE)", *_render_settings(training)]
        + ["", "Methods with a preset for this benchmark (others use their defaults)"]
        + ["  " + (", ".join(name for name, method in METHODS.items() if entry.name in method.presets) or "none")]
    )


def _render_settings(settings: Settings) -> list[str]:
    values = settings.as_dict()
    if not values:
        return ["  none"]
    width = max(len(f"{key} = {value}") for key, value in values.items()) + 2
    lines = []
    for key, (_, limits) in settings.schema().items():
        allowed = limits.describe()
        note = f" ({allowed})" if allowed else ""
        lines.append(f"  {f'{key} = {values[key]}':<{width}}{limits.help}{note}")
    return lines
