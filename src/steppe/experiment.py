"""One run: tasks in order, each learnt, every one seen so far tested, everything recorded."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from steppe.config import RunConfig
from steppe.curriculum import Curriculum
from steppe.errors import RunError, UsageError
from steppe.events import Event, Progress, RunStarted, TaskEnded, Watch, ignore
from steppe.learner import Learner
from steppe.metrics import AccuracyMatrix
from steppe.numerics import loaded_left_alone
from steppe.runs import REPORT, RunDirectory, refuse_taken
from steppe.tables import run_report
from steppe.task import Task
from steppe.version import versions


def run(config: RunConfig, out: Path | None = None, watch: Watch = ignore) -> dict[str, Any]:
    """Do the run and give its result; with `out`, leave a run directory there.

    Everything that can be refused is refused before the directory is made.
    """
    config = dataclasses.replace(config, device=resolved_device(config.device))
    if out is not None:
        refuse_taken(out)
    versions()  # those of the code that runs, whatever happens to its files meanwhile
    torch.set_num_threads(config.threads)
    tasks = config.benchmark_settings.stream(config.seed)
    learner = _learner(config)
    _check(config, learner, tasks)
    directory = None if out is None else RunDirectory.create(out, config)

    def tell(event: Event) -> None:
        if directory is not None and not isinstance(event, Progress):
            directory.log({"event": type(event).__name__, **dataclasses.asdict(event)})
        watch(event)

    try:
        with loaded_left_alone():
            result = _learnt_in_order(config, tasks, learner, directory, tell)
    except BaseException as error:
        if directory is not None:
            with suppress(RunError):  # the disk may be what stopped the run
                reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
                directory.log({"event": "Stopped", "reason": reason})
        raise
    if directory is not None:
        directory.write_result(result)
        directory.write_text(REPORT, run_report(result))
    return result


def _learnt_in_order(
    config: RunConfig, tasks: Sequence[Task], learner: Learner, directory: RunDirectory | None, tell: Watch
) -> dict[str, Any]:
    training = config.training
    stages = _stages(config.method_settings.schedule, len(tasks))
    each = [training.epochs * task.train.count_batches(training.batch_size) for task in tasks]
    batches = sum(sum(each[stage.start : stage.stop]) for stage in stages)
    remarks = config.benchmark_settings.remarks()
    tell(RunStarted(len(tasks), batches, remarks))
    matrix = AccuracyMatrix()
    seconds = {"train": 0.0, "evaluate": 0.0, "memory": 0.0}
    updates = 0
    held: dict[str, int] = {}
    per_task: list[dict[str, Any]] = []
    for number, stage in enumerate(stages):
        if stage.start == 0 and number > 0:  # learn everything so far from the start
            learner = _learner(config)
        learnt = learner.learn(tasks[stage.start : stage.stop], **training.as_dict(), watch=tell)  # type: ignore[arg-type]
        started = time.perf_counter()
        matrix.append(learner.evaluate(tasks[: stage.stop]), learnt=stage.stop - len(matrix))
        spent = {**learnt.seconds, "evaluate": time.perf_counter() - started}
        seconds = {kind: seconds[kind] + spent[kind] for kind in seconds}
        updates += learnt.updates
        held = learnt.bytes
        per_task.append({"seconds": spent, "bytes": held, "updates": learnt.updates})
        place = stage.stop - 1
        if directory is not None:
            directory.save_weights(learner.model, place)
        name = tasks[place].name
        tell(TaskEnded(place, name, matrix.last, spent, held, learnt.updates, learnt.remarks, learnt.record))
    return {
        "benchmark": config.benchmark,
        "method": config.method,
        "seed": config.seed,
        "acc": matrix.acc,
        "bwt": matrix.bwt,
        "learning_acc": matrix.learning_acc,
        "forgetting": matrix.forgetting,
        "accuracy": matrix.square(),
        "updates": updates,
        "seconds": seconds,
        "bytes": held,
        "per_task": per_task,
        "full_length": config.full_length and len(tasks) >= getattr(config.benchmark_settings, "tasks", 0),
        "remarks": remarks,
        "command": config.command(),
        "versions": versions(),
        "config": config.as_dict(),
    }


def refuse_unsuitable(configs: Sequence[RunConfig]) -> None:
    """Refuse methods that cannot serve their benchmark, all the same one, and a device that is not there, before any
    work.
    """
    tasks = configs[0].benchmark_settings.stream(configs[0].seed)
    for config in configs:
        resolved_device(config.device)
        _check(config, _learner(config), tasks)


def _check(config: RunConfig, learner: Learner, tasks: Sequence[Task]) -> None:
    learner.check(tasks)
    if config.training.patience:
        Curriculum(tasks, 0).require_validation()


def _learner(config: RunConfig) -> Learner:
    model = config.benchmark_settings.model(config.seed)
    benchmark = config.benchmark_settings
    return Learner(model, config.method_settings, seed=config.seed, device=config.device, prepare=benchmark.prepare)


def _stages(schedule: str, tasks: int) -> list[range]:
    """Which tasks are learnt together at each stage."""
    if schedule == "joint":
        return [range(tasks)]
    if schedule == "retrain":
        return [range(place + 1) for place in range(tasks)]
    return [range(place, place + 1) for place in range(tasks)]


def resolved_device(name: str) -> str:
    """The device by name, `auto` being CUDA where there is one; a device that is not there is refused."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is unknown. Known: auto, cpu, cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: this machine or this build of torch has none; use --device cpu or auto.")
    return name
