"""`steppe study`: several methods with several seeds, compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.options import (
    SEEDS,
    Commands,
    add_training_options,
    chosen_seeds,
    config_of,
    free,
    given_path,
    overrides,
    resumable,
)
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.experiments.study import Job

_EXAMPLES = """\
examples:
  steppe study pmnist fs-dgpm er finetune --seeds 5 --jobs 2 --out study
  steppe study pmnist --methods paper --seeds 5 --jobs 2     all that there are published figures for
  steppe study pmnist fs-dgpm fs-sgpm --seeds 3 --set benchmark.tasks=10 --out short
  steppe study pmnist fs-sgpm fs-dgpm --seeds 5-9            seeds that no setting was picked by
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add("study", "Train several methods with several seeds, and compare.", _study, _EXAMPLES)
    parser.add_argument("benchmark", metavar="BENCHMARK", help="which tasks (see steppe list)")
    parser.add_argument("names", nargs="*", metavar="METHOD", help="the methods to compare")
    parser.add_argument(
        "--methods", choices=("paper",), help="paper: every method for which the paper or its released code has figures"
    )
    parser.add_argument("--seeds", default="5", metavar="N", help=f"{SEEDS} (default: 5)")
    parser.add_argument(
        "--out", type=given_path, metavar="DIR", help="the study's directory (default: a new one under runs/)"
    )
    add_training_options(parser)


def _study(options: argparse.Namespace) -> int:
    from steppe.experiments.config import named_benchmark
    from steppe.experiments.plugins import load_plugins
    from steppe.registry import METHODS, find_benchmark
    from steppe.results.published import methods_with_figures

    set_data_directory(options.data)
    load_plugins(options.plugin)
    benchmark, _ = named_benchmark(options.benchmark)
    find_benchmark(benchmark)
    named = list(options.names)
    if options.methods == "paper":
        named += [name for name in methods_with_figures(benchmark) if name in METHODS and name not in named]
    if not named:
        raise UsageError("name the methods to compare, or give --methods paper (see steppe list).")
    for name in named:
        if named.count(name) > 1:
            raise UsageError(f"the method {name!r} is named twice.")
    return run_many(options, named)


def run_many(options: argparse.Namespace, methods: Sequence[str]) -> int:
    """Every method with every seed, then the table."""
    from steppe.experiments.config import command_line, named_benchmark
    from steppe.experiments.plugins import load_plugins
    from steppe.experiments.run import refuse_unsuitable
    from steppe.experiments.run_directory import locked, require_free
    from steppe.experiments.study import Job, with_plugins_of, write_plan

    seeds = chosen_seeds(options.seeds)
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: give how many runs may go on at once, at least 1.")
    name = "-".join(methods) if len(methods) < 4 else f"{len(methods)}methods"
    benchmark, given = named_benchmark(options.benchmark)
    chosen = f"seeds{options.seeds}" if "-" in options.seeds else f"{options.seeds}seeds"
    first = Path("runs") / f"{benchmark}-{name}-{chosen}"
    out = options.out or (first if options.resume else free(first))
    places = {out / method / f"seed-{seed}": config_of(options, method, seed) for method in methods for seed in seeds}
    jobs = [Job(with_plugins_of(place, config), place) for place, config in places.items()]
    refuse_unsuitable([job.config for job in jobs[:: len(seeds)]])
    changes = [*(f"benchmark.{key}={value}" for key, value in given.items()), *overrides(options)]
    words = [*methods, "--seeds", options.seeds]
    command = command_line("study", jobs[0].config, words, changes, load_plugins(options.plugin))
    with resumable(options, out), locked(out):
        if not options.resume:
            require_free(out, for_study=True)
            for job in jobs:
                require_free(job.out)
        write_plan(out, jobs, command)
        return do_study(options, out, jobs, command, resume=options.resume)


def do_study(options: argparse.Namespace, out: Path, jobs: Sequence[Job], command: str, *, resume: bool) -> int:
    """Do the runs, show how they go, write and print the table, name those that failed."""
    from steppe.cli.progress import make_display
    from steppe.experiments.study import run_all, write_tables
    from steppe.report.page import write_report
    from steppe.results.layout import PAGE
    from steppe.results.tables import markdown
    from steppe.runtime.environment import usable_cores
    from steppe.runtime.files import require_inside

    shared = any(job.config.device == "cuda" for job in jobs)  # one GPU, whose memory they would have to divide
    workers = min(options.jobs or (1 if shared else max(usable_cores(), 1)), len(jobs))
    every = 60 * options.checkpoint_every
    with make_display([f"{job.config.method} seed {job.config.seed}" for job in jobs]) as display:
        outcome = run_all(
            jobs,
            workers,
            display,
            resume=resume,
            oversubscribe_tail=options.jobs is None and not shared,
            checkpoint_every=every,
        )
    results = [outcome.results[number] for number in sorted(outcome.results)]
    if results:
        write_tables(out, results, command)
        write_report([out], require_inside(out, out / PAGE), f"steppe report {out}")
        say(markdown(results), end="")
        say(f"\neverything is in {out}: start with {out / PAGE}; table.md, .tex, .json; a directory for each run")
    for number, failure in sorted(outcome.failures.items()):
        job = jobs[number]
        say(f"steppe: {job.config.method} seed {job.config.seed} failed: {failure.reason}", file=sys.stderr)
        if options.debug and failure.details:
            say(failure.details, file=sys.stderr)
    if outcome.failures:
        say(
            f"steppe: {len(outcome.failures)} of {len(jobs)} runs failed; steppe resume {out} tries them again.",
            file=sys.stderr,
        )
    return 1 if outcome.failures else 0
