"""`steppe landscape`: the loss around the weights that runs have kept."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.options import (
    NAMED_PLUGIN,
    Commands,
    add_data_option,
    add_plugin_option,
    add_trust_option,
    given_path,
    task_numbers,
)
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.landscape.settings import LandscapeSettings
from steppe.runtime.malloc import keep_freed_memory
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.landscape.files import Landscape
    from steppe.landscape.flatness import Estimate
    from steppe.landscape.measure import Callback, Request

_EXAMPLES = """\
examples:
  steppe landscape runs/pmnist-fs-dgpm-seed0                      every task, after every task
  steppe landscape study --samples 5000 --hessian                 every run of a study, with top eigenvalues
  steppe landscape RUN --after 5,10 --task 1,5                    the panels of the paper's Figure 1
  steppe landscape RUN --after 10 --task 5 --surface -o five.json a surface over two directions
  steppe landscape RUN --resume                                   go on with what was stopped
"""
_LINE_EVERY = 30.0  # seconds between lines where there is no terminal


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "landscape",
        "Measure the loss around a run's weights: profiles, flatness, bound.",
        _landscape,
        _EXAMPLES,
        goes_on="the same command with --resume goes on with it",
    )
    parser.add_argument(
        "directories", nargs="+", type=given_path, metavar="RUN", help="runs or studies, finished or not"
    )
    usual = LandscapeSettings().as_dict()
    for name, (kind, limits) in LandscapeSettings.schema().items():
        told = f"{limits.help} (default: {usual[name]:g})"
        parser.add_argument(f"--{name}", metavar="N" if kind is int else "X", help=told)
    parser.add_argument("--after", metavar="N,N,…", help="only the networks after these tasks (default: all)")
    parser.add_argument("--task", metavar="N,N,…", help="only these tasks, from 1 (default: all seen)")
    parser.add_argument("--surface", action="store_true", help="also the loss over two directions at once")
    parser.add_argument("--hessian", action="store_true", help="also the Hessian's top eigenvalue; takes longer")
    parser.add_argument("--resume", action="store_true", help="keep what the output holds, and add what it lacks")
    parser.add_argument(
        "-o", "--out", type=given_path, metavar="FILE", help="default: landscape.json in the run directory"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="where to compute")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads to compute with (default: 1)")
    add_data_option(parser)
    add_plugin_option(parser, NAMED_PLUGIN)
    add_trust_option(parser, "the runs' directories")


def _landscape(options: argparse.Namespace) -> int:
    # Read when scipy is loaded, below: its threads would wait for each other where cores are busy, five times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(options.threads))
    import torch

    from steppe.experiments.config import RunConfig
    from steppe.experiments.plugins import require_plugins
    from steppe.landscape.measure import Request
    from steppe.results.layout import CONFIG
    from steppe.runtime.devices import resolve_device

    given = {name: getattr(options, name) for name in LandscapeSettings.schema()}
    settings = LandscapeSettings.from_mapping({name: value for name, value in given.items() if value is not None})
    if options.threads < 1:
        raise UsageError(f"--threads {options.threads}: give at least 1.")
    after, tasks = task_numbers("--after", options.after), task_numbers("--task", options.task)
    wanted = Request(after, tasks, options.hessian, options.surface)
    device = resolve_device(options.device)
    runs = _runs(options.directories)
    if options.out is not None and len(runs) > 1:
        raise UsageError(f"-o {options.out}: there are {len(runs)} runs, each with a file of its own; leave it out.")
    made_with = {
        run: RunConfig.load(run / CONFIG, options.plugin, trust_plugins=options.trust_plugins).plugins for run in runs
    }
    require_plugins(options.plugin, [path for paths in made_with.values() for path in paths])
    set_data_directory(options.data)
    torch.set_num_threads(options.threads)
    for run in runs:
        measure(
            run,
            options.out,
            settings,
            wanted,
            device=device,
            plugins=made_with[run],
            resume=options.resume,
            command=_command(options, settings, device),
        )
    return 0


def measure(
    run: Path,
    out: Path | None,
    settings: LandscapeSettings,
    wanted: Request,
    *,
    device: str = "cpu",
    plugins: Sequence[str] = (),
    resume: bool,
    command: str,
) -> None:
    """Measure the landscape of one run, show how it goes, and print its flatness."""
    from steppe.landscape.files import LANDSCAPE
    from steppe.landscape.measure import measure
    from steppe.runtime.devices import make_deterministic
    from steppe.runtime.files import require_inside

    make_deterministic(device)
    keep_freed_memory()
    out = out or require_inside(run, run / LANDSCAPE)
    with _shown(str(run)) as callback:
        landscape = measure(
            run,
            out,
            settings,
            wanted,
            device=device,
            plugins=plugins,
            resume=resume,
            command=command,
            callback=callback,
        )
    say(_table(landscape))
    say(f"  everything is in {out}\n")


def _runs(directories: Sequence[Path]) -> list[Path]:
    """Every run in these directories that has weights."""
    from steppe.experiments.run_directory import kept_weights
    from steppe.results.layout import CONFIG

    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory: give a run's or a study's.")
        inner = sorted(config.parent for config in directory.rglob(CONFIG))
        kept = [run for run in inner if kept_weights(run)]
        if not kept:
            state = "no run that has kept its weights" if inner else "no run"
            raise UsageError(f"{directory} holds {state}: there is no landscape to measure.")
        for run in inner:
            if run not in kept:
                say(f"steppe: {run} has kept no weights and is left out.", file=sys.stderr)
        found |= dict.fromkeys(kept)
    return list(found)


def _command(options: argparse.Namespace, settings: LandscapeSettings, device: str) -> str:
    """The command line that measures this, for any run directory."""
    line = ["steppe", "landscape", "RUN", *settings.options()]
    for name in ("after", "task"):
        if getattr(options, name) is not None:
            line += [f"--{name}", getattr(options, name)]
    line += [f"--{name}" for name in ("surface", "hessian") if getattr(options, name)]
    if device != "cpu":
        line += ["--device", device]
    return shlex.join(line)


@contextmanager
def _shown(name: str) -> Iterator[Callback]:
    """Progress as a live bar where standard error is a terminal, as a line now and then where it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from steppe.landscape.measure import Step

    def where(step: Step) -> str:
        return f"{name}: task {step.task} after task {step.after}"

    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def line(step: Step) -> None:
            nonlocal last
            if time.monotonic() - last > _LINE_EVERY:
                last = time.monotonic()
                say(f"{where(step)}, {100 * step.done // step.total} %", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(name, total=None)
        yield lambda step: bars.update(bar, description=where(step), completed=step.done, total=step.total)


def _table(landscape: Landscape) -> str:
    """Flatness of each task after the last one, and the bound there."""
    after, settings = landscape.afters[-1], landscape.settings
    rows = [["task", "loss", f"sharpness({settings.radius:g})", "mean rise", "curvature", "top eigenvalue"]]
    for task in landscape.tasks(after):
        pair = landscape.pairs[after, task]
        flat, top = pair.flatness, "-" if pair.eigenvalue is None else f"{pair.eigenvalue:.4g}"
        figures = [_written(figure) for figure in (flat.sharpness, flat.mean_rise, flat.curvature)]
        rows.append([str(task), f"{flat.loss:.4g}", *figures, top])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    run = landscape.run
    title = f"{run['benchmark']}, {run['method']}, seed {run['seed']}, after task {after} (mean ± standard error)"
    if after in landscape.bounds:
        found = landscape.bounds[after]
        terms = found.error
        lines.append(
            f"bound, zero-one loss, sigma {settings.sigma:g}: stability {terms.stability:.4g} + sensitivity "
            f"{terms.sensitivity:.4g} + sharpness {terms.sharpness:.4g} + complexity {found.complexity:.4g} "
            f"(KL {found.kl:.4g})"
        )
    return "\n".join([title, *lines])


def _written(estimate: Estimate) -> str:
    return f"{estimate.mean:.4g}" + ("" if estimate.error is None else f" ± {estimate.error:.2g}")
