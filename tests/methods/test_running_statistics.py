"""When BatchNorm's running statistics move in the FS-DGPM family, against float64 loops that track them explicitly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Sample, windows
from reference_baselines import Normed, image_tasks, same_bits, statistics_moves
from reference_update import Columns, FlatUpdate, Problem, Weights, drawn, listed
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

import steppe
from steppe.methods.fs_dgpm import FSDGPM
from steppe.models.lenet import LeNet
from steppe.network.network import Network
from steppe.projection.layers import projected_weights
from steppe.registry import find_method
from steppe.runtime.rng import Streams

EVERY = {"statistics": "every-forward"}
SMALL = {"buffer": 7, "basis_samples": 6, "threshold": 0.9, "threshold_step": 0.03, "ascent_lr": 0.3}
LIVELY = {"importance_lr": 30.0, "temperature": 2.0}
FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"ascent_form": "chunked"},
    "whole, second order": {"second_order": True},
    "chunked, second order": {"ascent_form": "chunked", "second_order": True},
}
FORWARDS = {"whole": 3, "chunked": 4, "whole, second order": 3, "chunked, second order": 4}  # with two steps


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 6),
    ).double()


class Statistics:
    """Running means and variances computed explicitly; `moving` while a forward is to update them."""

    def __init__(self) -> None:
        self.mean = {"1": torch.zeros(4).double(), "4": torch.zeros(6).double()}
        self.var = {"1": torch.ones(4).double(), "4": torch.ones(6).double()}
        self.moving = False

    def normalize(self, name: str, x: Tensor, w: Weights, own: bool) -> Tensor:
        """By the batch, or by the running statistics."""
        mean, var, count = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False), x.numel() / x.shape[1]
        if self.moving:
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * mean.detach()
            self.var[name] = 0.9 * self.var[name] + 0.1 * var.detach() * count / (count - 1)
        if own:
            mean, var = self.mean[name], self.var[name]
        scaled = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]

    def forward(self, model: nn.Module, w: Weights, x: Tensor, wanted: bool) -> tuple[Tensor, Columns]:
        """In eval mode if the layers' inputs are requested."""
        first = relu(self.normalize("1", conv2d(x, w["0.weight"], stride=2, padding=1), w, wanted))
        second = relu(self.normalize("4", conv2d(first, w["3.weight"]), w, wanted))
        columns: Columns = {}
        if wanted:
            layers: Any = model
            columns = {"0.weight": windows(layers[0], x), "3.weight": windows(layers[3], first)}
        return second.flatten(1) @ w["7.weight"].T + w["7.bias"], columns


class ReleasedLoop(FlatUpdate):
    """The released code's update: every forward, at its own weights, moves the statistics; or only the last one does,
    which gives the step's gradient."""

    statistics: Statistics

    def observe(self, current: list[Sample]) -> float:
        drawn_before = self.buffer.draw
        union = current + drawn_before(len(current))
        with torch.no_grad():
            forwards = list(self.forwards(current, union))
            if self.s.statistics == "once":
                forwards = forwards[-1:]
            for at, samples in forwards:
                self.statistics.moving = True
                self.loss(at, samples)
                self.statistics.moving = False
        self.buffer.draw = lambda count: union[len(current) :]  # type: ignore[method-assign]
        loss = super().observe(current)
        self.buffer.draw = drawn_before  # type: ignore[method-assign]
        return loss

    def forwards(self, current: list[Sample], union: list[Sample]) -> Iterator[tuple[Tensor, list[Sample]]]:
        """The weights and samples of each forward, in order."""
        alone = self.name == "dgpm"
        v, parts = torch.zeros_like(self.w), self.schedule(current)
        within = self.matrix(self.bases.importance, outside=False)
        for place, part in enumerate(parts):
            if alone and not self.bases.vectors:  # there is no λ yet to update
                break
            yield self.w + v, part
            with torch.enable_grad():
                g = self.gradient(self.w + v, part)
            v = v + self.sign * self.s.ascent_lr * (within @ g).clamp(-self.s.ascent_clamp, self.s.ascent_clamp)
            if self.s.ascent_form == "chunked" or place == len(parts) - 1:
                yield self.w + v, union
        if alone:
            yield self.w, union


