"""Run the suite: methods with their default settings on small problems that nobody tuned them for.

    python bench/suite/run.py --out results/suite --jobs 2

Each run writes one file, OUT/PROBLEM/METHOD/seed-N.json; finished ones are not run again, so the command can be
interrupted and repeated. `python bench/suite/table.py results/suite` makes the tables. CIFAR-100 and TinyImageNet must
be in the data directory (`steppe data`); TinyImageNet's first 24 classes are used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from problems import PROBLEMS, Problem

import steppe
from steppe.registry import METHODS
from steppe.runtime.environment import machine_info
from steppe.version import versions

Cell = tuple[str, str, int]


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the results")
    parser.add_argument("--methods", nargs="+", default=["finetune", "er", "der++", "fs-dgpm"], metavar="METHOD")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS, metavar="PROBLEM")
    parser.add_argument("--half", choices=("choose", "held out"), help="only this half of the problems")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once, one core each (default: 1)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="other settings")
    parser.add_argument("--label", help="what to call the methods with these settings: METHOD LABEL")
    parser.add_argument(
        "--same-bytes", metavar="METHOD", help="give the methods a buffer of as many bytes as this one has kept"
    )
    options = parser.parse_args()
    if options.changes and not options.label:
        parser.error("--set needs --label, so that the results are not mistaken for those of the defaults")
    problems = [name for name in options.problems if options.half in (None, PROBLEMS[name].half)]
    cells = [(p, m, s) for s in range(options.seeds) for p in problems for m in options.methods]
    left = [cell for cell in cells if not path_of(options, cell).exists()]
    print(f"{len(cells) - len(left)} of {len(cells)} runs are there already", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for number, line in enumerate(pool.map(run, [options] * len(left), left), 1):
            print(f"{number}/{len(left)}  {line}", flush=True)
    return 0


def label_of(options: argparse.Namespace, method: str) -> str:
    """What the method is called in the results."""
    label = options.label or (f"with the bytes of {options.same_bytes}" if options.same_bytes else "")
    return f"{method} {label}".strip()


def path_of(options: argparse.Namespace, cell: Cell) -> Path:
    """The file of one run."""
    problem, method, seed = cell
    return Path(options.out, problem, label_of(options, method), f"seed-{seed}.json")


def run(options: argparse.Namespace, cell: Cell) -> str:
    """Learn one problem with one method and one seed, and write what came of it."""
    torch.set_num_threads(1)
    name, method, seed = cell
    problem, path = PROBLEMS[name], path_of(options, cell)
    model, tasks = problem.build(seed)
    settings = settings_of(options, cell, tasks[0])
    started = time.process_time()
    result: dict[str, Any] = {"problem": name, "method": label_of(options, method), "seed": seed}
    try:
        result |= learn(model, tasks, settings, seed, problem)
        line = f"test {result['test']['acc']:5.1f}  bwt {result['test']['bwt']:6.1f}"
    except steppe.SteppeError as error:
        result["error"] = line = str(error)
    result |= {"settings": settings.as_dict(), "cpu_seconds": time.process_time() - started}
    result |= {"command": ["python", "bench/suite/run.py", *sys.argv[1:]], "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(result | {"machine": machine_info()}, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
    return f"{name}  {result['method']}  seed {seed}  {line}  {result['cpu_seconds']:.0f} s"


def settings_of(options: argparse.Namespace, cell: Cell, task: steppe.Task) -> Any:
    """The method's default settings, with the changes that were named."""
    entry = METHODS[cell[1]]
    changes: dict[str, Any] = dict(parse(options.changes))
    if options.same_bytes:
        other = Path(options.out, cell[0], options.same_bytes, f"seed-{cell[2]}.json")
        kept = json.loads(other.read_text(encoding="utf-8"))["bytes"]
        x, y = task.train.first()
        changes["buffer"] = sum(kept.values()) // (x.nbytes + y.nbytes + 8)
    return entry.settings(**{**entry.variant, **changes})


def parse(changes: list[str]) -> Iterator[tuple[str, Any]]:
    """Settings from KEY=VALUE."""
    for change in changes:
        key, _, value = change.partition("=")
        try:
            yield key, json.loads(value)
        except json.JSONDecodeError:
            yield key, value


def learn(model: torch.nn.Module, tasks: list[steppe.Task], settings: Any, seed: int, problem: Problem) -> Any:
    """Learn all tasks one after another; test on validation and test samples after each."""
    optimizer = (lambda parameters: torch.optim.AdamW(parameters, lr=problem.adamw)) if problem.adamw else None
    learner = steppe.Learner(model, settings, seed=seed, threads=1, optimizer=optimizer)
    validation = [steppe.Task(task.train, task.val, head=task.head) for task in tasks]
    rows: dict[str, list[list[float]]] = {"test": [], "validation": []}
    calls = [tasks] if settings.schedule != "sequential" else [[task] for task in tasks]
    for number, call in enumerate(calls):
        result = learner.learn(call, **problem.learning)
        seen = len(tasks) if len(call) > 1 else number + 1
        rows["test"].append(learner.evaluate(tasks[:seen]))
        rows["validation"].append(learner.evaluate(validation[:seen]))
    return {**{part: summary(rows[part]) for part in rows}, "bytes": result.bytes, "remarks": result.remarks}


def summary(rows: list[list[float]]) -> dict[str, Any]:
    """Mean accuracy in the end, what was forgotten of it, and the mean accuracy when a task was learned."""
    last = rows[-1]
    learned = [row[-1] for row in rows] if len(rows) > 1 else last
    forgotten = [end - first for end, first in zip(last[:-1], learned[:-1], strict=True)]
    return {
        "acc": sum(last) / len(last),
        "bwt": sum(forgotten) / len(forgotten) if len(rows) > 1 else 0.0,
        "learned": sum(learned) / len(learned),
        "accuracies": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
