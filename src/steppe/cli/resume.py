"""`steppe resume`: go on with runs and studies that were stopped."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.options import (
    NAMED_PLUGIN,
    Commands,
    add_checkpoint_option,
    add_data_option,
    add_plugin_option,
    add_trust_option,
    given_path,
)
from steppe.cli.run import do_run
from steppe.cli.study import do_study
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError

if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig

_EXAMPLES = """\
examples:
  steppe resume runs/pmnist-fs-dgpm-seed0     a run that was killed, to the same numbers as if it had not been
  steppe resume study --jobs 2                all runs of a study that are missing, half-done or failed
  steppe resume study --jobs 1 --threads 2    the last run of a study, on both cores
  steppe resume study --plugin mine.py        a study with a method of your own; without, its code is not run
  steppe resume study --tasks 6               time is short: end all its runs after six tasks
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add(
        "resume",
        "Go on with a run or a study that was stopped.",
        _resume,
        _EXAMPLES,
        goes_on="the same command goes on with it",
    )
    parser.add_argument("directory", type=given_path, metavar="DIR", help="the run's or the study's directory")
    parser.add_argument(
        "--jobs", type=int, metavar="J", help="runs of a study at a time (default: one for each core, on a GPU one)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="go on with so many threads in each run; recorded (default: as before)"
    )
    parser.add_argument(
        "--tasks", type=int, metavar="N", help="end after the first N tasks, to what a run with --tasks N would give"
    )
    add_checkpoint_option(parser)
    add_data_option(parser)
    add_plugin_option(parser, NAMED_PLUGIN)
    add_trust_option(parser, "the directory")


def _resume(options: argparse.Namespace) -> int:
    from steppe.experiments.config import RunConfig
    from steppe.experiments.plugins import require_plugins
    from steppe.experiments.run_directory import locked
    from steppe.experiments.study import read_plan, write_plan
    from steppe.experiments.truncate import truncate_runs
    from steppe.results.layout import CONFIG, PLAN, RESULT

    set_data_directory(options.data)
    out = options.directory
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: give how many runs may go on at once, at least 1.")
    if (out / CONFIG).exists():
        config = RunConfig.load(out / CONFIG, options.plugin, trust_plugins=options.trust_plugins)
        require_plugins(options.plugin, config.plugins)
        _refuse_elsewhere(out, [] if (out / RESULT).exists() else [config])
        if options.tasks is not None:
            (config,) = truncate_runs({out: config}, options.tasks)
        return do_run(options, _with_threads(config, options.threads), out, resume=True)
    if (out / PLAN).exists():
        planned, command = read_plan(out, options.plugin, trust_plugins=options.trust_plugins)
        require_plugins(options.plugin, [path for job in planned for path in job.config.plugins])
        _refuse_elsewhere(out, [job.config for job in planned if not (job.out / RESULT).exists()])
        with locked(out):
            if options.tasks is not None:
                shorter = truncate_runs({job.out: job.config for job in planned}, options.tasks)
                planned = [replace(job, config=config) for job, config in zip(planned, shorter, strict=True)]
                command = _with_tasks(command, options.tasks)
            jobs = [
                job if (job.out / RESULT).exists() else replace(job, config=_with_threads(job.config, options.threads))
                for job in planned
            ]
            if options.threads is not None or options.tasks is not None or options.plugin:
                write_plan(out, jobs, command)
            return do_study(options, out, jobs, command, resume=True)
    raise UsageError(f"{out} holds no run and no study ({CONFIG} or {PLAN}): there is nothing to go on with.")


def _refuse_elsewhere(out: Path, left: Sequence[RunConfig]) -> None:
    """Refuse what was begun on CUDA where there is none: the same run would not come of it."""
    import torch

    if any(config.device == "cuda" for config in left) and not torch.cuda.is_available():
        raise UsageError(
            f"{out} was begun on CUDA, and this machine or this build of torch has none: go on with it where there is "
            "one, or begin anew with --device cpu."
        )


def _with_tasks(command: str, tasks: int) -> str:
    """The command line of the study with so many tasks."""
    words = shlex.split(command)
    others = [place for place, word in enumerate(words) if not word.startswith(("tasks=", "benchmark.tasks="))]
    kept = [words[place] for place in others if words[place] != "--set" or place + 1 in others]
    return shlex.join([*kept, "--set", f"benchmark.tasks={tasks}"])


def _with_threads(config: RunConfig, threads: int | None) -> RunConfig:
    """The same run with another number of threads, if one is given."""
    if threads is None:
        return config
    described = config.as_dict()
    described["run"]["threads"] = threads
    return config.from_mapping(described, config.plugins)
