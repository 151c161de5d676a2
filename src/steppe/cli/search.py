"""`steppe search`: find good settings of a method for a benchmark."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.options import (
    add_training_options,
    build_config,
    hint_at_resume,
    parse_path,
    unused_path,
    validate_jobs,
)
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.tuning.plan import SearchPlan

_EXAMPLES = """\
examples:
  steppe search pmnist er --trials 30 --jobs 2        by validation accuracy
  steppe search pmnist fs-sgpm --space lr=0.001:0.1:log --space buffer=100,200
  steppe search cifar100-split er --choose-on 3       choose on three tasks
  steppe resume runs/search-pmnist-er                 after an interruption
  steppe search pmnist er --trials 60 --resume        30 more trials
  steppe run --config runs/search-pmnist-er/best.toml the best, on test data
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "search", "Find good settings of a method by accuracy on validation data.", _search, _EXAMPLES
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", help="the tasks (see steppe list)")
    parser.add_argument("method", metavar="METHOD", help="the method to find settings for (see steppe list)")
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="number of trials (default: 20)")
    parser.add_argument(
        "--choose-on",
        type=int,
        metavar="K",
        help="try settings on the first K tasks only; best.toml then runs on the other tasks",
    )
    parser.add_argument(
        "--space",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="try other values: KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B,C; may be repeated",
    )
    parser.add_argument(
        "--only", metavar="K,K,…", help="search only these settings (default: those that steppe list METHOD shows)"
    )
    parser.add_argument("--no-pruning", action="store_true", help="finish every trial, also those that fall behind")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of every trial (default: 0)")
    parser.add_argument("--search-seed", type=int, default=0, metavar="N", help="seed of the suggestions (default: 0)")
    parser.add_argument("--out", type=parse_path, metavar="DIR", help="search directory (default: a new one in runs/)")
    add_training_options(parser)


def _search(options: argparse.Namespace) -> int:
    from steppe.experiments.run_directory import lock_directory, require_free
    from steppe.results.file_names import SEARCH
    from steppe.tuning.plan import SearchPlan
    from steppe.tuning.trials import require_optuna

    require_optuna()
    set_data_directory(options.data)
    validate_jobs(options.jobs)
    plan = _build_plan(options)
    default = Path("runs") / f"search-{plan.config.benchmark}-{plan.config.method}"
    out = options.out or (default if options.resume else unused_path(default))
    with hint_at_resume(options, out):
        num_tasks = plan.validate()
        with lock_directory(out):
            if (out / SEARCH).exists():
                if not options.resume:
                    raise UsageError(f"{out} already contains a search; pass --resume, or choose another --out.")
                before = SearchPlan.read(out, options.plugin)
                if not plan.same_search(before):
                    raise UsageError(f"{out} contains a search with different settings; choose another --out.")
                plan = dataclasses.replace(plan, trials=max(plan.trials, before.trials))
            else:
                require_free(out)
                require_free(out, for_study=True)
            plan.write(out)
            return do_search(options, plan, out, num_tasks)


def _build_plan(options: argparse.Namespace) -> SearchPlan:
    from steppe.errors import unknown_name
    from steppe.registry import find_method
    from steppe.tuning.plan import SearchPlan
    from steppe.tuning.space import build_space, parse_ranges

    if options.report != "test":
        raise UsageError("a search always measures on validation data; leave out --report.")
    if options.choose_on is not None and options.choose_on < 1:
        raise UsageError(f"--choose-on must be at least 1, got {options.choose_on}.")
    config = build_config(options, options.method, options.seed)
    entry, settings = find_method(options.method), config.method_settings
    changes = parse_ranges(options.space, type(settings))
    default = entry.search_space(settings)
    if options.only is not None:
        named = [name.strip() for name in options.only.split(",")]
        for name in named:
            if name not in {**default, **changes}:
                raise unknown_name("setting to search", name, {**default, **changes})
        default, changes = ({name: own[name] for name in own if name in named} for own in (default, changes))
    for name in entry.variant:
        if name in changes:
            raise UsageError(f"--space: {name} defines {options.method}, so it cannot be searched.")
    space = build_space(settings, default, changes)
    command = shlex.join(["steppe", *sys.argv[1:]])
    return SearchPlan(
        config,
        space,
        options.trials,
        options.search_seed,
        options.choose_on or 0,
        prune=not options.no_pruning,
        command=command,
    )


def do_search(options: argparse.Namespace, plan: SearchPlan, out: Path, num_tasks: int) -> int:
    """Make the trials, show their progress, write what was found."""
    from steppe.cli.progress import make_display
    from steppe.results.file_names import BEST
    from steppe.runtime.environment import usable_cores
    from steppe.tuning.benchmark_search import missing_trials, open_trials, run_trials
    from steppe.tuning.outcome import write_outcome

    trials = open_trials(plan, out)
    missing = missing_trials(plan, trials)
    unfinished = missing + sum(trial.state == "running" for trial in trials.all())
    workers = options.jobs or (1 if plan.config.device == "cuda" else usable_cores())
    names = [f"trial {number}" for number in range(len(trials.all()) + missing)]
    with make_display(names) as display:
        run_trials(
            plan,
            trials,
            out,
            max(min(workers, unfinished), 1),
            display,
            num_tasks=num_tasks,
            checkpoint_every=60 * options.checkpoint_every,
        )
    best = trials.best()
    config = None if best is None else plan.best_config(best.values).as_toml()
    about = {
        "command": plan.command,
        "benchmark": plan.config.benchmark,
        "method": plan.config.method,
        "seed": plan.config.seed,
        "search_seed": plan.seed,
        "choose_on": plan.choose_on,
        "tasks": num_tasks,
    }
    table, files = write_outcome(out, trials, plan.space, about, config)
    say(table, end="")
    failed = [trial for trial in trials.all() if trial.state == "failed"]
    for trial in failed:
        say(f"steppe: trial {trial.number} failed: {trial.note}", file=sys.stderr)
    if best is None:
        say("steppe: no trial was completed, so nothing was found.", file=sys.stderr)
        return 1
    where = f" on the other tasks (it was chosen on the first {plan.choose_on})" if plan.choose_on else ""
    say(f"\nWrote {', '.join(files)} in {out}. The best is trial {best.number}. Run it{where} with:")
    say(f"  steppe run --config {shlex.quote(str(out / BEST))}")
    return 1 if failed else 0
