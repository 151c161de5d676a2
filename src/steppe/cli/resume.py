"""`steppe resume`: resume interrupted runs and studies."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.options import (
    PLUGIN_OF_RUN,
    add_checkpoint_option,
    add_data_option,
    add_jobs_option,
    add_plugin_option,
    add_trust_option,
    hint_at_resume,
    parse_path,
    validate_jobs,
)
from steppe.cli.run import do_run
from steppe.cli.search import do_search
from steppe.cli.study import do_study
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError

if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig

_EXAMPLES = """\
examples:
  steppe resume runs/pmnist-fs-dgpm-seed0   same result as if not interrupted
  steppe resume study --jobs 2              missing, unfinished and failed runs
  steppe resume study --jobs 1 --threads 2  two threads for the last run
  steppe resume study --plugin mine.py      a study with your own method
  steppe resume study --tasks 6             end all runs after six tasks
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "resume",
        "Resume an interrupted run, study or search.",
        _resume,
        _EXAMPLES,
        resume_hint="run the same command again to resume.",
    )
    parser.add_argument("directory", type=parse_path, metavar="DIR", help="run, study or search directory")
    add_jobs_option(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads per run (default: as before)")
    parser.add_argument(
        "--tasks", type=int, metavar="N", help="end after the first N tasks, as if started with --tasks N"
    )
    add_checkpoint_option(parser)
    add_data_option(parser)
    add_plugin_option(parser, PLUGIN_OF_RUN)
    add_trust_option(parser, "the directory")


def _resume(options: argparse.Namespace) -> int:
    from steppe.experiments.config import RunConfig
    from steppe.experiments.plugins import require_known_names
    from steppe.experiments.run_directory import lock_directory
    from steppe.experiments.study import read_plan, write_plan
    from steppe.experiments.truncate_runs import truncate_runs
    from steppe.results.file_names import CONFIG, PLAN, RESULT, SEARCH

    set_data_directory(options.data)
    out = options.directory
    validate_jobs(options.jobs)
    if (out / CONFIG).exists():
        config = RunConfig.load(out / CONFIG, options.plugin, trust_plugins=options.trust_plugins)
        require_known_names(options.plugin, config.plugins)
        _require_cuda(out, [] if (out / RESULT).exists() else [config])
        if options.tasks is not None:
            (config,) = truncate_runs({out: config}, options.tasks)
        return do_run(options, _with_threads(config, options.threads), out, resume=True)
    if (out / PLAN).exists():
        planned, command = read_plan(out, options.plugin, trust_plugins=options.trust_plugins)
        require_known_names(options.plugin, [path for job in planned for path in job.config.plugins])
        _require_cuda(out, [job.config for job in planned if not (job.out / RESULT).exists()])
        with lock_directory(out):
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
    if (out / SEARCH).exists():
        return _resume_search(options, out)
    raise UsageError(
        f"{out} contains neither a run ({CONFIG}) nor a study ({PLAN}) nor a search ({SEARCH}); there is nothing to "
        "resume."
    )


def _resume_search(options: argparse.Namespace, out: Path) -> int:
    from steppe.experiments.plugins import require_known_names
    from steppe.experiments.run_directory import lock_directory
    from steppe.tuning.plan import SearchPlan
    from steppe.tuning.trials import require_optuna

    require_optuna()
    if options.tasks is not None or options.threads is not None:
        raise UsageError("--tasks and --threads are for runs and studies; a search keeps its own.")
    plan = SearchPlan.read(out, options.plugin, trust_plugins=options.trust_plugins)
    require_known_names(options.plugin, plan.config.plugins)
    _require_cuda(out, [plan.config])
    with hint_at_resume(options, out), lock_directory(out):
        return do_search(options, plan, out, plan.validate())


def _require_cuda(out: Path, left: Sequence[RunConfig]) -> None:
    """Raise a UsageError if a run was started on CUDA and there is none here: the result would differ."""
    import torch

    if any(config.device == "cuda" for config in left) and not torch.cuda.is_available():
        raise UsageError(
            f"{out} was started on CUDA, which is not available here; resume it on a machine with CUDA, or start over "
            "with --device cpu."
        )


def _with_tasks(command: str, tasks: int) -> str:
    """Return the study's command with another number of tasks."""
    words = shlex.split(command)
    others = [place for place, word in enumerate(words) if not word.startswith(("tasks=", "benchmark.tasks="))]
    kept = [words[place] for place in others if words[place] != "--set" or place + 1 in others]
    return shlex.join([*kept, "--set", f"benchmark.tasks={tasks}"])


def _with_threads(config: RunConfig, threads: int | None) -> RunConfig:
    """Return the configuration with another number of threads, if given."""
    if threads is None:
        return config
    values = config.as_dict()
    values["run"]["threads"] = threads
    return config.from_mapping(values, config.plugins)
