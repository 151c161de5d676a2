"""`steppe landscape`: measure the loss around the saved weights of runs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.options import (
    PLUGIN_OF_RUN,
    add_data_option,
    add_plugin_option,
    add_trust_option,
    parse_path,
    parse_task_numbers,
)
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError
from steppe.fast.malloc import keep_freed_memory
from steppe.landscape.settings import LandscapeSettings
from steppe.runtime.files import require_inside
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.landscape.files import Landscape
    from steppe.landscape.flatness import Estimate
    from steppe.landscape.measure import MeasureProgress, Request

_EXAMPLES = """\
examples:
  steppe landscape runs/pmnist-fs-dgpm-seed0          all tasks, after each task
  steppe landscape study --samples 5000 --hessian     with top eigenvalues
  steppe landscape RUN --after 5,10 --task 1,5        the panels of Figure 1
  steppe landscape RUN --after 10 --task 5 --surface  over two directions
  steppe landscape RUN --resume                       resume a measurement
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "landscape",
        "Measure the loss landscape around saved weights.",
        _landscape,
        _EXAMPLES,
        resume_hint="run the same command with --resume to resume.",
    )
    parser.add_argument(
        "directories", nargs="+", type=parse_path, metavar="RUN", help="run or study directories, finished or not"
    )
    defaults = LandscapeSettings().as_dict()
    for name, (kind, limits) in LandscapeSettings.schema().items():
        text = f"{limits.help} (default: {defaults[name]:g})"
        parser.add_argument(f"--{name}", metavar="N" if kind is int else "X", help=text)
    parser.add_argument("--after", metavar="N,N,…", help="use the weights after these tasks (default: all)")
    parser.add_argument(
        "--task", metavar="N,N,…", help="losses of these tasks, counted from 1 (default: all seen by then)"
    )
    parser.add_argument("--surface", action="store_true", help="also measure the loss over two directions")
    parser.add_argument("--hessian", action="store_true", help="also compute the Hessian's top eigenvalue (slow)")
    parser.add_argument("--resume", action="store_true", help="keep what is in the output file and add what is missing")
    parser.add_argument(
        "-o",
        "--out",
        type=parse_path,
        metavar="FILE",
        help="output file (default: landscape.json in the run directory)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="cpu", help="where to compute (default: cpu)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    add_data_option(parser)
    add_plugin_option(parser, PLUGIN_OF_RUN)
    add_trust_option(parser, "the runs' directories")


def _landscape(options: argparse.Namespace) -> int:
    # Read when scipy is imported, below. On busy cores its threads wait for each other and take five times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(options.threads))
    import torch

    from steppe.experiments.config import RunConfig
    from steppe.experiments.plugins import require_known_names
    from steppe.landscape.measure import Request
    from steppe.results.file_names import CONFIG
    from steppe.runtime.devices import resolve_device

    values = {name: getattr(options, name) for name in LandscapeSettings.schema()}
    settings = LandscapeSettings.from_mapping({name: value for name, value in values.items() if value is not None})
    if options.threads < 1:
        raise UsageError(f"--threads must be at least 1, got {options.threads}.")
    after, tasks = parse_task_numbers("--after", options.after), parse_task_numbers("--task", options.task)
    request = Request(after, tasks, options.hessian, options.surface)
    device = resolve_device(options.device)
    runs = _find_runs(options.directories)
    if options.out is not None and len(runs) > 1:
        raise UsageError(f"-o {options.out}: there are {len(runs)} runs, and each one has its own file; leave out -o.")
    plugins = {
        run: RunConfig.load(run / CONFIG, options.plugin, trust_plugins=options.trust_plugins).plugins for run in runs
    }
    require_known_names(options.plugin, [path for paths in plugins.values() for path in paths])
    set_data_directory(options.data)
    torch.set_num_threads(options.threads)
    for run in runs:
        measure(
            run,
            options.out,
            settings,
            request,
            device=device,
            plugins=plugins[run],
            resume=options.resume,
            command=_command(options, settings, device),
        )
    return 0


def measure(
    run: Path,
    out: Path | None,
    settings: LandscapeSettings,
    request: Request,
    *,
    device: str = "cpu",
    plugins: Sequence[str] = (),
    resume: bool,
    command: str,
) -> None:
    """Measure the landscape of one run, show progress, and print a table of flatness.

    Args:
        run: The run directory.
        out: The output file; None for landscape.json in the run directory.
        settings: Settings of the measurement.
        request: The weights and tasks to measure.
        device: Where to compute.
        plugins: The run's plugins.
        resume: Keep what is in the output file.
        command: The command to record.
    """
    from steppe.cli.progress import show_progress
    from steppe.landscape.measure import measure
    from steppe.results.file_names import LANDSCAPE
    from steppe.runtime.devices import make_deterministic

    make_deterministic(device)
    keep_freed_memory()
    out = out or require_inside(run, run / LANDSCAPE)
    with show_progress(str(run)) as progress:
        landscape = measure(
            run,
            out,
            settings,
            request,
            device=device,
            plugins=plugins,
            resume=resume,
            command=command,
            callback=lambda step: progress(step.done, step.total, _describe_step(step)),
        )
    say(_table(landscape))
    say(f"Wrote {out}.\n")


def _find_runs(directories: Sequence[Path]) -> list[Path]:
    """Find all runs with saved weights; report the others on stderr."""
    from steppe.experiments.run_directory import find_runs, weight_checkpoints
    from steppe.results.file_names import CONFIG

    found: dict[Path, None] = {}
    for directory in directories:
        finished, unfinished = find_runs(directory)
        runs = sorted(run for run in (*finished, *unfinished) if (run / CONFIG).exists())
        with_weights = [run for run in runs if weight_checkpoints(run)]
        if not with_weights:
            content = "no run with saved weights" if runs else "no runs"
            raise UsageError(f"{directory} contains {content}; there is no landscape to measure.")
        for run in runs:
            if run not in with_weights:
                say(f"steppe: skipping {run}: it has no saved weights.", file=sys.stderr)
        found |= dict.fromkeys(with_weights)
    return list(found)


def _describe_step(step: MeasureProgress) -> str:
    return f"task {step.task} after task {step.after}"


def _command(options: argparse.Namespace, settings: LandscapeSettings, device: str) -> str:
    """Return the command that measures this, for any run directory."""
    line = ["steppe", "landscape", "RUN", *settings.options()]
    for name in ("after", "task"):
        if getattr(options, name) is not None:
            line += [f"--{name}", getattr(options, name)]
    line += [f"--{name}" for name in ("surface", "hessian") if getattr(options, name)]
    if device != "cpu":
        line += ["--device", device]
    return shlex.join(line)


def _table(landscape: Landscape) -> str:
    """Format the flatness of each task after the last one, and the bound."""
    after, settings = landscape.afters[-1], landscape.settings
    rows = [["task", "loss", f"sharpness({settings.radius:g})", "mean rise", "curvature", "top eigenvalue"]]
    for task in landscape.tasks(after):
        pair = landscape.pairs[after, task]
        flat, top = pair.flatness, "-" if pair.eigenvalue is None else f"{pair.eigenvalue:.4g}"
        estimates = [_format_estimate(estimate) for estimate in (flat.sharpness, flat.mean_rise, flat.curvature)]
        rows.append([str(task), f"{flat.loss:.4g}", *estimates, top])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    run = landscape.run
    title = f"{run['benchmark']}, {run['method']}, seed {run['seed']}, after task {after} (mean ± standard error)"
    if after in landscape.bounds:
        bound = landscape.bounds[after]
        terms = bound.error
        lines.append(
            f"bound, zero-one loss, sigma {settings.sigma:g}: stability {terms.stability:.4g} + sensitivity "
            f"{terms.sensitivity:.4g} + sharpness {terms.sharpness:.4g} + complexity {bound.complexity:.4g} "
            f"(KL {bound.kl:.4g})"
        )
    return "\n".join([title, *lines])


def _format_estimate(estimate: Estimate) -> str:
    return f"{estimate.mean:.4g}" + ("" if estimate.error is None else f" ± {estimate.error:.2g}")
