"""`steppe run`: one method on one benchmark, once or with several seeds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.options import (
    SEEDS,
    Commands,
    add_training_options,
    add_trust_option,
    config_of,
    free,
    given_path,
    resumable,
)
from steppe.cli.study import run_many
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig

_EXAMPLES = """\
examples:
  steppe run pmnist fs-dgpm                          the paper's method on Permuted MNIST, seed 0
  steppe run pmnist fs-sgpm --seeds 5 --jobs 2       five seeds, two at a time, with a table
  steppe run pmnist er --set buffer=500 --out er500  another buffer, a directory of your choice
  steppe run --config er500/config.toml --out again  the same run once more
  steppe run cifar100-split gpm --tasks 3 --epochs 5 a shortened run, recorded as such
  steppe run folder:photos fs-dgpm                   your own images, a folder for each class
  steppe run pmnist mine --plugin mine.py            a method of your own
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add("run", "Train one method on one benchmark.", _run, _EXAMPLES)
    parser.add_argument("benchmark", nargs="?", metavar="BENCHMARK", help="which tasks (see steppe list)")
    parser.add_argument("method", nargs="?", metavar="METHOD", help="how to learn them (see steppe list)")
    parser.add_argument("--seed", type=int, metavar="N", help="the seed of everything random (default: 0)")
    parser.add_argument("--seeds", metavar="N", help=f"several runs, and mean ± std: {SEEDS}")
    parser.add_argument(
        "--out", type=given_path, metavar="DIR", help="the run directory (default: a new one under runs/)"
    )
    parser.add_argument("--config", type=given_path, metavar="FILE", help="rerun a run from its config.toml")
    add_training_options(parser)
    add_trust_option(parser, "the file of --config")


def _run(options: argparse.Namespace) -> int:
    from steppe.experiments.config import RunConfig
    from steppe.experiments.plugins import require_plugins

    set_data_directory(options.data)
    if options.config is not None:
        apart = ("benchmark", "method", "seed", "seeds", "epochs", "tasks", "device", "threads", "jobs")
        if any(getattr(options, name) is not None for name in apart) or options.set:
            raise UsageError(
                "--config holds the whole run: give nothing but --out, --resume, --data, --plugin and --trust-plugins "
                "with it."
            )
        config = RunConfig.load(options.config, options.plugin, trust_plugins=options.trust_plugins)
        require_plugins(options.plugin, config.plugins)
        return _run_one(options, config)
    if options.trust_plugins:
        raise UsageError("--trust-plugins is for the plugins that the file of --config names: give --plugin FILE.")
    if options.benchmark is None or options.method is None:
        raise UsageError("name a benchmark and a method, for example: steppe run pmnist fs-dgpm (see steppe list).")
    if options.seeds is not None:
        if options.seed is not None:
            raise UsageError("give --seed N (one run) or --seeds N (several), not both.")
        return run_many(options, [options.method])
    if options.jobs is not None:
        raise UsageError("--jobs is for several runs at a time: give --seeds N with it.")
    return _run_one(options, config_of(options, options.method, options.seed or 0))


def _run_one(options: argparse.Namespace, config: RunConfig) -> int:
    first = Path("runs") / f"{config.benchmark}-{config.method}-seed{config.seed}"
    out = options.out or (first if options.resume else free(first))
    with resumable(options, out):
        return do_run(options, config, out, resume=options.resume)


def do_run(options: argparse.Namespace, config: RunConfig, out: Path, *, resume: bool) -> int:
    """Do the run, show how it goes, and print what came of it."""
    from steppe.cli.progress import make_display
    from steppe.experiments.run import run
    from steppe.experiments.study import Finished
    from steppe.report.page import write_report
    from steppe.results.layout import PAGE
    from steppe.results.tables import summary
    from steppe.runtime.files import require_inside
    from steppe.runtime.signals import deferred_signals

    every = 60 * options.checkpoint_every
    with make_display([f"{config.benchmark}-{config.method}-seed{config.seed}"]) as display:
        with deferred_signals() as stop:
            result = run(config, out, lambda event: display(0, event), resume=resume, checkpoint_every=every, stop=stop)
        display(0, Finished(result))
    write_report([out], require_inside(out, out / PAGE), f"steppe report {out}")
    say(summary(result))
    say(f"  everything is in {out}: start with {out / PAGE}")
    return 0
