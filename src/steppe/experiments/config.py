"""The whole description of one run: names, settings, seed, device. Written to config.toml, from which it reruns."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from steppe.benchmarks.base import Benchmark
from steppe.errors import UsageError, one_line, os_error_text, short_repr, unknown_name
from steppe.experiments.plugins import load_plugins, moved, require_named
from steppe.methods.base import MethodConfig
from steppe.registry import BenchmarkEntry, MethodEntry, find_benchmark, find_method
from steppe.runtime.devices import DEVICES
from steppe.runtime.files import parse_toml, read_toml
from steppe.settings import Limits, Settings, TrainingConfig

_SECTIONS = ("benchmark", "method", "training")
_MOST_THREADS = 1024


@dataclass(frozen=True)
class RunConfig:
    """One run, fully specified."""

    benchmark: str
    method: str
    benchmark_settings: Benchmark
    method_settings: MethodConfig
    training: TrainingConfig
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    plugins: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        benchmark: str,
        method: str,
        overrides: Iterable[str] = (),
        *,
        seed: int = 0,
        device: str = "cpu",
        threads: int = 1,
        plugins: Sequence[str] = (),
    ) -> RunConfig:
        """From names on a command line: the presets, then `key=value` overrides; everything is checked here."""
        found = load_plugins(plugins)  # by whole paths, so that a config file works from anywhere
        benchmark, given = named_benchmark(benchmark)
        kind, entry = find_benchmark(benchmark), find_method(method)
        values: dict[str, dict[str, Any]] = {
            "benchmark": given,
            "method": entry.values(benchmark),
            "training": {**kind.settings.training.as_dict(), **entry.training.get(benchmark, {})},  # type: ignore[attr-defined]
        }
        kinds = _kinds(kind, entry)
        chosen: dict[tuple[str, str], str] = {("benchmark", key): str(value) for key, value in given.items()}
        for override in overrides:
            section, key, value = _parsed(override, kinds)
            before = chosen.setdefault((section, key), value)
            if not kinds[section].alike(key, before, value):
                told = f"{short_repr(before)} and as {short_repr(value)}"
                raise UsageError(f"{section}.{key} is given twice, as {told}: give one of them.")
            values[section][key] = value
        made = {section: kinds[section].from_mapping(values[section]) for section in _SECTIONS}
        return cls._checked(benchmark, method, made, seed, device, threads, found)

    @classmethod
    def load(cls, path: Path, plugins: Sequence[str] = (), *, trust_plugins: bool = False) -> RunConfig:
        """From a config.toml; `plugins` and `trust_plugins` as in `from_mapping`."""
        try:
            return cls.from_mapping(read_toml(path), plugins, trust_plugins=trust_plugins)
        except (OSError, ValueError, RecursionError) as error:
            why = os_error_text(error) if isinstance(error, OSError) else one_line(error)
            raise UsageError(f"{path} cannot be read as a run's configuration: {why}.") from error

    @classmethod
    def from_toml(cls, text: str, plugins: Sequence[str] = ()) -> RunConfig:
        """From the text of a config.toml; `plugins` as in `from_mapping`."""
        return cls.from_mapping(parse_toml(text), plugins)

    @classmethod
    def from_mapping(
        cls, data: Mapping[str, Any], plugins: Sequence[str] = (), *, trust_plugins: bool = False
    ) -> RunConfig:
        """From the plain values of `as_dict`; what they leave out takes its default.

        Args:
            data: The values, which may be anybody's.
            plugins: The plugins that may be run, which are code: the caller's own choice. One serves for the plugin of
                the same file name in `data`, wherever that one lies.
            trust_plugins: Run the plugins that `data` names from where it says they are.

        Raises:
            UsageError: Something is wrong with the values, or they name a plugin that may not be run.
        """
        if not isinstance(data, Mapping):
            raise UsageError(f"the configuration is {short_repr(data)}: it must have the section [run].")
        for section in data:
            if section not in ("run", *_SECTIONS):
                raise unknown_name("section of the configuration", section, ("run", *_SECTIONS))
            if not isinstance(data[section], Mapping):
                raise UsageError(
                    f"{section} = {short_repr(data[section])}: it must be a section, [{section}], of the file."
                )
        run = dict(data.get("run", {}))
        names = {key: run.pop(key, None) for key in ("benchmark", "method")}
        for key, name in names.items():
            if not isinstance(name, str):
                raise UsageError(f"the configuration names no {key} in its section [run].")
        named = run.pop("plugins", [])
        if not isinstance(named, list) or not all(isinstance(plugin, str) for plugin in named):
            raise UsageError(f"plugins = {short_repr(named)}: it must be a list of names of files.")
        if not trust_plugins:
            require_named(named, plugins)
        found = load_plugins(moved(named, plugins))
        kinds = _kinds(find_benchmark(names["benchmark"]), find_method(names["method"]))
        made = {section: kinds[section].from_mapping(data.get(section, {})) for section in _SECTIONS}
        seed, device, threads = run.pop("seed", 0), run.pop("device", "cpu"), run.pop("threads", 1)
        for key in run:
            raise unknown_name(
                "key of section [run]", key, ("benchmark", "method", "seed", "device", "threads", "plugins")
            )
        return cls._checked(names["benchmark"], names["method"], made, seed, device, threads, found)

    @classmethod
    def _checked(
        cls,
        benchmark: str,
        method: str,
        made: Mapping[str, Settings],
        seed: int,
        device: str,
        threads: int,
        plugins: tuple[str, ...],
    ) -> RunConfig:
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise UsageError(
                f"seed = {short_repr(seed)} is out of range: it must be a whole number from 0 to 2**63 - 1."
            )
        if type(threads) is not int or not 1 <= threads <= _MOST_THREADS:
            allowed = f"at least 1 and at most {_MOST_THREADS}"
            raise UsageError(f"threads = {short_repr(threads)} is out of range: it must be {allowed}.")
        if device not in DEVICES:
            raise unknown_name("device", str(device), DEVICES)
        described, settings, training = made["benchmark"], made["method"], made["training"]
        assert isinstance(described, Benchmark)
        assert isinstance(settings, MethodConfig)
        assert isinstance(training, TrainingConfig)
        return cls(benchmark, method, described, settings, training, seed, device, threads, plugins)

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return {
            "run": {
                "benchmark": self.benchmark,
                "method": self.method,
                "seed": self.seed,
                "device": self.device,
                "threads": self.threads,
                "plugins": list(self.plugins),
            },
            "benchmark": self.benchmark_settings.as_dict(),
            "method": self.method_settings.as_dict(),
            "training": self.training.as_dict(),
        }

    def describes(self, described: Any) -> bool:
        """Whether plain values, which may be of any kind, are this experiment, in the sense of `same_work`; settings
        that came after them count as having their defaults.
        """
        mine = self.as_dict()
        if not isinstance(described, dict) or described.keys() != mine.keys():
            return False
        sections = zip(_SECTIONS, (self.benchmark_settings, self.method_settings, self.training), strict=True)
        return same_experiment({"run": described["run"]}, {"run": mine["run"]}) and all(
            settings.equals(described[section]) for section, settings in sections
        )

    def as_toml(self) -> str:
        """The text of config.toml."""
        return tomli_w.dumps(self.as_dict())

    def changes(self) -> dict[str, Any]:
        """Where the run differs from its preset, by dotted key."""
        preset = RunConfig.make(self.benchmark, self.method).as_dict()
        mine = self.as_dict()
        return {
            f"{section}.{key}": value
            for section in _SECTIONS
            for key, value in mine[section].items()
            if preset[section][key] != value
        }

    @property
    def is_canonical(self) -> bool:
        """Whether tasks and training are the benchmark's own, so that published figures may stand beside it."""
        retrained = any(key.startswith("training.") for key in self.changes())
        return self.benchmark_settings.is_canonical and not retrained

    def command(self) -> str:
        """The command line that gives this run."""
        sets = [f"{key}={value}" for key, value in self.changes().items()]
        return command_line("run", self, [self.method, "--seed", str(self.seed)], sets)


