"""`steppe run`: train one method on one benchmark, with one seed or several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.options import (
    SEEDS,
    add_training_options,
    add_trust_option,
    build_config,
    hint_at_resume,
    parse_path,
    unused_path,
)
from steppe.cli.study import run_many
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig
    from steppe.learning.events import Event

_EXAMPLES = """\
examples:
  steppe run pmnist fs-dgpm                           the paper's method, seed 0
  steppe run pmnist fs-sgpm --seeds 5 --jobs 2        five seeds, two at a time
  steppe run pmnist er --set buffer=500 --out er500   another buffer size
  steppe run --config er500/config.toml --out again   repeat a run
  steppe run cifar100-split gpm --tasks 3 --epochs 5  a shortened run
  steppe run pmnist gpm --log tensorboard             curves in TensorBoard
  steppe run folder:photos fs-dgpm                    your own images
  steppe run pmnist mine --plugin mine.py             your own method
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add("run", "Train one method on one benchmark.", _run, _EXAMPLES)
    parser.add_argument("benchmark", nargs="?", metavar="BENCHMARK", help="the tasks (see steppe list)")
    parser.add_argument("method", nargs="?", metavar="METHOD", help="how to learn them (see steppe list)")
    parser.add_argument("--seed", type=int, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--seeds", metavar="N", help=f"several runs and their mean ± std: {SEEDS}")
    parser.add_argument("--out", type=parse_path, metavar="DIR", help="run directory (default: a new one in runs/)")
    parser.add_argument(
        "--config", type=parse_path, metavar="FILE", help="take all settings from the config.toml of a run"
    )
    add_training_options(parser)
    add_trust_option(parser, "the --config file")


def _run(options: argparse.Namespace) -> int:
    from steppe.experiments.config import RunConfig
    from steppe.experiments.plugins import require_known_names

    set_data_directory(options.data)
    if options.config is not None:
        conflicting = ("benchmark", "method", "seed", "seeds", "epochs", "tasks", "device", "threads", "jobs")
        given = any(getattr(options, name) is not None for name in conflicting)
        if given or options.set or options.report != "test" or options.skip_tasks:
            raise UsageError(
                "--config defines the whole run; combine it only with --out, --resume, --checkpoint-every, --log, "
                "--data, --plugin and --trust-plugins."
            )
        config = RunConfig.load(options.config, options.plugin, trust_plugins=options.trust_plugins)
        require_known_names(options.plugin, config.plugins)
        return _run_one(options, config)
    if options.trust_plugins:
        raise UsageError("--trust-plugins needs --config; name plugins with --plugin FILE.")
    if options.benchmark is None or options.method is None:
        raise UsageError("missing benchmark or method; for example: steppe run pmnist fs-dgpm (see steppe list).")
    if options.seeds is not None:
        if options.seed is not None:
            raise UsageError("pass --seed N (one run) or --seeds N (several), not both.")
        return run_many(options, [options.method])
    if options.jobs is not None:
        raise UsageError("--jobs needs several runs; pass --seeds N.")
    return _run_one(options, build_config(options, options.method, options.seed or 0))


def _run_one(options: argparse.Namespace, config: RunConfig) -> int:
    default = Path("runs") / f"{config.benchmark}-{config.method}-seed{config.seed}"
    out = options.out or (default if options.resume else unused_path(default))
    with hint_at_resume(options, out):
        return do_run(options, config, out, resume=options.resume)


def do_run(options: argparse.Namespace, config: RunConfig, out: Path, *, resume: bool) -> int:
    """Execute a run, show its progress, print a summary and write the report."""
    from steppe.cli.progress import make_display
    from steppe.cli.trackers import RunTrackers, chosen_trackers
    from steppe.experiments.run import run
    from steppe.experiments.study import Finished
    from steppe.report.page import write_report
    from steppe.results.file_names import PAGE
    from steppe.results.tables import summary
    from steppe.runtime.files import require_inside
    from steppe.runtime.signals import deferred_signals

    every = 60 * options.checkpoint_every
    trackers = RunTrackers(chosen_trackers(options, out, resume=resume), config, out)

    def follow(event: Event) -> None:
        display(0, event)
        trackers(event)

    with make_display([f"{config.benchmark}-{config.method}-seed{config.seed}"]) as display:
        with deferred_signals() as stop, trackers:
            result = run(config, out, follow, resume=resume, checkpoint_every=every, stop=stop)
        display(0, Finished(result))
    write_report([out], require_inside(out, out / PAGE), f"steppe report {out}")
    say(summary(result))
    say(f"  Results are in {out}; open {out / PAGE} in a browser.")
    return 0
