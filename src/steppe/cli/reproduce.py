"""`steppe reproduce`: a table or figure of the paper, from whatever of it is there already to the end."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.options import SEEDS, Commands, add_checkpoint_option, add_data_option, chosen_seeds, given_path
from steppe.data.directory import set_data_directory
from steppe.errors import UsageError, unknown_name
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.experiments.recipes import Recipe

FLATNESS = "flatness.json"
_EXAMPLES = """\
examples:
  steppe reproduce --list                            what can be reproduced, and what it takes
  steppe reproduce pmnist-table                      the table of Permuted MNIST; stopped, the same command goes on
  steppe reproduce landscape-study --samples 10000   on fewer samples of each task, recorded as such
  steppe reproduce k-study --seeds 2 --out k         two seeds, in a directory of your choice
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add(
        "reproduce",
        "Do what a table or figure of the paper takes, and make it.",
        _reproduce,
        _EXAMPLES,
        goes_on="the same command goes on with it",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which (see --list)")
    parser.add_argument("--list", action="store_true", help="what there is, and how much of it is done in --out")
    parser.add_argument(
        "--methods", metavar="M,M,…", help="only these of its methods; name those whose runs are there as well"
    )
    parser.add_argument("--seeds", metavar="N", help=f"{SEEDS} (default: the recipe's own number)")
    parser.add_argument("--samples", type=int, metavar="N", help="training samples of each task, instead of all")
    parser.add_argument("--jobs", type=int, metavar="J", help="runs at a time (default: as many as there are cores)")
    parser.add_argument("--out", type=given_path, metavar="DIR", help="its directory (default: reproduction/NAME)")
    add_checkpoint_option(parser)
    add_data_option(parser)


def _reproduce(options: argparse.Namespace) -> int:
    from steppe.experiments.recipes import RECIPES

    set_data_directory(options.data)
    for name in ("samples", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: give at least 1.")
    if options.list:
        return _list(options)
    if options.name is None:
        raise UsageError("name what to reproduce, for example: steppe reproduce pmnist-table (see --list).")
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
    given = {name: getattr(options, name) for name in ("methods", "seeds", "samples")}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["steppe", "reproduce", options.name, *words])


def _list(options: argparse.Namespace) -> int:
    from steppe.experiments.recipes import RECIPES
    from steppe.results.layout import RESULT

    if options.name is not None and options.name not in RECIPES:
        raise unknown_name("reproduction", options.name, RECIPES)
    for name, recipe in RECIPES.items():
        if options.name not in (None, name):
            continue
        out = options.out or Path("reproduction") / name
        jobs = [job for part in recipe.parts for job in part.jobs(out, _seeds(options, recipe))]
        done = sum((job.out / RESULT).exists() for job in jobs)
        say(f"{name}: {recipe.text}")
        drawn = f"; figures: {', '.join(recipe.figures)}" if recipe.figures else ""
        say(f"    {len(jobs)} run{'' if len(jobs) == 1 else 's'}, {done} done in {out}{drawn}")
    return 0


def _seeds(options: argparse.Namespace, recipe: Recipe) -> range:
    return range(recipe.seeds) if options.seeds is None else chosen_seeds(options.seeds)


def _changes(options: argparse.Namespace) -> list[str]:
    return [] if options.samples is None else [f"benchmark.samples={options.samples}"]


def _studies(options: argparse.Namespace, recipe: Recipe, out: Path) -> int:
    """Do the runs that are missing, study by study."""
    from steppe.cli.study import do_study
    from steppe.experiments.run import refuse_unsuitable
    from steppe.experiments.run_directory import locked
    from steppe.experiments.study import write_plan
    from steppe.runtime.files import require_inside

    seeds, changes, code = _seeds(options, recipe), _changes(options), 0
    for part in recipe.parts:
        refuse_unsuitable([job.config for job in part.jobs(out, seeds[:1], changes)])
    for part in recipe.parts:
        jobs, command = part.jobs(out, seeds, changes), part.command(options.seeds or str(recipe.seeds), changes)
        say(f"{part.name}: {command}")
        with locked(require_inside(out, out / part.name)):
            write_plan(out / part.name, jobs, command)
            code = max(code, do_study(options, out / part.name, jobs, command, resume=True))
    return code


def _landscapes(recipe: Recipe, out: Path, seed: int, command: str) -> None:
    """Measure the landscapes that are missing: of one seed of each method, every task after every task."""
    import torch

    from steppe.cli.landscape import measure
    from steppe.cli.options import finished_runs
    from steppe.experiments.run_directory import kept_weights
    from steppe.landscape.files import LANDSCAPE
    from steppe.landscape.measure import Request
    from steppe.landscape.rank_correlation import compared, rank_correlations, without_bounds
    from steppe.landscape.settings import LandscapeSettings
    from steppe.runtime.files import explain_write_errors, require_inside, write_atomic
    from steppe.version import versions

    torch.set_num_threads(1)
    for part in recipe.parts:
        for method in part.methods:
            run = out / part.name / method / f"seed-{seed}"
            if (run / LANDSCAPE).exists() and not kept_weights(run):
                continue  # measured where the weights were; they are often thrown away afterwards
            measure(run, None, LandscapeSettings(), Request(), resume=True, command="steppe landscape RUN")
    rows = compared(finished_runs([out]))
    told = {
        "command": command,
        "versions": versions(),
        "rows": rows,
        "correlations": rank_correlations(rows),
        "correlations_without_bounds": rank_correlations(without_bounds(rows)),
    }
    text = json.dumps(told, indent=1) + "\n"
    with explain_write_errors(out / FLATNESS):
        write_atomic(require_inside(out, out / FLATNESS), text.encode())
    say(f"wrote {out / FLATNESS}: accuracy and flatness of each method")


def _figures(recipe: Recipe, out: Path) -> None:
    """Draw what can be drawn from the runs, and say of the rest what it lacks."""
    from steppe.cli.options import finished_runs
    from steppe.figures import FIGURES, Choices
    from steppe.figures.output import files_for, save
    from steppe.figures.reading import Run
    from steppe.runtime.files import require_inside

    runs = [Run(path, result) for path, result in finished_runs([out]).items()]
    for name in recipe.figures:
        files = [require_inside(out, file) for file in files_for(out / name, name)]
        try:
            save(FIGURES[name].drawn(runs, Choices()), files)
        except UsageError as error:
            say(f"steppe: {name} is not drawn: {error}", file=sys.stderr)
        else:
            say(f"wrote {', '.join(map(str, files))}")
