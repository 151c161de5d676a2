"""Whole updates of every member of the family against a flat-vector transcription of Algorithm 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import dense_projectors, no_hooks
from reference_update import PROBLEMS, FlatUpdate, Problem, coverage, drawn, listed
from torch import Tensor, nn

import steppe
from steppe.fast.factored import FactoredGrad
from steppe.methods.base import Method
from steppe.methods.parts.sgd import clip_by_norm
from steppe.network.network import Network
from steppe.projection.layers import projected_weights
from steppe.projection.matrix_projector import MatrixProjector
from steppe.registry import find_method
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch

# Importances that actually move: at the paper's values σ(10·λ) would hide any mistake in their gradient.
LIVELY = {"importance_lr": 30.0, "temperature": 2.0}
SMALL = {"buffer": 7, "basis_samples": 6, "threshold": 0.9, "threshold_step": 0.03}
REPLAY = {"buffer": 7}
RIDGE = {"buffer": 7, "basis_samples": 6, "importance": "ridge", "ridge": 0.05, "ridge_first": 0.3}
WEIGHTED = {"current_weight": 0.5, "replay_weight": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fs-dgpm as published": ("fs-dgpm", {**SMALL}),
    "fs-dgpm": ("fs-dgpm", {**SMALL, **LIVELY, "ascent_lr": 0.3, "clip": 0}),
    "fs-dgpm clipped": ("fs-dgpm", {**SMALL, **LIVELY, "clip": 0.1, "ascent_lr": 0.3}),
    "fs-dgpm clamped": ("fs-dgpm", {**SMALL, **LIVELY, "ascent_clamp": 0.02, "ascent_lr": 0.5}),
    "fs-dgpm three steps": ("fs-dgpm", {**SMALL, **LIVELY, "ascent_steps": 3}),
    "fs-dgpm chunked": ("fs-dgpm", {**SMALL, **LIVELY, "ascent_form": "chunked", "ascent_lr": 0.3, "clip": 0.4}),
    "fs-dgpm fewer samples than chunks": ("fs-dgpm", {**SMALL, **LIVELY, "ascent_form": "chunked", "ascent_steps": 7}),
    "fs-dgpm second order": ("fs-dgpm", {**SMALL, **LIVELY, "second_order": True, "ascent_lr": 0.3}),
    "fs-dgpm second order chunked": (
        "fs-dgpm",
        {**SMALL, **LIVELY, "second_order": True, "ascent_form": "chunked", "ascent_clamp": 0.05, "clip": 0.2},
    ),
    "fs-gpm": ("fs-gpm", {**SMALL, "ascent_lr": 0.3}),
    "fs-gpm chunked": ("fs-gpm", {**SMALL, "ascent_form": "chunked", "clip": 0.3}),
    "fs-sgpm": ("fs-sgpm", {**SMALL, "alpha": 3.0, "ascent_lr": 0.3}),
    "fs-sgpm chunked": ("fs-sgpm", {**SMALL, "alpha": 3.0, "ascent_form": "chunked", "momentum": 0}),
    "fs-rgpm": ("fs-rgpm", {**RIDGE, "ascent_lr": 0.3}),
    "fs-rgpm as on pmnist": ("fs-rgpm", {**RIDGE, **WEIGHTED, "first_inputs": "all", "ascent_form": "chunked"}),
    "fs-rgpm averaged": ("fs-rgpm", {**RIDGE, **WEIGHTED, "average": 0.7, "clip": 0.3}),
    "fs-rgpm second order": ("fs-rgpm", {**RIDGE, **WEIGHTED, "second_order": True, "ascent_lr": 0.3}),
    "fs-dgpm weighted": ("fs-dgpm", {**SMALL, **LIVELY, **WEIGHTED, "ascent_lr": 0.3}),
    "dgpm weighted": ("dgpm", {**SMALL, **LIVELY, **WEIGHTED, "ascent_lr": 0.3}),
    "la-dgpm whole": ("la-dgpm", {**SMALL, **LIVELY, "ascent_form": "whole", "ascent_lr": 0.3}),
    "la-dgpm chunked": ("la-dgpm", {**SMALL, **LIVELY, "ascent_form": "chunked", "clip": 0.3}),
    "dgpm": ("dgpm", {**SMALL, **LIVELY, "ascent_lr": 0.3, "clip": 0.3}),
    "dgpm chunked": ("dgpm", {**SMALL, **LIVELY, "ascent_form": "chunked", "ascent_lr": 0.3}),
    "dgpm second order": ("dgpm", {**SMALL, **LIVELY, "second_order": True, "ascent_lr": 0.3}),
    "er": ("er", {**REPLAY}),
    "er clipped": ("er", {**REPLAY, "clip": 0.1}),
    "fs-er": ("fs-er", {**REPLAY, "ascent_lr": 0.3, "clip": 0.3}),
    "finetune": ("finetune", {"clip": 0.1}),
    "finetune unclipped": ("finetune", {"clip": 0, "momentum": 0}),
}


def start_method(
    name: str, changes: dict[str, Any], problem: Problem, seed: int = 3, factored: bool = True
) -> tuple[Any, Network, Method]:
    """A member of the family on the problem's network, created by name as in the library."""
    entry = find_method(name)
    settings: Any = entry.settings.from_mapping({**entry.values(""), **changes})
    model = problem.build()
    network = Network(model)
    covered = coverage(problem, model, factored) if settings.uses_projection else {}
    return settings, network, settings.start(network, covered, Streams(seed))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("problem", "factored"), [("mlp", True), ("mlp", False), ("conv", True)])
