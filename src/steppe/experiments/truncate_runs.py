"""Truncate unfinished runs to fewer tasks."""

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
from steppe.experiments.run_directory import RunDirectory, lock_directory
from steppe.results.file_names import CONFIG, RESULT


def truncate_runs(runs: Mapping[Path, RunConfig], tasks: int) -> list[RunConfig]:
    """Truncate runs to their first tasks, as if they had been started that way.

    All runs are checked before any is changed. An interrupted call can be repeated.

    Args:
        runs: Configurations by run directory; the directories need not exist.
        tasks: The new number of tasks.

    Returns:
        The new configurations.

    Raises:
        UsageError: A run is finished, has started more tasks, or would have been different from the start.
    """
    shorter = {out: _shortened_config(out, config, tasks) for out, config in runs.items()}
    started = [out for out in runs if (out / CONFIG).exists()]
    with ExitStack() as locks:
        for out in started:
            locks.enter_context(lock_directory(out, "wait for it"))
            _last_usable_state(out, (runs[out], shorter[out]), tasks)
        for out in started:
            _truncate_run(out, _last_usable_state(out, (runs[out], shorter[out]), tasks), shorter[out], tasks)
    return list(shorter.values())


def _shortened_config(out: Path, config: RunConfig, tasks: int) -> RunConfig:
    """Return the configuration with fewer tasks, after checking that the run may be truncated."""
    if (out / RESULT).exists():
        raise UsageError(f"--tasks {tasks}: {out} is finished; only unfinished runs can be truncated.")
    values = config.as_dict()
    fewer = {**values, "benchmark": {**values["benchmark"], "tasks": tasks}}
    shorter = RunConfig.from_mapping(fewer, config.plugins)
    _require_same_start(config, shorter)
    return shorter


def _last_usable_state(out: Path, configs: Sequence[RunConfig], tasks: int) -> State:
    """Return the last state before a later task was started; None if the run has no states."""
    directory = RunDirectory(out)
    state, _ = directory.last_state(configs, "cpu", fits=lambda state: _tasks_started(state) <= tasks)
    if state is None and directory.states:
        raise UsageError(
            f"{out} cannot be truncated to {_count_tasks(tasks)}: it has started more. Pass a larger --tasks, or "
            "resume it without."
        )
    return state


def _truncate_run(out: Path, state: State, shorter: RunConfig, tasks: int) -> None:
    directory = RunDirectory(out)
    if state is not None:
        directory.truncate_log(state)
        measured = {"untrained": state.get("untrained", [])[:tasks], "ahead": state.get("ahead", [])[: tasks - 1]}
        directory.save_state({**state, **measured, "config": shorter.as_dict()}, alone=True)
    directory.drop_weights(tasks)
    RunDirectory.create(out, shorter)


def _tasks_started(state: State) -> int:
    """Return the number of tasks started, including finished ones."""
    try:
        return int(state["stage"]) + (state["learner"]["fitting"] is not None)
    except INVALID_STATE_ERRORS:
        return 0  # rejected later, on resuming


def _require_same_start(config: RunConfig, shorter: RunConfig) -> None:
    """Raise a UsageError unless the shorter run has the same network and is a prefix of the longer one."""
    tasks, fewer = (each.tasks() for each in (config, shorter))
    option = f"--tasks {len(fewer)}"
    if config.method_settings.schedule == "joint":
        raise UsageError(f"{option}: {config.method} learns all tasks at once and cannot be truncated.")
    if len(fewer) > len(tasks):
        raise UsageError(f"{option}: the run has {_count_tasks(len(tasks))}; it can only be truncated to fewer.")
    weights, expected = (each.benchmark_settings.model(each.seed).state_dict() for each in (config, shorter))
    same_network = weights.keys() == expected.keys() and all(
        torch.equal(weights[name], expected[name]) for name in weights
    )
    if not same_network or any(_fingerprint(a) != _fingerprint(b) for a, b in zip(fewer, tasks, strict=False)):
        raise UsageError(f"{option}: with fewer tasks, {config.benchmark} differs from the start; start a new run.")


def _fingerprint(task: Task) -> tuple[Any, ...]:
    """Return what identifies a task, as far as possible without reading its samples."""
    return task.name, task.head, len(task.train), task.train.digest()


def _count_tasks(tasks: int) -> str:
    return f"{tasks} task{'' if tasks == 1 else 's'}"
