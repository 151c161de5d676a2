"""Flat sharpness against its formula, with closures, in two steps, and beside what users combine it with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import steppe


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def batch(count: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 8, dtype=torch.float64), torch.arange(count) % 3


def with_memory(model: nn.Module, **settings: Any) -> steppe.GradientProjectionMemory:
    memory = steppe.GradientProjectionMemory(model, **{"threshold": 0.9, **settings})
    memory.update(batch(20))
    return memory


def closure_of(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    def closure() -> Tensor:
        model.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def gradient_at(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """∇L at other weights."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    loss = cross_entropy(torch.func.functional_call(model, leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def within(memory: steppe.GradientProjectionMemory | None, name: str, g: Tensor) -> Tensor:
    """G M diag(λ) Mᵀ by dense matrices; G for a weight without a basis."""
    if memory is None or name not in memory.projectors:
        return g
    basis, importance = memory.projectors[name].basis[0], memory.projectors[name].importance[0]
    return g @ (basis @ importance.diag() @ basis.mT)


FORMS: list[dict[str, Any]] = [
    {"radius": 0.3},
    {"radius": 0.3, "steps": 3},
    {"lr": 0.5},
    {"lr": 0.5, "steps": 2, "clamp": 0.01},
    {"lr": 2.0, "steps": 2, "clamp": None},
]


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_against_the_formula(form: dict[str, Any], has_memory: bool) -> None:
    model = small()
    memory = with_memory(model, importance="spectral") if has_memory else None
    x, y = batch()
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    at, steps = dict(w), form.get("steps", 1)
    for _ in range(steps):
        parts = {name: within(memory, name, g) for name, g in gradient_at(model, at, x, y).items()}
        if "radius" in form:
            norm = torch.cat([part.reshape(-1) for part in parts.values()]).norm()
            at = {name: at[name] + form["radius"] / steps * part / norm for name, part in parts.items()}
        else:
            bound = form.get("clamp", 2.0) or torch.inf
            at = {name: at[name] + form["lr"] * part.clamp(-bound, bound) for name, part in parts.items()}
    expected = {name: w[name] - 0.1 * g for name, g in gradient_at(model, at, x, y).items()}

    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = steppe.FlatSharpness(base, memory, **form)
    twin, closure = copy.deepcopy(model), closure_of(model, x, y)
    loss = optimizer.step(closure)
    assert float(loss.detach()) > float(cross_entropy(twin(x), y).detach())  # it has climbed
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-13)

    model.load_state_dict(twin.state_dict())  # the same in two steps
    for _ in range(steps):
        closure()
        optimizer.first_step(zero_grad=True)
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.is_perturbed
    closure()
    optimizer.second_step(zero_grad=True)
    assert not optimizer.is_perturbed
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-13)


def test_it_climbs_within_the_memory_and_steps_outside() -> None:
    model = small()
    memory = with_memory(model)
    optimizer = steppe.FlatSharpness(memory.wrap(torch.optim.AdamW(model.parameters())), radius=0.1)
    assert optimizer.memory is memory
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    closure = closure_of(model, *batch())
    closure()
    optimizer.first_step()
    for name, projector in memory.projectors.items():
        v = dict(model.named_parameters())[name].detach() - before[name]
        assert float(v.norm()) > 1e-3
        assert float((v - v @ projector.basis[0] @ projector.basis[0].mT).norm()) < 1e-12
    closure()
    optimizer.second_step()
    for name, projector in memory.projectors.items():
        step = dict(model.named_parameters())[name].detach() - before[name]
        assert float(step.norm()) > 1e-4
        assert float((step @ projector.basis[0]).norm()) < 1e-12


def test_learned_importances_are_the_derivative() -> None:
    """For one step without clamp, ∂L(w + v(λ))/∂λ by autograd."""
    model = small()
    memory = with_memory(model, importance="sigmoid")
    x, y = batch()
    seen: dict[str, Tensor] = {}
    memory.update_importances = lambda gradient: seen.update(gradient)  # type: ignore[method-assign]
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    g = gradient_at(model, w, x, y)
    importances = {name: p.importance.clone().requires_grad_() for name, p in memory.projectors.items()}
    at = {}
    for name, value in w.items():
        if name in importances:
            basis = memory.projectors[name].basis[0]
            at[name] = value + 0.7 * g[name] @ basis @ importances[name][0].diag() @ basis.mT
        else:
            at[name] = value + 0.7 * g[name]
    loss = cross_entropy(torch.func.functional_call(model, at, (x,)), y)
    expected = dict(zip(importances, torch.autograd.grad(loss, list(importances.values())), strict=True))

    optimizer = steppe.FlatSharpness(memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), lr=0.7, clamp=None)
    optimizer.step(closure_of(model, x, y))
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=0, atol=1e-14)