def same_experiment(one: Any, other: Any) -> bool:
    """Whether two configurations, as plain values, are one experiment; the number of threads may differ, and where the
    files of plugins lie.
    """
    return bool(_what_matters(one) == _what_matters(other))


def _what_matters(described: Any) -> Any:
    if not isinstance(described, dict) or not isinstance(described.get("run"), dict):
        return described
    run = {key: value for key, value in described["run"].items() if key != "threads"}
    return {**described, "run": {**run, "plugins": plugin_names(run)}}


def plugin_names(run: Mapping[str, Any]) -> list[str]:
    """The names of the plugins' files, from the section [run] of a configuration, which may hold anything."""
    named = run.get("plugins", [])
    if not isinstance(named, list) or not all(isinstance(plugin, str) for plugin in named):
        return [short_repr(named)]
    return [Path(plugin).name for plugin in named]


def named_benchmark(name: str) -> tuple[str, dict[str, Any]]:
    """A benchmark's name and what was given behind a colon, as in `folder:PATH`."""
    first, colon, argument = name.partition(":")
    if not colon:
        return name, {}
    entry = find_benchmark(first)
    if not entry.argument:
        raise UsageError(f"{name}: the benchmark {first} takes nothing behind a colon.")
    return first, {entry.argument: argument}


def command_line(
    action: str, config: RunConfig, words: Sequence[str], overrides: Sequence[str], plugins: Sequence[str] | None = None
) -> str:
    """A command line as a user would type it, with the plugins, the configuration's by default, by their names."""
    line = ["steppe", action, config.benchmark, *words]
    if config.device != "cpu":
        line += ["--device", config.device]
    if config.threads != 1:
        line += ["--threads", str(config.threads)]
    for plugin in config.plugins if plugins is None else plugins:
        line += ["--plugin", Path(plugin).name]
    for override in overrides:
        line += ["--set", override]
    return shlex.join(line)


def _kinds(benchmark: BenchmarkEntry, method: MethodEntry) -> dict[str, type[Settings]]:
    """The settings behind each section."""
    return {"benchmark": benchmark.settings, "method": method.settings, "training": TrainingConfig}


def _parsed(override: str, kinds: Mapping[str, type[Settings]]) -> tuple[str, str, str]:
    """`section.key=value`, or `key=value` where only one section has such a key."""
    name, equals, value = override.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--set {override}: write key=value, for example --set method.lr=0.02.")
    name = name.strip()
    section, dot, key = name.partition(".")
    if dot:
        if section not in kinds:
            raise unknown_name("section in --set", section, kinds)
        if key not in kinds[section].schema():
            raise unknown_name(f"setting of the {section}", key, kinds[section].schema())
        return section, key, _bare(value, *kinds[section].schema()[key])
    holders = [section for section, kind in kinds.items() if name in kind.schema()]
    if not holders:
        every = [f"{section}.{key}" for section, kind in kinds.items() for key in kind.schema()]
        raise unknown_name("setting", name, every)
    if len(holders) > 1:
        raise UsageError(f"--set {override}: which one? {' or '.join(f'{holder}.{name}' for holder in holders)}.")
    return holders[0], name, _bare(value, *kinds[holders[0]].schema()[name])


def _bare(value: str, kind: type, limits: Limits) -> str:
    """A value without the blanks around it, which may be part of a free text alone."""
    return value if kind is str and not limits.choices else value.strip()
