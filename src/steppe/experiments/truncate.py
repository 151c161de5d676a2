"""Runs that are under way, made to end after fewer tasks than they were begun for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.data.task import Task
from steppe.errors import UsageError
from steppe.experiments.config import RunConfig
from steppe.experiments.run_directory import RunDirectory, locked
from steppe.results.layout import CONFIG, RESULT


def truncate_runs(runs: Mapping[Path, RunConfig], tasks: int) -> list[RunConfig]:
    """Make the runs in these directories, begun or not, ones of the first so many tasks, as if they had been planned
    so, and give their configurations.

    Nothing is changed where one of them is finished, would have been another from the start, or has begun more. Killed
    in the middle it can be repeated.
    """
    shorter = {out: _with_fewer(out, config, tasks) for out, config in runs.items()}
    begun = [out for out in runs if (out / CONFIG).exists()]
    with ExitStack() as ours:
        for out in begun:
            ours.enter_context(locked(out, "wait for it"))
            _state_before(out, (runs[out], shorter[out]), tasks)
        for out in begun:
            _shorten(out, _state_before(out, (runs[out], shorter[out]), tasks), shorter[out], tasks)
    return list(shorter.values())


def _with_fewer(out: Path, config: RunConfig, tasks: int) -> RunConfig:
    """The run of the first so many tasks; refused where the longer one does not begin like it, or has ended."""
    if (out / RESULT).exists():
        raise UsageError(f"--tasks {tasks}: {out} is finished; only runs that are under way can end earlier.")
    described = config.as_dict()
    fewer = {**described, "benchmark": {**described["benchmark"], "tasks": tasks}}
    shorter = RunConfig.from_mapping(fewer, config.plugins)
    _check_beginning(config, shorter)
    return shorter


def _state_before(out: Path, configs: Sequence[RunConfig], tasks: int) -> State:
    """The last state of a run in which no later task has been begun; None where it kept none at all."""
    directory = RunDirectory(out)
    state, _ = directory.last_state(configs, "cpu", fits=lambda state: _begun(state) <= tasks)
    if state is None and directory.states:
        raise UsageError(
            f"{out} cannot end after {_counted(tasks)}: it has begun more. Give at least as many as it has begun, or "
            "let it go on as it is."
        )
    return state


def _shorten(out: Path, state: State, shorter: RunConfig, tasks: int) -> None:
    directory = RunDirectory(out)
    if state is not None:
        directory.cut_log(state)
        measured = {"untrained": state.get("untrained", [])[:tasks], "ahead": state.get("ahead", [])[: tasks - 1]}
        directory.save_state({**state, **measured, "config": shorter.as_dict()}, alone=True)
    directory.drop_weights(tasks)
    RunDirectory.create(out, shorter)


def _begun(state: State) -> int:
    """How many tasks were begun, the finished ones among them."""
    try:
        return int(state["stage"]) + (state["learner"]["fitting"] is not None)
    except INVALID_STATE_ERRORS:
        return 0  # to be refused by whoever goes on from it


def _check_beginning(config: RunConfig, shorter: RunConfig) -> None:
    """Refuse fewer tasks that are not the beginning of the run's own, learnt in the same way by the same network."""
    tasks, fewer = (each.benchmark_settings.stream(each.seed) for each in (config, shorter))
    asked = f"--tasks {len(fewer)}"
    if config.method_settings.schedule == "joint":
        raise UsageError(f"{asked}: {config.method} learns all its tasks at once, so that it cannot end after some.")
    if len(fewer) > len(tasks):
        raise UsageError(f"{asked}: the run is one of {_counted(len(tasks))}; it can end after fewer, not after more.")
    one, other = (each.benchmark_settings.model(each.seed).state_dict() for each in (config, shorter))
    alike = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    if not alike or any(_told(mine) != _told(its) for mine, its in zip(fewer, tasks, strict=False)):
        raise UsageError(f"{asked}: with fewer tasks {config.benchmark} is another from the start: begin anew.")


def _told(task: Task) -> tuple[Any, ...]:
    """What tells a task from another, as far as it can be seen without walking through it."""
    return task.name, task.head, len(task.train), task.train.digest()


def _counted(tasks: int) -> str:
    return f"{tasks} task{'' if tasks == 1 else 's'}"