@pytest.mark.parametrize("case", CASES)
def test_three_tasks_equal_the_flat_reference(case: str, problem: str, factored: bool) -> None:
    """Weights and losses after every update of three tasks: without bases, with bases, and with replaced bases.

    Momentum lasts for a task; replay samples come from the same random streams.
    """
    name, changes = CASES[case]
    setup = PROBLEMS[problem]
    settings, network, method = start_method(name, changes, setup, factored=factored)
    twin = FlatUpdate(name, settings, setup, network.model, Streams(3).derive_seed)
    for task in range(3):
        network.heads.add(setup.heads[task], 4 if setup.heads[task] is None else 6)
        method.begin_task()
        twin.begin_task()
        for size in (5, 5, 3):
            batch = drawn(setup, task, size)
            before = twin.w
            loss = method.observe(batch)
            assert float(loss) == pytest.approx(twin.observe(listed(batch)), rel=1e-9)
            torch.testing.assert_close(flat(network.model), twin.w, rtol=1e-8, atol=1e-10)
            assert not torch.equal(before, twin.w)
            method.after_batch(batch)
            twin.after_batch(listed(batch))
        if twin.projects:
            compare_importances(method, twin)
        method.end_task()
        twin.end_task()
        if "average" in changes:
            torch.testing.assert_close(flat(network.model), twin.average, rtol=1e-8, atol=1e-10)
    assert no_hooks(network.model)


def compare_importances(method: Any, twin: FlatUpdate) -> None:
    assert set(method.memory.projectors) == set(twin.bases.importance)
    for key, projector in method.memory.projectors.items():
        if twin.rule == "ridge":
            own = (
                list(projector.matrix)
                if isinstance(projector, MatrixProjector)
                else dense_projectors(projector.basis, projector.importance)
            )
            for matrix, m, values in zip(own, twin.bases.vectors[key], twin.bases.importance[key], strict=True):
                torch.testing.assert_close(matrix, m @ torch.diag(values) @ m.T, rtol=1e-6, atol=1e-9)
            continue
        expected = torch.cat(twin.bases.importance[key])
        torch.testing.assert_close(projector.active_importance, expected, rtol=1e-6, atol=1e-9)
        assert projector.rank == len(expected)


@pytest.mark.parametrize(
    ("case", "least"), [("fs-dgpm", 1e-3), ("la-dgpm whole", 1e-3), ("dgpm", 1e-3), ("fs-sgpm", 1e-2), ("fs-gpm", 0)]
)
def test_comparison_covers_soft_importances(case: str, least: float) -> None:
    """The settings above give bases that hold some directions and miss others, and importances that differ."""
    name, changes = CASES[case]
    setup = PROBLEMS["mlp"]
    _, network, method = start_method(name, changes, setup)
    for task in range(2):
        network.heads.add(None, 4)
        method.begin_task()
        for _ in range(2):
            batch = drawn(setup, task, 5)
            method.observe(batch)
            method.after_batch(batch)
        if task == 0:
            method.end_task()
    ranks = method.diagnostics()["ranks"]
    assert all(0 < entry["rank"] < entry["of"] for entry in ranks.values())
    values = torch.cat([p.active_importance for p in method.memory.projectors.values()])
    assert float(values.max() - values.min()) >= least
    assert (least == 0) == bool((values == 1).all())


