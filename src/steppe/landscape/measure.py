"""Measuring the landscape of a run: every task after it and later tasks, from the weights in the run directory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steppe.data.task import Task
from steppe.errors import RunError, SteppeError, UsageError
from steppe.experiments.config import RunConfig
from steppe.experiments.run_directory import lock_directory, read_result, read_weights, weight_checkpoints
from steppe.landscape.bound import compute_bound, measure_noisy_loss
from steppe.landscape.directions import random_direction
from steppe.landscape.files import Landscape, Pair, identity, read_landscape, round_floats
from steppe.landscape.flatness import measure_flatness
from steppe.landscape.hessian import top_eigenvalue
from steppe.landscape.profile import LossProbe, loss_profile, loss_surface
from steppe.landscape.settings import LandscapeSettings
from steppe.network.eval_batches import min_eval_batch
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.results.file_names import CONFIG, RESULT
from steppe.runtime.files import explain_write_errors, resolve_target
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.tensors.batch import Batch
from steppe.version import versions

_WRITE_EVERY = 20.0  # seconds: a killed process loses at most this, or one pair


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        after: The networks, each by the last task it learned; None for all whose weights were kept.
        tasks: The tasks, from 1; None for all that a network has learned.
        hessian: Whether to compute the Hessian's top eigenvalue.
        surface: Whether to measure the loss over two directions.
    """

    after: Sequence[int] | None = None
    tasks: Sequence[int] | None = None
    hessian: bool = False
    surface: bool = False


@dataclass(frozen=True)
class MeasureProgress:
    """Progress of a measurement, counted in profiles."""

    done: int
    total: int
    after: int
    task: int


Callback = Callable[[MeasureProgress], None]


def measure(
    run: Path,
    out: Path,
    settings: LandscapeSettings,
    request: Request = Request(),  # noqa: B008
    *,
    device: str = "cpu",
    plugins: Sequence[str] = (),
    resume: bool = False,
    command: str = "steppe landscape RUN",
    callback: Callback = lambda step: None,
) -> Landscape:
    """Measure the landscape of a run and write it to a file, which is updated as the measurement proceeds.

    Args:
        run: The run directory.
        out: The file.
        settings: How to measure.
        request: What to measure.
        device: Where to compute.
        plugins: Files of the run's plugins that have moved.
        resume: Keep what the file contains, and add what is missing; run and settings must be the same.
        command: The command line to record in the file.
        callback: Called after each step.

    Returns:
        The landscape.

    Raises:
        UsageError: The request does not fit the run, the file exists or belongs to another run, or another process is
            using the run directory.
        DivergedError: A loss is not finite.
    """
    config = RunConfig.load(run / CONFIG, plugins)
    if request.surface and settings.directions < 2:
        raise UsageError(f"directions = {settings.directions}: a surface needs at least 2.")
    pairs = _pairs(run, request)
    with _lock_run(run), preserve_global_rng(torch.device(device)):
        landscape = _open_landscape(out, _identities(run, config), settings, command, resume)
        measurement = _Measurement(run, config, settings, request, device)
        if (last := max(task for _, task in pairs)) > len(measurement.tasks):
            raise UsageError(f"task {last} does not exist: {run} has {len(measurement.tasks)} tasks.")
        measurement.measure(landscape, pairs, out, command, callback)
    return landscape


def _lock_run(run: Path) -> AbstractContextManager[None]:
    """Lock the run directory, so that no two processes write its file; a read-only directory needs no lock."""
    return lock_directory(run, "wait for it") if os.access(run, os.W_OK) else nullcontext()


