"""The landscape of one run: every task seen, after every task, from the weights that the run directory keeps."""

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
from steppe.experiments.run_directory import kept_weights, locked, read_result, task_weights
from steppe.landscape.bound import bound, noisy
from steppe.landscape.directions import direction
from steppe.landscape.files import Landscape, Pair, identity, read_landscape, rounded
from steppe.landscape.flatness import flatness
from steppe.landscape.hessian import top_eigenvalue
from steppe.landscape.profile import LossProbe, profile, surface
from steppe.landscape.settings import LandscapeSettings
from steppe.network.network import Network
from steppe.results.layout import CONFIG, RESULT
from steppe.runtime.files import explain_write_errors, resolve_target
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.tensors.batch import Batch
from steppe.version import versions

_WRITE_EVERY = 20.0  # seconds; a kill loses no more than this, or one pair


@dataclass(frozen=True)
class Request:
    """Which networks (None: all that are kept), which tasks (None: all seen), and what besides profiles."""

    after: Sequence[int] | None = None
    tasks: Sequence[int] | None = None
    hessian: bool = False
    surface: bool = False


@dataclass(frozen=True)
class Step:
    """How far a survey is, counted in profiles."""

    done: int
    total: int
    after: int
    task: int


Callback = Callable[[Step], None]


def measure(
    run: Path,
    out: Path,
    settings: LandscapeSettings,
    wanted: Request = Request(),  # noqa: B008
    *,
    device: str = "cpu",
    plugins: Sequence[str] = (),
    resume: bool = False,
    command: str = "steppe landscape RUN",
    callback: Callback = lambda step: None,
) -> Landscape:
    """Measure what is wanted of a run and write it to `out`, again and again as it grows.

    With `resume`, what `out` holds is kept and what it lacks is added; it must be of the same run and settings. The
    file tells of every command that added to it. Where plugins of the run have moved, `plugins` has their files. A run
    in whose directory another process is at work is refused.
    """
    config = RunConfig.load(run / CONFIG, plugins)
    if wanted.surface and settings.directions < 2:
        raise UsageError(f"directions = {settings.directions}: a surface needs two of them.")
    pairs = _pairs(run, wanted)
    with _ours(run), preserve_global_rng(torch.device(device)):
        landscape = _begun(out, _identities(run, config), settings, command, resume)
        surveyor = _Surveyor(run, config, settings, wanted, device)
        if (last := max(task for _, task in pairs)) > len(surveyor.tasks):
            raise UsageError(f"task {last} does not exist: {run} has {len(surveyor.tasks)} tasks.")
        surveyor.measure(landscape, pairs, out, command, callback)
    return landscape


def _ours(run: Path) -> AbstractContextManager[None]:
    """While a run is measured nobody else is at work in its directory: two would each write a file without what the
    other has measured. A directory that may only be read holds no such file: it goes elsewhere.
    """
    return locked(run, "wait for it") if os.access(run, os.W_OK) else nullcontext()


def _pairs(run: Path, wanted: Request) -> list[tuple[int, int]]:
    """What is wanted as (after, task), in order."""
    for option, numbers in (("--after", wanted.after), ("--task", wanted.tasks)):
        if numbers is not None and any(number < 1 for number in numbers):
            raise UsageError(f"{option}: tasks count from 1.")
    afters = sorted(set(wanted.after)) if wanted.after is not None else [place + 1 for place in kept_weights(run)]
    if not afters:
        raise UsageError(f"{run} holds no weights: a landscape needs those that a run keeps after each task.")
    pairs = [
        (after, task)
        for after in afters
        for task in range(1, after + 1)
        if wanted.tasks is None or task in wanted.tasks
    ]
    if not pairs:
        raise UsageError("--after and --task leave nothing: a task is measured after itself and after later ones.")
    return pairs


def _identities(run: Path, config: RunConfig) -> list[dict[str, Any]]:
    """What names the run: settings that came after it was finished are no part of it, but were in earlier versions."""
    known = whole = config.as_dict()
    if (run / RESULT).exists():
        told = read_result(run)["config"]
        known = {
            section: {key: value for key, value in values.items() if key in told[section]}
            for section, values in known.items()
        }
    named = {"benchmark": config.benchmark, "method": config.method, "seed": config.seed}
    return [identity({**named, "config": each}) for each in (known, whole)]


def _begun(
    out: Path, names: Sequence[dict[str, Any]], settings: LandscapeSettings, command: str, resume: bool
) -> Landscape:
    """A new landscape, or the one that is to go on."""
    with explain_write_errors(out):
        resolve_target(out)  # refused now, not when everything is measured, or when it is read and has no end
    if not out.exists():
        return Landscape(names[0], settings, command, versions())
    if not resume:
        raise UsageError(f"{out} is there already: --resume adds what it lacks; or remove it, or choose another -o.")
    found = read_landscape(out)
    if found.run not in names:
        raise UsageError(f"{out} is the landscape of another run: choose another -o.")
    for key, value in settings.as_dict().items():
        if (other := found.settings.as_dict()[key]) != value:
            raise UsageError(f"{out} was measured with {key} = {other}, not {value}: give the same, or another -o.")
    return found