@pytest.mark.parametrize("member", ["fs-gpm", "fs-dgpm", "la-dgpm", "dgpm"])
def test_full_bases_preserve_the_memorized_outputs(member: str) -> None:
    """With λ = 1 and all energy held, every covered layer's output on the memorized inputs stays the same in every
    update."""
    model = nn.Sequential(
        nn.Linear(9, 12, bias=False), nn.ReLU(), nn.Linear(12, 11, bias=False), nn.ReLU(), nn.Linear(11, 4, bias=False)
    ).double()
    network = Network(model)
    entry = find_method(member)
    changes = {"threshold": 1.0, "buffer": 5, "basis_samples": 5, "importance": "ones", "lr": 0.2, "ascent_lr": 0.5}
    method: Any = entry.settings.from_mapping({**entry.values(""), **changes}).start(
        network, projected_weights(model), Streams(0)
    )
    old, new = torch.randn(5, 9, dtype=torch.float64), torch.randn(8, 9, dtype=torch.float64)
    first = Batch(old, torch.arange(5) % 4, torch.zeros(5, dtype=torch.int64))
    network.heads.add(None, 4)
    method.begin_task()
    method.observe(first)
    method.after_batch(first)
    method.end_task()
    network.heads.add(None, 4)
    method.begin_task()
    with torch.no_grad():
        before = [model[: place + 1](old) for place in range(5)]
        elsewhere = model(new)
    for _ in range(4):
        method.observe(Batch(new, torch.arange(8) % 4, torch.ones(8, dtype=torch.int64)))
    with torch.no_grad():
        for place, output in enumerate(before):
            torch.testing.assert_close(model[: place + 1](old), output, rtol=0, atol=1e-11)
        assert float((model(new) - elsewhere).abs().max()) > 1e-3


def test_tiny_perturbation_approaches_projected_replay() -> None:
    """The limit is w −= η3 · outside(∇L_{D∪N}(w)); the difference falls with η1."""
    setup = PROBLEMS["smooth"]
    gaps = []
    for ascent_lr in (1e-3, 1e-5, 1e-7):
        torch.manual_seed(0)
        changes = {**SMALL, "ascent_lr": ascent_lr, "momentum": 0, "clip": 0}
        settings, network, method = start_method("fs-gpm", changes, setup)
        network.heads.add(None, 4)
        method.begin_task()
        first, batch = drawn(setup, 0, 7), drawn(setup, 1, 5)
        method.after_batch(first)
        method.end_task()
        network.heads.add(None, 4)
        before = flat(network.model)
        method.replay.sample = lambda count, old=first: old[:count]
        _, gradient = network.loss_and_grad(batch.joined(first[:5]))
        step = torch.cat([g.flatten() for g in method.memory.project_out(gradient).values()])
        method.observe(batch)
        gaps.append(float((flat(network.model) - (before - settings.lr * step)).abs().max()))
    assert gaps[0] > 10 * gaps[1] > 100 * gaps[2]
    assert gaps[2] < 1e-9


@pytest.mark.parametrize("norm", [0.0, 0.5, 100.0])
def test_clipping_scales_the_whole_gradient(norm: float) -> None:
    """Factored and dense parts count together; the direction does not change; 0 never clips."""
    left, right, other = torch.randn(3, 5).double(), torch.randn(3, 4).double(), torch.randn(7).double()
    together = torch.cat([(left.T @ right).flatten(), other])
    short = clip_by_norm({"a": FactoredGrad(left, right), "b": other}, norm)
    found = torch.cat([short["a"].dense().flatten(), short["b"]])  # type: ignore[union-attr, list-item]
    factor = 1.0 if norm == 0 else min(1.0, norm / float(together.norm()))
    torch.testing.assert_close(found, together * factor, rtol=1e-5, atol=0)
    assert norm == 0 or float(found.norm()) <= norm * (1 + 1e-12)


@pytest.mark.parametrize("importance", ["sigmoid", "spectral"])
def test_diagnostics_have_the_old_importances_and_the_new_ranks(importance: str) -> None:
    """Importances of the basis that the task was learned with, ranks of the one built after it, as in figures and
    reports."""
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    learner = steppe.Learner(model, steppe.FSDGPM(importance=importance, **SMALL, **LIVELY))  # type: ignore[arg-type]
    assert learner.learn(steppe.Task((x, y))).diagnostics["importances"] == {}
    method: Any = learner.validate(steppe.Task((x, y)))
    for shift in (1, 2):
        reached: list[dict[str, Any]] = []
        record = learner.learn(
            steppe.Task((2 * x + shift, y)), callback=lambda _, seen=reached: seen.append(snapshot_of(method))
        ).diagnostics
        assert record["importances"] == reached[-1]["importances"]
        assert record["ranks"] == snapshot_of(method)["ranks"]
        assert record["importances"] != snapshot_of(method)["importances"]


def snapshot_of(method: Any) -> dict[str, Any]:
    """The diagnostics, computed from the memory."""
    return {"importances": method.memory.importance_distributions(), "ranks": method.memory.ranks()}