def _pairs(run: Path, request: Request) -> list[tuple[int, int]]:
    """The requested pairs (after, task), in order."""
    for option, numbers in (("--after", request.after), ("--task", request.tasks)):
        if numbers is not None and any(number < 1 for number in numbers):
            raise UsageError(f"{option}: tasks are numbered from 1.")
    afters = (
        sorted(set(request.after)) if request.after is not None else [place + 1 for place in weight_checkpoints(run)]
    )
    if not afters:
        raise UsageError(f"{run} contains no weights; a landscape needs the weights a run keeps after each task.")
    pairs = [
        (after, task)
        for after in afters
        for task in range(1, after + 1)
        if request.tasks is None or task in request.tasks
    ]
    if not pairs:
        raise UsageError(
            "--after and --task leave nothing to measure: a task is measured after itself and after later ones."
        )
    return pairs


def _identities(run: Path, config: RunConfig) -> list[dict[str, Any]]:
    """The run's identity without settings that were added after it finished, and with them, as in older files."""
    known = whole = config.as_dict()
    if (run / RESULT).exists():
        recorded = read_result(run).config
        known = {
            section: {key: value for key, value in values.items() if key in recorded[section]}
            for section, values in whole.items()
        }
    return [identity(config.benchmark, config.method, config.seed, each) for each in (known, whole)]


def _open_landscape(
    out: Path, names: Sequence[dict[str, Any]], settings: LandscapeSettings, command: str, resume: bool
) -> Landscape:
    """Open a new landscape, or the one to resume."""
    with explain_write_errors(out):
        resolve_target(out)  # fail now, not after everything is measured
    if not out.exists():
        return Landscape(names[0], settings, command, versions())
    if not resume:
        raise UsageError(f"{out} exists; pass --resume to add what is missing, remove it, or choose another -o.")
    found = read_landscape(out)
    if found.run not in names:
        raise UsageError(f"{out} is the landscape of another run; choose another -o.")
    for key, other in settings.differences(found.settings).items():
        value = settings.as_dict()[key]
        raise UsageError(f"{out} was measured with {key} = {other}, not {value}; pass the same or choose another -o.")
    return found