class _Surveyor:
    """A run's tasks and its network, which takes on the weights after one task and then another."""

    def __init__(self, run: Path, config: RunConfig, settings: LandscapeSettings, wanted: Request, device: str) -> None:
        benchmark = config.benchmark_settings
        self.run, self.settings, self.wanted = run, settings, wanted
        self.tasks: Sequence[Task] = benchmark.stream(config.seed)
        self.network = Network(benchmark.model(config.seed).to(device), benchmark.input_transform)
        with torch.no_grad(), self.network.mode(training=False):
            x, _ = self.tasks[0].train.first(self.network.min_batch)
            outputs = self.network.input_copies.call(self.network.prepare_inputs(x)).shape[1]
        for task in self.tasks:
            self.network.add_head(task.head, outputs)

    def measure(
        self, landscape: Landscape, pairs: Sequence[tuple[int, int]], out: Path, command: str, callback: Callback
    ) -> None:
        """Measure pairs that are not there yet, or not wholly."""
        each = self.settings.directions + 1 + self.wanted.hessian + self.settings.points * self.wanted.surface
        done, total, written = 0, each * len(pairs), time.monotonic()
        for after in sorted({after for after, _ in pairs}):
            weights = self._stand_after(after)
            self._forget_others(landscape, after, _digest(weights))
            for task in (task for column, task in pairs if column == after):

                def tick(count: int = 1, after: int = after, task: int = task) -> None:
                    nonlocal done
                    done += count
                    callback(Step(done, total, after, task))

                known = landscape.pairs.get((after, task))
                with self.network.mode(training=False):
                    landscape.pairs[after, task] = self._pair(known, task, tick)
                if landscape.pairs[after, task] is not known:
                    landscape.made_by(command)
                if time.monotonic() - written > _WRITE_EVERY:
                    landscape.write(out)
                    written = time.monotonic()
            self._add_bound(landscape, after)
            landscape.write(out)
            written = time.monotonic()

    def _stand_after(self, after: int) -> dict[str, Tensor]:
        weights = task_weights(self.run, after - 1)
        try:
            self.network.model.load_state_dict(weights)
        except RuntimeError as error:
            raise RunError(f"{self.run}: the weights after task {after} do not fit the network: {error}") from error
        return weights

    def _forget_others(self, landscape: Landscape, after: int, digest: str) -> None:
        """What was measured with other weights than these, of a run since done again, goes."""
        if landscape.weights.get(after, digest) != digest:
            landscape.pairs = {pair: value for pair, value in landscape.pairs.items() if pair[0] != after}
            landscape.bounds.pop(after, None)
        landscape.weights[after] = digest

    def _pair(self, found: Pair | None, task: int, tick: Callable[..., None]) -> Pair:
        settings, wanted, network = self.settings, self.wanted, self.network
        lacks_eigenvalue = wanted.hessian and (found is None or found.eigenvalue is None)
        lacks_surface = wanted.surface and (found is None or found.surface is None)
        if found is not None and not lacks_eigenvalue and not lacks_surface:
            tick(settings.directions + 1 + wanted.hessian + settings.points * wanted.surface)
            return found
        batch = self._samples(task - 1)
        try:
            surroundings = LossProbe(network, batch)
            if found is None:
                losses = []
                for number in range(settings.directions):
                    losses.append(profile(surroundings, direction(network, settings.seed, number), settings.alphas))
                    tick()
                flat = flatness(losses, settings.alphas, settings.radius)
                noise = noisy(surroundings, network.trainable, settings.sigma, settings.directions, settings.seed)
                found = Pair(losses, flat, noise)
                tick()
            else:
                tick(settings.directions + 1)
            if lacks_surface:
                first, second = (direction(network, settings.seed, number) for number in (0, 1))
                found = replace(found, surface=surface(surroundings, first, second, settings.alphas))
        except SteppeError as error:
            raise type(error)(f"{self.run}, {self.tasks[task - 1].name}: {error}") from error
        tick(settings.points * wanted.surface)
        if lacks_eigenvalue:
            found = replace(found, eigenvalue=top_eigenvalue(network, batch, settings.seed))
        tick(int(wanted.hessian))
        return rounded(found)

    def _samples(self, place: int) -> Batch:
        """Training samples of a task, prepared: all of them, or as many as asked for, chosen by the seed."""
        task, count = self.tasks[place], self.settings.samples
        indices = torch.arange(len(task.train), device="cpu")
        if count < len(indices):
            generator = torch.Generator().manual_seed(
                Streams(self.settings.seed).derive_seed(f"landscape samples {place}")
            )
            indices = torch.randperm(len(indices), generator=generator, device="cpu")[:count].sort().values
        with task.error_context("training"):
            x, y = task.train.take(indices)
        return self.network.prepare(Batch(x, y, torch.full_like(y, place)))

    def _add_bound(self, landscape: Landscape, after: int) -> None:
        if after < 2 or landscape.tasks(after) != list(range(1, after + 1)):
            return
        place, settings = after - 1, self.settings
        old = [landscape.pairs[after, task].noisy for task in range(1, after)]
        before = task_weights(self.run, place - 1) if place - 1 in kept_weights(self.run) else None
        new, count = landscape.pairs[after, after].noisy, len(self.tasks[place].train)
        weights, chosen = self.network.trainable, {"sigma": settings.sigma, "delta": settings.delta}
        try:
            found = bound(old, new, weights, before, samples=count, **chosen)
        except SteppeError as error:
            raise type(error)(f"{self.run}, after task {after}: {error}") from error
        landscape.bounds[after] = rounded(found)


def _digest(weights: dict[str, Tensor]) -> str:
    """What tells these weights from others."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
