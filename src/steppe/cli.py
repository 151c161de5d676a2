"""The command line: run, study, list, show, figures, data, landscape."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe import data_cli
from steppe.commands import landscape
from steppe.commands.parsing import Commands
from steppe.data.directory import use_directory
from steppe.errors import SteppeError, UsageError, unknown
from steppe.version import __version__

if TYPE_CHECKING:
    from steppe.config import RunConfig

_RUN_EXAMPLES = """\
examples:
  steppe run pmnist fs-dgpm                          the paper's method on Permuted MNIST, seed 0
  steppe run pmnist fs-sgpm --seeds 5 --jobs 2       five seeds, two at a time, with a table
  steppe run pmnist er --set buffer=500 --out er500  another buffer, a directory of your choice
  steppe run --config er500/config.toml --out again  the same run once more
  steppe run cifar100-split gpm --tasks 3 --epochs 5 a shortened run, recorded as such
  steppe run folder:photos fs-dgpm                   your own images, a folder for each class
  steppe run pmnist mine --plugin mine.py            a method of your own
"""
_STUDY_EXAMPLES = """\
examples:
  steppe study pmnist fs-dgpm er finetune --seeds 5 --jobs 2 --out study
  steppe study pmnist --methods paper --seeds 5 --jobs 2     the paper's whole table
  steppe study pmnist fs-dgpm fs-sgpm --seeds 3 --set benchmark.tasks=10 --out short
"""
_SHOW_EXAMPLES = """\
examples:
  steppe show runs/pmnist-fs-dgpm-seed0     one run: figures, settings, accuracy matrix
  steppe show study                         a study: its table
