"""The plan of a search on a benchmark, in search.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.errors import RunError, UsageError, one_line
from steppe.experiments.config import RunConfig
from steppe.results.file_names import SEARCH
from steppe.runtime.files import explain_write_errors, read_json, require_inside, write_atomic
from steppe.settings import Value
from steppe.tuning.space import Space, as_plain, from_plain

MAX_TRIALS = 100_000


@dataclass(frozen=True)
class SearchPlan:
    """A search on a benchmark.

    Attributes:
        config: The run to find settings for; its method's settings are the first trial.
        space: The values to try, by setting of the method.
        trials: The number of trials.
        seed: The seed of the suggestions.
        choose_on: Try settings on this many first tasks, which the run then leaves out; 0: on all tasks.
        prune: Whether trials that fall behind are ended early.
        command: The command that started the search.
    """

    config: RunConfig
    space: Space
    trials: int
    seed: int = 0
    choose_on: int = 0
    prune: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.trials <= MAX_TRIALS:
            raise UsageError(f"--trials must be between 1 and {MAX_TRIALS:,}, got {self.trials}.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--search-seed must be between 0 and 2**63 - 1, got {self.seed}.")
        if self.choose_on < 0:
            raise UsageError(f"--choose-on must be at least 1, got {self.choose_on}.")
        if self.choose_on and "tasks" not in type(self.config.benchmark_settings).schema():
            raise UsageError(
                f"--choose-on: the benchmark {self.config.benchmark} has no setting `tasks`; choose on all tasks."
            )

    def trial_config(self, values: Mapping[str, Value]) -> RunConfig:
        """The run of one trial, measured on validation data.

        Args:
            values: The settings to try.

        Returns:
            The configuration.
        """
        benchmark = self.config.benchmark_settings
        if self.choose_on:
            benchmark = benchmark.replace(tasks=self.choose_on)
        return dataclasses.replace(
            self.config,
            benchmark_settings=benchmark,
            method_settings=self.config.method_settings.replace(**values),
            report="validation",
        )

    def best_config(self, values: Mapping[str, Value]) -> RunConfig:
        """The run with the best settings, measured on test data of tasks that nothing was chosen on.

        Args:
            values: The best settings.

        Returns:
            The configuration.
        """
        settings = self.config.method_settings.replace(**values)
        return dataclasses.replace(
            self.config, method_settings=settings, report="test", skip_tasks=self.config.skip_tasks + self.choose_on
        )

    def validate(self) -> int:
        """Check, before any work, that the trials can run, and that tasks are left for the run.

        Returns:
            The number of tasks in a trial.

        Raises:
            UsageError: They cannot.
        """
        from steppe.experiments.run import validate_configs

        if self.config.skip_tasks and self.choose_on:
            raise UsageError("pass --choose-on or --skip-tasks, not both.")
        total = len(dataclasses.replace(self.config, report="test").tasks())
        if self.choose_on >= total:
            raise UsageError(f"--choose-on {self.choose_on}: no task is left of {total}; choose on fewer.")
        config = self.trial_config({})
        validate_configs([config])
        return len(config.tasks())

    def same_search(self, other: SearchPlan) -> bool:
        """Return whether the trials of the other search may be continued by this one."""
        return self.config.matches(other.config.as_dict()) and all(
            getattr(self, name) == getattr(other, name) for name in ("space", "seed", "choose_on", "prune")
        )

    def write(self, out: Path) -> None:
        """Write search.json."""
        values = {
            "command": self.command,
            "trials": self.trials,
            "seed": self.seed,
            "choose_on": self.choose_on,
            "prune": self.prune,
            "objective": "mean validation accuracy over the tasks of a trial",
            "space": as_plain(self.space),
            "config": self.config.as_dict(),
        }
        with explain_write_errors(out / SEARCH):
            write_atomic(require_inside(out, out / SEARCH), (json.dumps(values, indent=1) + "\n").encode())

    @classmethod
    def read(cls, out: Path, plugins: Sequence[str] = (), *, trust_plugins: bool = False) -> SearchPlan:
        """Read search.json.

        Args:
            out: The directory of the search, which need not be trusted.
            plugins: Plugins that may be executed, as in `RunConfig.from_mapping`.
            trust_plugins: Also execute the plugins named in the file.

        Returns:
            The plan.

        Raises:
            RunError: The file is missing or invalid.
            UsageError: The configuration is invalid, or needs a plugin that may not be executed.
        """  # noqa: DOC501
        try:
            data: Any = read_json(out / SEARCH)
            trials, seed, choose_on = (data[name] for name in ("trials", "seed", "choose_on"))
            if any(type(number) is not int for number in (trials, seed, choose_on)) or type(data["prune"]) is not bool:
                raise ValueError("trials, seed and choose_on must be whole numbers, and prune true or false")
            config = RunConfig.from_mapping(data["config"], plugins, trust_plugins=trust_plugins)
            space, command = from_plain(data["space"]), str(data["command"])
            return cls(config, space, trials, seed, choose_on, data["prune"], command)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
            raise RunError(f"cannot read {out / SEARCH} as a search: {reason}.") from error
