"""`steppe reproduce`: do all the runs behind a table or figure of the paper, and draw it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.options import SEEDS, add_checkpoint_option, add_data_option, add_jobs_option, parse_path, parse_seeds
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError, unknown_name
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.experiments.paper_results import Recipe

FLATNESS = "flatness.json"
_EXAMPLES = """\
examples:
  steppe reproduce --list                           what can be reproduced
  steppe reproduce pmnist-table                     rerun it to resume
  steppe reproduce landscape-study --samples 10000  fewer samples per task
  steppe reproduce k-study --seeds 2 --out k        two seeds, output in k/
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "reproduce",
        "Reproduce a table or figure from the paper.",
        _reproduce,
        _EXAMPLES,
        resume_hint="run the same command again to resume.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="table or figure (see --list)")
    parser.add_argument(
        "--list", action="store_true", help="list tables and figures, and how many of their runs are done"
    )
    parser.add_argument("--methods", metavar="M,M,…", help="only these methods; include those already in --out")
    parser.add_argument("--seeds", metavar="N", help=f"{SEEDS} (default: as in our results)")
    parser.add_argument("--samples", type=int, metavar="N", help="training samples per task (default: all)")
    add_jobs_option(parser)
    parser.add_argument("--out", type=parse_path, metavar="DIR", help="output directory (default: reproduction/NAME)")
    add_checkpoint_option(parser)
    add_data_option(parser)


def _reproduce(options: argparse.Namespace) -> int:
    from steppe.experiments.paper_results import RECIPES

    set_data_directory(options.data)
    for name in ("samples", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}.")
    if options.list:
        return _list(options)
    if options.name is None:
        raise UsageError("missing NAME; for example: steppe reproduce pmnist-table (see steppe reproduce --list).")
    if options.name not in RECIPES:
        raise unknown_name("reproduction", options.name, RECIPES)
    recipe, out = RECIPES[options.name], options.out or Path("reproduction") / options.name
    if options.methods is not None:
        recipe = recipe.only(options.methods.split(","))
    code = _studies(options, recipe, out)
    if code == 0 and recipe.landscapes:
        _landscapes(recipe, out, _seeds(options, recipe)[0], _command(options))
    if code == 0:
        _figures(recipe, out)
    return code


def _command(options: argparse.Namespace) -> str:
    values = {name: getattr(options, name) for name in ("methods", "seeds", "samples")}
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["steppe", "reproduce", options.name, *words])


def _list(options: argparse.Namespace) -> int:
    from steppe.experiments.paper_results import RECIPES
    from steppe.results.file_names import RESULT

    if options.name is not None and options.name not in RECIPES:
        raise unknown_name("reproduction", options.name, RECIPES)
    for name, recipe in RECIPES.items():
        if options.name not in (None, name):
            continue
        out = options.out or Path("reproduction") / name
        jobs = [job for part in recipe.parts for job in part.jobs(out, _seeds(options, recipe))]
        done = sum((job.out / RESULT).exists() for job in jobs)
        say(f"{name}: {recipe.text}")
        figures = f"; figures: {', '.join(recipe.figures)}" if recipe.figures else ""
        say(f"    {len(jobs)} run{'' if len(jobs) == 1 else 's'}, {done} done in {out}{figures}")
    return 0


def _seeds(options: argparse.Namespace, recipe: Recipe) -> range:
    return range(recipe.seeds) if options.seeds is None else parse_seeds(options.seeds)


def _changes(options: argparse.Namespace) -> list[str]:
    return [] if options.samples is None else [f"benchmark.samples={options.samples}"]


def _studies(options: argparse.Namespace, recipe: Recipe, out: Path) -> int:
    """Do the missing runs, study by study."""
    from steppe.cli.study import do_study
    from steppe.experiments.run import validate_configs
    from steppe.experiments.run_directory import lock_directory
    from steppe.experiments.study import write_plan
    from steppe.runtime.files import require_inside

    seeds, changes, code = _seeds(options, recipe), _changes(options), 0
    for part in recipe.parts:
        validate_configs([job.config for job in part.jobs(out, seeds[:1], changes)])
    for part in recipe.parts:
        jobs, command = part.jobs(out, seeds, changes), part.command(options.seeds or str(recipe.seeds), changes)
        say(f"{part.name}: {command}")
        with lock_directory(require_inside(out, out / part.name)):
            write_plan(out / part.name, jobs, command)
            code = max(code, do_study(options, out / part.name, jobs, command, resume=True))
    return code


def _landscapes(recipe: Recipe, out: Path, seed: int, command: str) -> None:
    """Measure the missing landscapes, for one seed of each method."""
    import torch

    from steppe.cli.finished_runs import load_finished_runs
    from steppe.cli.landscape import measure
    from steppe.experiments.run_directory import weight_checkpoints
    from steppe.landscape.measure import Request
    from steppe.landscape.rank_correlation import compare_runs, rank_correlations, without_reference_methods
    from steppe.landscape.settings import LandscapeSettings
    from steppe.results.file_names import LANDSCAPE
    from steppe.runtime.files import explain_write_errors, require_inside, write_atomic
    from steppe.version import versions

    torch.set_num_threads(1)
    for part in recipe.parts:
        for method in part.methods:
            run = out / part.name / method / f"seed-{seed}"
            if (run / LANDSCAPE).exists() and not weight_checkpoints(run):
                continue  # measured already; the weights have been deleted since
            measure(run, None, LandscapeSettings(), Request(), resume=True, command="steppe landscape RUN")
    rows = compare_runs({run.path: run.result for run in load_finished_runs([out])})
    content = {
        "command": command,
        "versions": versions(),
        "rows": rows,
        "correlations": rank_correlations(rows),
        "correlations_without_bounds": rank_correlations(without_reference_methods(rows)),
    }
    text = json.dumps(content, indent=1) + "\n"
    with explain_write_errors(out / FLATNESS):
        write_atomic(require_inside(out, out / FLATNESS), text.encode())
    say(f"Wrote {out / FLATNESS} with the accuracy and flatness of each method.")


def _figures(recipe: Recipe, out: Path) -> None:
    """Draw the figures; report those that lack runs."""
    from steppe.cli.finished_runs import load_finished_runs
    from steppe.figures import FIGURES, Choices
    from steppe.figures.output import output_files, save
    from steppe.runtime.files import require_inside

    runs = load_finished_runs([out])
    for name in recipe.figures:
        files = [require_inside(out, file) for file in output_files(out / name, name)]
        try:
            save(FIGURES[name].draw(runs, Choices()), files)
        except UsageError as error:
            say(f"steppe: skipping figure {name}: {error}", file=sys.stderr)
        else:
            say(f"Wrote {', '.join(map(str, files))}.")