@pytest.mark.parametrize("statistics", ["once", "every-forward"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("member", ["fs-dgpm", "dgpm", "la-dgpm", "fs-sgpm", "fs-rgpm"])
def test_statistics_and_weights_equal_the_loop(member: str, form: str, statistics: str) -> None:
    """Over three tasks: bases are built in eval mode, so from the second task on, weights depend on the statistics."""
    kept = Statistics()
    heads = (range(0, 2), range(2, 4), range(4, 6))
    problem = Problem(convolutions, (2, 5, 5), heads, {"0.weight": 1, "3.weight": 1}, kept.forward)
    model = convolutions()
    entry = find_method(member)
    values = {**entry.values(""), "ascent_form": "whole", **SMALL, **LIVELY, **FORMS[form], "statistics": statistics}
    settings: Any = FSDGPM.from_mapping(values)
    covered = {key: each for key, each in projected_weights(model).items() if key in problem.covered}
    network = Network(model)
    method = settings.start(network, covered, Streams(3))
    loop = ReleasedLoop(member, settings, problem, model, Streams(3).derive_seed)
    loop.statistics = kept
    for task in range(3):
        network.heads.add(heads[task], 6)
        method.begin_task()
        loop.begin_task()
        for size in (5, 5, 3):
            batch = drawn(problem, task, size)
            loss = float(method.observe(batch))
            assert loss == pytest.approx(loop.observe(listed(batch)), rel=1e-8)
            for name in ("1", "4"):
                norm = model[int(name)]
                torch.testing.assert_close(norm.running_mean, kept.mean[name], rtol=1e-8, atol=1e-11)
                torch.testing.assert_close(norm.running_var, kept.var[name], rtol=1e-8, atol=1e-11)
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            torch.testing.assert_close(flat, loop.w, rtol=1e-7, atol=1e-9)
            method.after_batch(batch)
            loop.after_batch(listed(batch))
        method.end_task()
        loop.end_task()
        ranks = {key: projector.rank for key, projector in method.memory.projectors.items()}
        assert ranks == {key: sum(u.shape[1] for u in each) for key, each in loop.bases.vectors.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_forward_moves_the_statistics(form: str) -> None:
    settings = {"ascent_steps": 2, "buffer": 12, "basis_samples": 12, **FORMS[form]}
    assert statistics_moves("fs-dgpm", settings) == {1}
    assert statistics_moves("fs-dgpm", {**settings, **EVERY}) == {FORWARDS[form]}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_first_task_have_the_same_bits(form: str) -> None:
    """In train mode a batch is normalized by its own statistics: before bases are built, only the running statistics
    differ."""
    states = []
    for changes in ({}, EVERY):
        torch.manual_seed(8)
        learner = steppe.Learner(Normed(), FSDGPM(buffer=12, basis_samples=12, **FORMS[form], **changes), seed=1)
        learner.learn(image_tasks(1)[0], epochs=2, batch_size=8)
        states.append(learner.model.state_dict())
    once, every = states
    same = {key for key, value in once.items() if torch.equal(value, every[key])}
    assert set(once) - same == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize("form", FORMS)
def test_saved_learner_continues_to_the_same_bits(form: str, tmp_path: Path) -> None:
    settings = FSDGPM(buffer=12, basis_samples=12, **FORMS[form], **EVERY)
    assert same_bits("fs-dgpm", {"buffer": 12, "basis_samples": 12, **FORMS[form], **EVERY})
    tasks = image_tasks(2)
    torch.manual_seed(8)
    learner = steppe.Learner(Normed(), settings, seed=1)
    learner.learn(tasks[0], epochs=2, batch_size=8)
    learner.save(tmp_path / "learner.pt")
    loaded = steppe.load(tmp_path / "learner.pt", Normed())
    assert loaded.settings == settings
    for each in (learner, loaded):
        each.learn(tasks[1], epochs=2, batch_size=8)
    found = loaded.model.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in learner.model.state_dict().items())


def test_older_settings_mean_once() -> None:
    before = {key: value for key, value in FSDGPM().as_dict().items() if key != "statistics"}
    assert FSDGPM.from_mapping(before) == FSDGPM(statistics="once")
    assert FSDGPM().equals(before)


@pytest.mark.parametrize("form", FORMS)
def test_norm_layer_with_two_code_paths(form: str) -> None:
    """LeNet's BatchNorm has a separate code path for some numbers of pixels: a graph through both stays valid."""
    found, threads = [], torch.get_num_threads()
    x = torch.randn(5, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last)
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            torch.manual_seed(0)
            model = LeNet(10, size=5).double()
            settings = dataclasses.replace(FSDGPM(buffer=10, basis_samples=5), **FORMS[form], **EVERY)
            steppe.Learner(model, settings).learn(steppe.Task((x, torch.arange(5))), epochs=2, batch_size=5)
        finally:
            torch.set_num_threads(threads)
        found.append(model.state_dict())
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-6, atol=1e-8)


class Following(nn.Module):
    """Divides by a running value: its backward pass needs the buffer as it was. Two modules share the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 3), nn.Module()
        self.register_buffer("seen", torch.ones(()))
        self.other.register_buffer("seen", self.seen)
        self.register_buffer("rebound", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
            self.rebound = self.rebound + 1
        out: Tensor = self.layer(x) / self.other.seen
        return out


@pytest.mark.parametrize("form", FORMS)
def test_buffers_needed_by_the_backward_pass_may_change(form: str) -> None:
    """They stay the same tensors, and stay shared."""
    model = Following()
    seen = model.seen
    settings = FSDGPM(buffer=10, basis_samples=5, **FORMS[form], **EVERY)
    result = steppe.Learner(model, settings).learn(steppe.Task((torch.randn(20, 4), torch.arange(20) % 3)))
    forwards = result.updates * FORWARDS[form]
    assert model.seen is seen
    assert model.other.seen is seen
    assert (int(model.seen), int(model.rebound)) == (1 + forwards, forwards)
