"""What `steppe list` says: methods and benchmarks, their settings, limits, presets and published figures.

The package carries it written out in catalogue.json, since to ask the methods themselves takes torch, and seconds.
"""

from __future__ import annotations

import steppe.benchmarks  # noqa: F401 - both announce themselves
import steppe.methods  # noqa: F401 - both announce themselves
from steppe.errors import unknown_name
from steppe.registry import BENCHMARKS, METHODS, BenchmarkEntry, MethodEntry
from steppe.results.published import notes_on_marks, published
from steppe.settings import Settings, TrainingConfig


def catalogue(name: str | None = None) -> str:
    """Everything in short, or one method or benchmark in full, from what is registered now."""
    if name is None:
        return _overview()
    if name in METHODS:
        return _method(METHODS[name])
    if name in BENCHMARKS:
        return _benchmark(BENCHMARKS[name])
    raise unknown_name("method or benchmark", name, [*METHODS, *BENCHMARKS])


def everything() -> dict[str, str]:
    """The overview, by the empty name, and every page: the content of catalogue.json."""
    return {"": catalogue(), **{name: catalogue(name) for name in (*BENCHMARKS, *METHODS)}}


def _overview() -> str:
    width = max(len(name) for name in (*METHODS, *BENCHMARKS)) + 2
    lines = ["Benchmarks"]
    lines += [f"  {entry.name:<{width}}{entry.summary}" for entry in BENCHMARKS.values()]
    lines += ["", "Methods"]
    lines += [f"  {entry.name:<{width}}{entry.summary}" for entry in METHODS.values()]
    lines += ["", "steppe list NAME shows settings and presets; steppe run BENCHMARK METHOD runs one."]
    return "\n".join(lines)


def _method(entry: MethodEntry) -> str:
    presets = {benchmark: entry.settings.from_mapping(entry.values(benchmark)) for benchmark in entry.presets}
    lines = [f"{entry.name}: {entry.summary}", "", "Settings (--set method.KEY=VALUE)"]
    lines += _settings(entry.settings.from_mapping(entry.values("")))
    if presets:
        lines += ["", "Presets, where they differ from the values above"]
        defaults = entry.settings.from_mapping(entry.values("")).as_dict()
        for benchmark, preset in presets.items():
            changed = [f"{key}={value}" for key, value in preset.as_dict().items() if value != defaults[key]]
            lines.append(f"  {benchmark}: {', '.join(changed) or 'the same'}")
    figures = [
        f"  {benchmark}: " + ", ".join(f"{measure.upper()} {figure}" for measure, figure in found.items())
        for benchmark in ("pmnist", "pmnist-60k", "cifar100-split", "cifar100-superclass", "tiny-imagenet")
        if (found := published(benchmark, entry.name))
    ]
    if figures:
        lines += ["", "The paper's figures", *figures, *(f"  {note}" for note in notes_on_marks("".join(figures)))]
    return "\n".join(lines)


def _benchmark(entry: BenchmarkEntry) -> str:
    described = entry.settings()
    training = getattr(described, "training", TrainingConfig())
    return "\n".join(
        [f"{entry.name}: {entry.summary}", "", "Settings (--set benchmark.KEY=VALUE)", *_settings(described)]
        + ["", "Training (--set training.KEY=VALUE)", *_settings(training)]
        + ["", "Methods with a preset for it (the others use their defaults)"]
        + ["  " + (", ".join(name for name, method in METHODS.items() if entry.name in method.presets) or "none")]
    )


def _settings(settings: Settings) -> list[str]:
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