"""
_FIGURE_EXAMPLES = """\
examples:
  steppe figures forgetting runs/pmnist-fs-dgpm-seed0 -o forgetting.png
  steppe figures forgetting study -o forgetting.pdf       every run of a study, averaged over seeds
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: asked for wrongly, 1: failed, 130: stopped by Ctrl-C)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.action(options)
    except SteppeError as error:
        if options.debug:
            traceback.print_exc()
        print(f"steppe: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("steppe: stopped by Ctrl-C; what was finished is kept.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(options: argparse.Namespace) -> int:
    from steppe.config import RunConfig

    use_directory(options.data)
    if options.config is not None:
        apart = ("benchmark", "method", "seed", "seeds", "epochs", "tasks", "device", "threads", "jobs")
        if any(getattr(options, name) is not None for name in apart) or options.set or options.plugin:
            raise UsageError("--config holds the whole run: give nothing but --out and --data with it.")
        return _run_one(RunConfig.load(options.config), options.out)
    if options.benchmark is None or options.method is None:
        raise UsageError("name a benchmark and a method, for example: steppe run pmnist fs-dgpm (see steppe list).")
    if options.seeds is not None:
        if options.seed is not None:
            raise UsageError("give --seed N (one run) or --seeds N (seeds 0 to N-1), not both.")
        options.resume = False
        return _run_many(options, [options.method])
    if options.jobs is not None:
        raise UsageError("--jobs is for several runs at a time: give --seeds N with it.")
    return _run_one(_config(options, options.method, options.seed or 0), options.out)


def _study(options: argparse.Namespace) -> int:
    from steppe.config import load_plugins, named_benchmark
    from steppe.published import methods_with_figures
    from steppe.registry import METHODS, find_benchmark

    use_directory(options.data)
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
    return _run_many(options, named)


def _config(options: argparse.Namespace, method: str, seed: int) -> RunConfig:
    from steppe.config import RunConfig
    from steppe.experiment import resolved_device

    return RunConfig.make(
        options.benchmark,
        method,
        _overrides(options),
        seed=seed,
        device=resolved_device(options.device or "cpu"),
        threads=1 if options.threads is None else options.threads,
        plugins=options.plugin,
    )


def _overrides(options: argparse.Namespace) -> list[str]:
    """What --set, --epochs and --tasks change, all of it recorded in the same way."""
    shortened = [("training.epochs", options.epochs), ("benchmark.tasks", options.tasks)]
    return [*options.set, *(f"{key}={value}" for key, value in shortened if value is not None)]


def _run_one(config: RunConfig, out: Path | None) -> int:
    from steppe.display import make_display
    from steppe.experiment import run
    from steppe.study import Finished
    from steppe.tables import summary

    name = f"{config.benchmark}-{config.method}-seed{config.seed}"
    out = out or _free(Path("runs") / name)
    with make_display([name]) as display:
        result = run(config, out, lambda event: display(0, event))
        display(0, Finished(result))
    print(summary(result))
    print(f"  everything is in {out}: start with {out / 'report.md'}")
    return 0


def _run_many(options: argparse.Namespace, methods: Sequence[str]) -> int:
    from steppe.config import command_line, named_benchmark
    from steppe.display import make_display
    from steppe.experiment import refuse_unsuitable
    from steppe.study import Job, run_all, write_tables
    from steppe.tables import markdown

    if options.resume and options.out is None:
        raise UsageError("--resume goes on with a study that is there: say which with --out.")
    if options.seeds is None or options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: give how many seeds to run, at least 1.")
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: give how many runs may go on at once, at least 1.")
    name = "-".join(methods) if len(methods) < 4 else f"{len(methods)}methods"
    benchmark, given = named_benchmark(options.benchmark)
    out = options.out or _free(Path("runs") / f"{benchmark}-{name}-{options.seeds}seeds")
    jobs = [
        Job(_config(options, method, seed), out / method / f"seed-{seed}")
        for method in methods
        for seed in range(options.seeds)
    ]
    refuse_unsuitable([job.config for job in jobs[:: options.seeds]])
    workers = min(options.jobs or len(os.sched_getaffinity(0)), len(jobs))
    with make_display([f"{job.config.method} seed {job.config.seed}" for job in jobs]) as display:
        outcome = run_all(jobs, workers, display, resume=options.resume)
    results = [outcome.results[number] for number in sorted(outcome.results)]
    if results:
        words = [*methods, "--seeds", str(options.seeds), "--jobs", str(workers)]
        changes = [*(f"benchmark.{key}={value}" for key, value in given.items()), *_overrides(options)]
        write_tables(out, results, command_line("study", jobs[0].config, words, changes))
        print(markdown(results), end="")
        print(f"\neverything is in {out}: table.md, table.tex, table.json, and a directory for each run")
    for number, failure in sorted(outcome.failures.items()):
        job = jobs[number]
        print(f"steppe: {job.config.method} seed {job.config.seed} failed: {failure.reason}", file=sys.stderr)
        if options.debug and failure.details:
            print(failure.details, file=sys.stderr)
    return 1 if outcome.failures else 0


def _free(path: Path) -> Path:
    """The path itself, or with a number behind it where it is taken."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _list(options: argparse.Namespace) -> int:
    if options.plugin:
        from steppe.catalogue import catalogue
        from steppe.config import load_plugins

        load_plugins(options.plugin)
        print(catalogue(options.name))
        return 0
    pages = json.loads(files("steppe").joinpath("catalogue.json").read_text(encoding="utf-8"))
    if (options.name or "") not in pages:
        raise unknown("method or benchmark", options.name, [name for name in pages if name])
    print(pages[options.name or ""])
    return 0


def _show(options: argparse.Namespace) -> int:
    from steppe.runs import RESULT
    from steppe.tables import markdown, run_report

    results = _results([options.directory])
    if (options.directory / RESULT).exists():
        print(run_report(results[0]), end="")
        return 0
    for benchmark in dict.fromkeys(result["benchmark"] for result in results):
        print(f"{benchmark}\n")
        print(markdown([result for result in results if result["benchmark"] == benchmark]))
    return 0


def _figures(options: argparse.Namespace) -> int:
    from steppe.figures import FIGURES

    FIGURES[options.figure](_results(options.directories), options.out)
    print(f"wrote {options.out}")
    return 0


def _results(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of all finished runs in these directories; unfinished ones are named."""
    from steppe.runs import CONFIG, RESULT, read_result

    found = []
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory: give a run's or a study's.")
        inner = sorted(file.parent for file in directory.rglob(RESULT))
        unfinished = sorted({config.parent for config in directory.rglob(CONFIG)} - set(inner))
        if not inner:
            state = f"{len(unfinished)} unfinished run(s) and no finished one" if unfinished else "no run"
            raise UsageError(f"{directory} holds {state}: there is nothing to show.")
        found += [read_result(path) for path in inner]
        for path in unfinished:
            print(f"steppe: {path} is unfinished and left out.", file=sys.stderr)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="steppe",
        description="Let a network learn one task after another without forgetting the earlier ones.",
        epilog="start with: steppe run pmnist fs-dgpm",
    )
    parser.add_argument("--version", action="version", version=f"steppe {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, examples: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def running(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--jobs", type=int, metavar="J", help="runs at a time (default: as many as there are cores)")
        sub.add_argument("--epochs", type=int, metavar="N", help="epochs of each task, instead of the benchmark's own")
        sub.add_argument("--tasks", type=int, metavar="N", help="the first N tasks only, instead of all")
        sub.add_argument("--device", choices=("cpu", "cuda", "auto"), help="where to compute (default: cpu)")
        sub.add_argument("--threads", type=int, metavar="N", help="threads of each run; recorded (default: 1)")
        sub.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; may be repeated"
        )
        data_cli.add_data_option(sub)
        plugin(sub)

    def plugin(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--plugin",
            action="append",
            default=[],
            metavar="FILE",
            help="a Python file that registers methods or benchmarks of your own",
        )

    run = command("run", "Train one method on one benchmark.", _RUN_EXAMPLES)
    run.add_argument("benchmark", nargs="?", metavar="BENCHMARK", help="which tasks (see steppe list)")
    run.add_argument("method", nargs="?", metavar="METHOD", help="how to learn them (see steppe list)")
    run.add_argument("--seed", type=int, metavar="N", help="the seed of everything random (default: 0)")
    run.add_argument("--seeds", type=int, metavar="N", help="run seeds 0 to N-1 and give mean ± std")
    run.add_argument("--out", type=Path, metavar="DIR", help="the run directory (default: a new one under runs/)")
    run.add_argument("--config", type=Path, metavar="FILE", help="rerun a run from its config.toml")
    running(run)
    run.set_defaults(action=_run)

    study = command("study", "Train several methods with several seeds, and compare.", _STUDY_EXAMPLES)
    study.add_argument("benchmark", metavar="BENCHMARK", help="which tasks (see steppe list)")
    study.add_argument("names", nargs="*", metavar="METHOD", help="the methods to compare")
    study.add_argument(
        "--methods", choices=("paper",), help="paper: every method with published figures on the benchmark"
    )
    study.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 0 to N-1 of each (default: 5)")
    study.add_argument("--out", type=Path, metavar="DIR", help="the study's directory (default: a new one under runs/)")
    study.add_argument(
        "--resume", action="store_true", help="keep the runs in --out that are finished, and do the missing ones"
    )
    running(study)
    study.set_defaults(action=_study)

    lists = command("list", "List methods and benchmarks; with a name, its settings and presets.")
    lists.add_argument("name", nargs="?", metavar="NAME", help="a method or a benchmark")
    plugin(lists)
    lists.set_defaults(action=_list)

    show = command("show", "Show a finished run or study.", _SHOW_EXAMPLES)
    show.add_argument("directory", type=Path, metavar="DIR", help="a run's or a study's directory")
    show.set_defaults(action=_show)

    figures = command("figures", "Draw a figure from finished runs.", _FIGURE_EXAMPLES)
    figures.add_argument("figure", choices=("forgetting",), help="which figure")
    figures.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="runs or studies")
    figures.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="a .png, .pdf or .svg file")
    figures.set_defaults(action=_figures)

    data = command("data", "List, fetch, verify and locate the data sets.", data_cli.EXAMPLES)
    data_cli.add_commands(data)
    landscape.add(Commands(commands))
    return parser
