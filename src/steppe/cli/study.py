"""`steppe study`: compare several methods over several seeds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.options import (
    SEEDS,
    add_training_options,
    build_config,
    collect_overrides,
    hint_at_resume,
    parse_path,
    parse_seeds,
    unused_path,
    validate_jobs,
)
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.experiments.study import Job, Message

_EXAMPLES = """\
examples:
  steppe study pmnist fs-dgpm er finetune --seeds 5 --jobs 2 --out study
  steppe study pmnist --methods paper --seeds 5             published methods
  steppe study pmnist er gpm --set benchmark.tasks=10       shorter runs
  steppe study pmnist fs-sgpm fs-dgpm --seeds 5-9           held-out seeds
  steppe study pmnist er gpm --log mlflow                   one MLflow run each
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add("study", "Compare several methods over several seeds.", _study, _EXAMPLES)
    parser.add_argument("benchmark", metavar="BENCHMARK", help="the tasks (see steppe list)")
    parser.add_argument("names", nargs="*", metavar="METHOD", help="methods to compare (see steppe list)")
    parser.add_argument(
        "--methods", choices=("paper",), help="paper: all methods with published results on this benchmark"
    )
    parser.add_argument("--seeds", default="5", metavar="N", help=f"{SEEDS} (default: 5)")
    parser.add_argument("--out", type=parse_path, metavar="DIR", help="study directory (default: a new one in runs/)")
    add_training_options(parser)


def _study(options: argparse.Namespace) -> int:
    from steppe.experiments.command_line import split_benchmark_name
    from steppe.experiments.plugins import load_plugins
    from steppe.registry import METHODS, find_benchmark
    from steppe.results.published import methods_with_figures

    set_data_directory(options.data)
    load_plugins(options.plugin)
    benchmark, _ = split_benchmark_name(options.benchmark)
    find_benchmark(benchmark)
    named = list(options.names)
    if options.methods == "paper":
        named += [name for name in methods_with_figures(benchmark) if name in METHODS and name not in named]
    if not named:
        raise UsageError("missing methods; name them, or pass --methods paper (see steppe list).")
    for name in named:
        if named.count(name) > 1:
            raise UsageError(f"method {name!r} is named twice; name it once.")
    return run_many(options, named)


def run_many(options: argparse.Namespace, methods: Sequence[str]) -> int:
    """Run every method with every seed, and write the table."""
    from steppe.cli.trackers import chosen_trackers
    from steppe.experiments.command_line import split_benchmark_name
    from steppe.experiments.plugins import load_plugins
    from steppe.experiments.run import validate_configs
    from steppe.experiments.run_directory import lock_directory, require_free
    from steppe.experiments.study import Job, keep_original_plugins, write_plan

    seeds = parse_seeds(options.seeds)
    validate_jobs(options.jobs)
    name = "-".join(methods) if len(methods) < 4 else f"{len(methods)}methods"
    benchmark, argument = split_benchmark_name(options.benchmark)
    suffix = f"seeds{options.seeds}" if "-" in options.seeds else f"{options.seeds}seeds"
    default = Path("runs") / f"{benchmark}-{name}-{suffix}"
    out = options.out or (default if options.resume else unused_path(default))
    chosen_trackers(options, out, resume=options.resume)  # validates, before anything is written
    configs = {(method, seed): build_config(options, method, seed) for method in methods for seed in seeds}
    directories = {key: out / key[0] / f"seed-{key[1]}" for key in configs}
    jobs = [Job(keep_original_plugins(directories[key], config), directories[key]) for key, config in configs.items()]
    validate_configs([job.config for job in jobs[:: len(seeds)]])
    changes = [*(f"benchmark.{key}={value}" for key, value in argument.items()), *collect_overrides(options)]
    words = ["study", benchmark, *methods, "--seeds", options.seeds]
    command = jobs[0].config.command_line(words, changes, load_plugins(options.plugin))
    with hint_at_resume(options, out), lock_directory(out):
        if not options.resume:
            require_free(out, for_study=True)
            for job in jobs:
                require_free(job.out)
        write_plan(out, jobs, command)
        return do_study(options, out, jobs, command, resume=options.resume)


def do_study(options: argparse.Namespace, out: Path, jobs: Sequence[Job], command: str, *, resume: bool) -> int:
    """Execute the runs, show their progress, write and print the table, report failures."""
    from steppe.cli.progress import make_display
    from steppe.cli.trackers import RunTrackers, chosen_trackers, write_notes
    from steppe.experiments.study import run_all, write_tables
    from steppe.report.page import write_report
    from steppe.results.file_names import PAGE
    from steppe.results.tables import markdown
    from steppe.runtime.environment import usable_cores
    from steppe.runtime.files import require_inside

    shared = any(job.config.device == "cuda" for job in jobs)  # they would share the memory of one GPU
    workers = min(options.jobs or (1 if shared else max(usable_cores(), 1)), len(jobs))
    every = 60 * options.checkpoint_every
    names = chosen_trackers(options, out, resume=resume)
    if names:
        write_notes(out, {name: {} for name in names})
    with make_display([f"{job.config.method} seed {job.config.seed}" for job in jobs]) as display, ExitStack() as stack:
        trackers = [stack.enter_context(RunTrackers(names, job.config, job.out)) for job in jobs]

        def follow(number: int, message: Message) -> None:
            display(number, message)
            trackers[number](message)

        outcome = run_all(
            jobs,
            workers,
            follow,
            resume=resume,
            oversubscribe_tail=options.jobs is None and not shared,
            checkpoint_every=every,
        )
    results = [outcome.results[number] for number in sorted(outcome.results)]
    if results:
        write_tables(out, results, command)
        write_report([out], require_inside(out, out / PAGE), f"steppe report {out}")
        say(markdown(results), end="")
        say(f"\nResults are in {out}; open {out / PAGE} in a browser. Tables: table.md, table.tex, table.json.")
    for number, failure in sorted(outcome.failures.items()):
        job = jobs[number]
        say(f"steppe: {job.config.method} seed {job.config.seed} failed: {failure.reason}", file=sys.stderr)
        if options.debug and failure.details:
            say(failure.details, file=sys.stderr)
    if outcome.failures:
        say(
            f"steppe: {len(outcome.failures)} of {len(jobs)} runs failed; retry them with: steppe resume {out}",
            file=sys.stderr,
        )
    return 1 if outcome.failures else 0