class _Measurement:
    """A run's tasks, and its network, which loads the weights after one task and then another."""

    def __init__(
        self, run: Path, config: RunConfig, settings: LandscapeSettings, request: Request, device: str
    ) -> None:
        benchmark = config.benchmark_settings
        self.run, self.settings, self.request = run, settings, request
        self.tasks: Sequence[Task] = config.tasks()
        self.network = Network(benchmark.model(config.seed).to(device), benchmark.input_transform)
        with torch.no_grad(), self.network.mode(training=False):
            x, _ = self.tasks[0].train.first(min_eval_batch(self.network.model))
            outputs = self.network.input_copies.call(self.network.prepare_inputs(x)).shape[1]
        for task in self.tasks:
            self.network.heads.add(task.head, outputs)
        head = benchmark.growing_head
        self._growing = None if head is None else GrowingHead(self.network.model, head, Streams(config.seed))

    def measure(
        self, landscape: Landscape, pairs: Sequence[tuple[int, int]], out: Path, command: str, callback: Callback
    ) -> None:
        """Measure the pairs that are missing or incomplete."""
        each = self.settings.directions + 1 + self.request.hessian + self.settings.points * self.request.surface
        done, total, written = 0, each * len(pairs), time.monotonic()
        for after in sorted({after for after, _ in pairs}):
            weights = self._load_weights(after)
            self._drop_stale(landscape, after, _digest(weights))
            for task in (task for column, task in pairs if column == after):

                def tick(count: int = 1, after: int = after, task: int = task) -> None:
                    nonlocal done
                    done += count
                    callback(MeasureProgress(done, total, after, task))

                known = landscape.pairs.get((after, task))
                with self.network.mode(training=False):
                    landscape.pairs[after, task] = self._pair(known, task, tick)
                if landscape.pairs[after, task] is not known:
                    landscape.record_command(command)
                if time.monotonic() - written > _WRITE_EVERY:
                    landscape.write(out)
                    written = time.monotonic()
            self._add_bound(landscape, after)
            landscape.write(out)
            written = time.monotonic()

    def _load_weights(self, after: int) -> dict[str, Tensor]:
        weights = read_weights(self.run, after - 1)
        try:
            if self._growing is not None:
                self._growing.resize(len(weights[next(iter(self._growing.parameters))]))
                self.network.fit_outputs(self._growing.rows)
            self.network.model.load_state_dict(weights)
        except (RuntimeError, KeyError) as error:
            raise RunError(f"{self.run}: the weights after task {after} do not fit the network: {error}") from error
        return weights

    def _drop_stale(self, landscape: Landscape, after: int, digest: str) -> None:
        """Drop what was measured with other weights, before the run was repeated."""
        if landscape.weights.get(after, digest) != digest:
            landscape.pairs = {pair: value for pair, value in landscape.pairs.items() if pair[0] != after}
            landscape.bounds.pop(after, None)
        landscape.weights[after] = digest

    def _pair(self, found: Pair | None, task: int, tick: Callable[..., None]) -> Pair:
        settings, request, network = self.settings, self.request, self.network
        lacks_eigenvalue = request.hessian and (found is None or found.eigenvalue is None)
        lacks_surface = request.surface and (found is None or found.surface is None)
        if found is not None and not lacks_eigenvalue and not lacks_surface:
            tick(settings.directions + 1 + request.hessian + settings.points * request.surface)
            return found
        batch = self._samples(task - 1)
        try:
            probe = LossProbe(network, batch)
            if found is None:
                losses = []
                for number in range(settings.directions):
                    losses.append(
                        loss_profile(probe, random_direction(network, settings.seed, number), settings.alphas)
                    )
                    tick()
                flat = measure_flatness(losses, settings.alphas, settings.radius)
                noise = measure_noisy_loss(probe, network.trainable, settings.sigma, settings.directions, settings.seed)
                found = Pair(losses, flat, noise)
                tick()
            else:
                tick(settings.directions + 1)
            if lacks_surface:
                first, second = (random_direction(network, settings.seed, number) for number in (0, 1))
                found = replace(found, surface=loss_surface(probe, first, second, settings.alphas))
        except SteppeError as error:
            raise type(error)(f"{self.run}, {self.tasks[task - 1].name}: {error}") from error
        tick(settings.points * request.surface)
        if lacks_eigenvalue:
            found = replace(found, eigenvalue=top_eigenvalue(network, batch, settings.seed))
        tick(int(request.hessian))
        return round_floats(found)

    def _samples(self, place: int) -> Batch:
        """Prepared training samples of a task: all, or a random subset of the requested size."""
        task, count = self.tasks[place], self.settings.samples
        indices = torch.arange(len(task.train), device="cpu")
        if count < len(indices):
            generator = torch.Generator().manual_seed(
                Streams(self.settings.seed).derive_seed(f"landscape samples {place}")
            )
            indices = torch.randperm(len(indices), generator=generator, device="cpu")[:count].sort().values
        with task.error_context("training"):
            x, y = task.train.take(indices)
        return self.network.prepare(Batch.of_task(x, y, place))

    def _add_bound(self, landscape: Landscape, after: int) -> None:
        if after < 2 or landscape.tasks(after) != list(range(1, after + 1)):
            return
        place, settings = after - 1, self.settings
        old = [landscape.pairs[after, task].noisy for task in range(1, after)]
        before = read_weights(self.run, place - 1) if place - 1 in weight_checkpoints(self.run) else None
        if before is not None and self._growing is not None:  # with new outputs as they were before they were trained
            grown = {
                name: self._growing.extend(name, before[name], self._growing.rows) for name in self._growing.parameters
            }
            before = {**before, **grown}
        new, count = landscape.pairs[after, after].noisy, len(self.tasks[place].train)
        weights, chosen = self.network.trainable, {"sigma": settings.sigma, "delta": settings.delta}
        try:
            found = compute_bound(old, new, weights, before, samples=count, **chosen)
        except SteppeError as error:
            raise type(error)(f"{self.run}, after task {after}: {error}") from error
        landscape.bounds[after] = round_floats(found)


def _digest(weights: dict[str, Tensor]) -> str:
    """A digest of the weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