def test_running_statistics_move_once_per_update() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    memory = steppe.GradientProjectionMemory(model, threshold=0.9)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    closure = closure_of(model, *batch())
    optimizer = steppe.FlatSharpness(memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), lr=0.5, steps=2)
    twin = copy.deepcopy(model)
    optimizer.step(closure)
    assert int(norm.num_batches_tracked) == 1
    closure_of(twin, *batch())()
    first = copy.deepcopy(norm)
    for number in range(2):
        closure()
        if number == 0:
            first = copy.deepcopy(norm)
        optimizer.first_step()
    closure()
    optimizer.second_step()
    assert int(norm.num_batches_tracked) == 2
    assert torch.equal(norm.running_mean, first.running_mean)  # of the forward at w


def test_a_closure_that_fails_puts_everything_back() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    memory = with_memory(model)
    optimizer = steppe.FlatSharpness(memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), lr=0.5, steps=2)
    state, closure, calls = copy.deepcopy(model.state_dict()), closure_of(model, *batch()), []

    def failing() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not optimizer.is_perturbed
    closure()
    optimizer.first_step()
    optimizer.restore()  # an update that is abandoned
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())


def test_with_a_grad_scaler() -> None:
    """Scaled gradients give the same update; an overflow moves nothing."""
    results = []
    for scale in (None, 256.0):
        model = small()
        memory = with_memory(model, importance="sigmoid", importance_lr=1.0, temperature=3.0)
        optimizer = steppe.FlatSharpness(memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        x, y = batch()
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(x), y)).backward()
            optimizer.first_step(zero_grad=True, grad_scale=scaler.get_scale())
            scaler.scale(cross_entropy(model(x), y)).backward()
            optimizer.restore(grad_scale=scaler.get_scale())
            scaler.step(optimizer.optimizer)
            scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)
    optimizer.zero_grad()
    (cross_entropy(model(x), y) * float("inf")).backward()
    optimizer.first_step(zero_grad=True, grad_scale=scaler.get_scale())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), results[1], strict=True))
    (cross_entropy(model(x), y) * float("inf")).backward()
    optimizer.restore(grad_scale=scaler.get_scale())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), results[1], strict=True))
    assert all(bool(p.importance.isfinite().all()) for p in memory.projectors.values())
    assert any(float(p.importance.min()) < 0.99 for p in memory.projectors.values())  # they had moved


@pytest.mark.parametrize("wrapped", [True, False])
def test_it_is_the_base_optimizer_in_everything_else(wrapped: bool) -> None:
    model = small()
    memory = with_memory(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = steppe.FlatSharpness(memory.wrap(base) if wrapped else base, radius=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(closure_of(model, *batch()))
    scheduler.step()
    assert base.param_groups[0]["lr"] == 0.05
    assert optimizer.state_dict() == base.state_dict()
    assert optimizer.state is base.state
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert (twin.memory is None) != wrapped
    for m, o in ((model, optimizer), (twin_model, twin)):
        torch.manual_seed(6)
        o.step(closure_of(m, *batch()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin_model.parameters(), strict=True))


def test_clipping_before_the_step() -> None:
    model = small()
    optimizer = steppe.FlatSharpness(torch.optim.SGD(model.parameters(), lr=1.0), radius=0.1, clip=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure_of(model, *batch()))
    moved = sum(float((p - q).detach().square().sum()) for p, q in zip(model.parameters(), before, strict=True))
    assert moved**0.5 == pytest.approx(1e-3, rel=2e-3)


def test_wrong_arguments() -> None:
    model = small()
    memory = with_memory(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, message in (
        ({"radius": 0.1, "lr": 0.1}, "pass either `radius`"),
        ({"radius": -0.1}, "radius = -0.1 is out of range; it must be above 0"),
        ({"steps": 0}, "steps = 0 is out of range"),
        ({"clip": -1}, "clip = -1 is out of range"),
        ({"memory": model}, "memory must be a GradientProjectionMemory"),
    ):
        with pytest.raises(steppe.UsageError, match=message):
            steppe.FlatSharpness(base, **arguments)  # type: ignore[arg-type]
    with pytest.raises(steppe.UsageError, match="wrapped by another memory"):
        steppe.FlatSharpness(memory.wrap(base), steppe.GradientProjectionMemory(model))
    flat = steppe.FlatSharpness(base)
    with pytest.raises(steppe.UsageError, match="is a FlatSharpness already"):
        steppe.FlatSharpness(flat)
    with pytest.raises(steppe.UsageError, match="pass a closure"):
        flat.step()
