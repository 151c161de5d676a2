"""The complete configuration of a run: names, settings, seed, device. It is saved as config.toml to rerun from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from steppe.benchmarks.base import Benchmark
from steppe.data.task import Task
from steppe.errors import UsageError, one_line, os_error_text, short_repr, unknown_name
from steppe.experiments.command_line import format_command, parse_override, split_benchmark_name
from steppe.experiments.plugins import load_plugins, relocate_plugins, require_allowed
from steppe.methods.base import MethodConfig
from steppe.registry import BenchmarkEntry, MethodEntry, find_benchmark, find_method
from steppe.runtime.devices import DEVICES
from steppe.runtime.files import parse_toml, read_toml
from steppe.settings import Settings, TrainingConfig

_SECTIONS = ("benchmark", "method", "training")
_MAX_THREADS = 1024
REPORTS = ("test", "validation")
"""The data that accuracies may be measured on; the first is the default."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run.

    Attributes:
        benchmark: The benchmark's name.
        method: The method's name.
        benchmark_settings: The benchmark and its settings.
        method_settings: The method's settings.
        training: Epochs, batches, validation.
        seed: The seed of all random streams.
        device: Where to compute: "cpu" or "cuda".
        threads: Number of threads.
        plugins: Paths of the plugin files.
        report: The data that accuracies are measured on: "test" or "validation".
    """

    benchmark: str
    method: str
    benchmark_settings: Benchmark
    method_settings: MethodConfig
    training: TrainingConfig
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    plugins: tuple[str, ...] = ()
    report: str = "test"

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
        report: str = "test",
    ) -> RunConfig:
        """Build a configuration from names: the presets, then the overrides.

        Args:
            benchmark: The benchmark's name, with an argument as in `folder:PATH`.
            method: The method's name.
            overrides: Changes to the presets: `key=value` or `section.key=value`.
            seed: The seed of all random streams.
            device: Where to compute.
            threads: Number of threads.
            plugins: Files that register methods and benchmarks.
            report: The data that accuracies are measured on.

        Returns:
            The configuration.

        Raises:
            UsageError: A name is unknown or a value is invalid.

        Example:
            >>> config = RunConfig.make("pmnist", "er", ["tasks=3", "method.lr=0.1"], seed=1)
            >>> config.command()
            'steppe run pmnist er --seed 1 --set benchmark.tasks=3 --set method.lr=0.1'
        """
        paths = load_plugins(plugins)  # absolute, so that config.toml works from any directory
        benchmark, argument = split_benchmark_name(benchmark)
        kind, entry = find_benchmark(benchmark), find_method(method)
        values: dict[str, dict[str, Any]] = {
            "benchmark": argument,
            "method": entry.values(benchmark),
            "training": {**kind.settings.training.as_dict(), **entry.training.get(benchmark, {})},  # type: ignore[attr-defined]
        }
        kinds = _settings_types(kind, entry)
        seen: dict[tuple[str, str], str] = {("benchmark", key): str(value) for key, value in argument.items()}
        for override in overrides:
            section, key, value = parse_override(override, kinds)
            before = seen.setdefault((section, key), value)
            if not kinds[section].same_value(key, before, value):
                both = f"{short_repr(before)} and {short_repr(value)}"
                raise UsageError(f"{section}.{key} is set twice, to {both}; set it once.")
            values[section][key] = value
        made = {section: kinds[section].from_mapping(values[section]) for section in _SECTIONS}
        return cls._validated(benchmark, method, made, seed, device, threads, paths, report)

    @classmethod
    def load(cls, path: Path, plugins: Sequence[str] = (), *, trust_plugins: bool = False) -> RunConfig:
        """Read a config.toml; see `from_mapping` for `plugins` and `trust_plugins`."""
        try:
            return cls.from_mapping(read_toml(path), plugins, trust_plugins=trust_plugins)
        except (OSError, ValueError, RecursionError) as error:
            reason = os_error_text(error) if isinstance(error, OSError) else one_line(error)
            raise UsageError(f"cannot read {path} as a run configuration: {reason}.") from error

    @classmethod
    def from_toml(cls, text: str, plugins: Sequence[str] = ()) -> RunConfig:
        """Parse the text of a config.toml; see `from_mapping` for `plugins`."""
        return cls.from_mapping(parse_toml(text), plugins)

    @classmethod
    def from_mapping(
        cls, data: Mapping[str, Any], plugins: Sequence[str] = (), *, trust_plugins: bool = False
    ) -> RunConfig:
        """Build a configuration from the plain values of `as_dict`; missing values take their defaults.

        Args:
            data: The values, which need not be trusted.
            plugins: Plugins that may be executed. Each one replaces the plugin of the same file name in `data`.
            trust_plugins: Also execute the plugins named in `data`.

        Returns:
            The configuration.

        Raises:
            UsageError: A value is invalid, or `data` names a plugin that may not be executed.
        """  # noqa: DOC501
        if not isinstance(data, Mapping):
            raise UsageError(f"the configuration is {short_repr(data)}; expected a table with a section [run].")
        for section in data:
            if section not in ("run", *_SECTIONS):
                raise unknown_name("section of the configuration", section, ("run", *_SECTIONS))
            if not isinstance(data[section], Mapping):
                raise UsageError(f"{section} = {short_repr(data[section])}; expected a section [{section}].")
        run = dict(data.get("run", {}))
        names = {key: run.pop(key, None) for key in ("benchmark", "method")}
        for key, name in names.items():
            if not isinstance(name, str):
                raise UsageError(f'the configuration has no {key} in section [run]; add {key} = "NAME".')
        named = run.pop("plugins", [])
        if not isinstance(named, list) or not all(isinstance(plugin, str) for plugin in named):
            raise UsageError(f"plugins = {short_repr(named)}; expected a list of file names.")
        if not trust_plugins:
            require_allowed(named, plugins)
        paths = load_plugins(relocate_plugins(named, plugins))
        kinds = _settings_types(find_benchmark(names["benchmark"]), find_method(names["method"]))
        made = {section: kinds[section].from_mapping(data.get(section, {})) for section in _SECTIONS}
        seed, device, threads = run.pop("seed", 0), run.pop("device", "cpu"), run.pop("threads", 1)
        report = run.pop("report", REPORTS[0])
        for key in run:
            raise unknown_name(
                "key of section [run]", key, ("benchmark", "method", "seed", "device", "threads", "plugins", "report")
            )
        return cls._validated(names["benchmark"], names["method"], made, seed, device, threads, paths, report)

    @classmethod
    def _validated(
        cls,
        benchmark: str,
        method: str,
        made: Mapping[str, Settings],
        seed: int,
        device: str,
        threads: int,
        plugins: tuple[str, ...],
        report: str,
    ) -> RunConfig:
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise UsageError(f"seed = {short_repr(seed)} is invalid; expected a whole number from 0 to 2**63 - 1.")
        if type(threads) is not int or not 1 <= threads <= _MAX_THREADS:
            raise UsageError(
                f"threads = {short_repr(threads)} is invalid; expected a whole number from 1 to {_MAX_THREADS}."
            )
        if device not in DEVICES:
            raise unknown_name("device", str(device), DEVICES)
        if report not in REPORTS:
            raise unknown_name("data to report on", str(report), REPORTS)
        tasks, settings, training = made["benchmark"], made["method"], made["training"]
        assert isinstance(tasks, Benchmark)
        assert isinstance(settings, MethodConfig)
        assert isinstance(training, TrainingConfig)
        return cls(benchmark, method, tasks, settings, training, seed, device, threads, plugins, report)

    def tasks(self) -> Sequence[Task]:
        """Make the tasks, whose test data are the data to report on."""
        benchmark = self.benchmark_settings
        return benchmark.stream(self.seed) if self.report == REPORTS[0] else benchmark.validation_stream(self.seed)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values, for TOML and JSON."""
        return {
            "run": {
                "benchmark": self.benchmark,
                "method": self.method,
                "seed": self.seed,
                "device": self.device,
                "threads": self.threads,
                "plugins": list(self.plugins),
                **({} if self.report == REPORTS[0] else {"report": self.report}),
            },
            "benchmark": self.benchmark_settings.as_dict(),
            "method": self.method_settings.as_dict(),
            "training": self.training.as_dict(),
        }

    def matches(self, data: Any) -> bool:
        """Return whether untrusted plain values describe the same experiment.

        Threads and the directories of plugins may differ. Settings missing in `data`, added since it was written, count
        as having their defaults. No plugin is executed.
        """
        own = self.as_dict()
        if not isinstance(data, dict) or data.keys() != own.keys() or not isinstance(data["run"], dict):
            return False
        sections = zip(_SECTIONS, (self.benchmark_settings, self.method_settings, self.training), strict=True)
        return _experiment_keys(data["run"]) == _experiment_keys(own["run"]) and all(
            settings.equals(data[section]) for section, settings in sections
        )

    def as_toml(self) -> str:
        """Return the text of config.toml."""
        return tomli_w.dumps(self.as_dict())

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from the preset, by dotted key."""
        preset = RunConfig.make(self.benchmark, self.method).as_dict()
        own = self.as_dict()
        return {
            f"{section}.{key}": value
            for section in _SECTIONS
            for key, value in own[section].items()
            if preset[section][key] != value
        }

    @property
    def is_canonical(self) -> bool:
        """Whether tasks and training are the benchmark's own, so that results compare with published ones."""
        retrained = any(key.startswith("training.") for key in self.changes())
        return self.benchmark_settings.is_canonical and not retrained and self.report == REPORTS[0]

    def command(self) -> str:
        """Return the command that repeats this run."""
        overrides = [f"{key}={value}" for key, value in self.changes().items()]
        return self.command_line(["run", self.benchmark, self.method, "--seed", str(self.seed)], overrides)

    def command_line(self, words: Sequence[str], overrides: Sequence[str], plugins: Sequence[str] | None = None) -> str:
        """Format a command that uses this configuration's device, threads and plugins.

        Args:
            words: The command and its arguments.
            overrides: `KEY=VALUE` pairs for `--set`.
            plugins: Plugins to name instead of the configuration's own.

        Returns:
            The command, quoted for the shell.
        """
        return format_command(
            words,
            device=self.device,
            threads=self.threads,
            plugins=self.plugins if plugins is None else plugins,
            report=self.report,
            overrides=overrides,
        )


def _experiment_keys(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of section [run] that define the experiment."""
    return {**{key: value for key, value in run.items() if key != "threads"}, "plugins": plugin_names(run)}


def plugin_names(run: Mapping[str, Any]) -> list[str]:
    """Return the file names of the plugins in an untrusted section [run]."""
    named = run.get("plugins", [])
    if not isinstance(named, list) or not all(isinstance(plugin, str) for plugin in named):
        return [short_repr(named)]
    return [Path(plugin).name for plugin in named]


def _settings_types(benchmark: BenchmarkEntry, method: MethodEntry) -> dict[str, type[Settings]]:
    return {"benchmark": benchmark.settings, "method": method.settings, "training": TrainingConfig}
