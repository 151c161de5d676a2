"""La-MAML: meta-gradients against autograd through the unrolled inner loop and against finite differences; whole
updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Sample, central_differences
from reference_baselines import Flat, learn_tasks, same_bits, started_on, statistics_moves
from reference_projection_baselines import (
    flattened,
    inner_gradients,
    meta_loss,
)
from reference_update import PROBLEMS, Problem, drawn, listed
from torch import Tensor

from steppe import Batch
from steppe.runtime.rng import Streams

CASES: dict[str, dict[str, Any]] = {
    "plain": {"inner_steps": 3},
    "raw rates": {"inner_steps": 3, "inner_relu": False},
    "clamped": {"inner_steps": 2, "inner_relu": False, "inner_clamp": 0.03},
    "one by one": {"inner_steps": 7, "rate": 0.3},
    "more steps than slices": {"inner_steps": 5},  # 7 samples in slices of 2: four of them
}


def build_case(
    problem: Problem, changes: dict[str, Any]
) -> tuple[Any, Any, Any, Callable[[Tensor, list[Sample]], Tensor]]:
    """The method with rates of both signs, after two tasks, and the problem's loss on a flat vector."""
    settings, network, method = started_on(problem, "la-maml", changes)
    for task in range(2):
        network.heads.add(problem.heads[task], 6 if problem.heads[task] else 4)
    generator = torch.Generator().manual_seed(8)
    for rate in method.rates.values():
        rate += 0.2 * torch.randn(rate.shape, generator=generator, dtype=rate.dtype)
    return settings, network, method, Flat(settings, problem, network.model, Streams(3).derive_seed).loss


def slices_of(batch: Batch, steps: int) -> list[list[Sample]]:
    size = -(-len(batch) // steps)
    samples = listed(batch)
    return [samples[at : at + size] for at in range(0, len(samples), size)]


@pytest.mark.parametrize("problem", ["smooth", "conv"])
@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_meta_gradients_equal_the_unrolled_loop(case: str, second_order: bool, problem: str) -> None:
    setup = PROBLEMS[problem]
    settings, network, method, loss = build_case(setup, {"second_order": second_order, **CASES[case]})
    current = drawn(setup, 1, 7)
    union = current.joined(drawn(setup, 0, 4))
    found = method.meta_gradient(current, union)
    theta = flattened(network.trainable).requires_grad_()
    alpha = flattened(method.rates).requires_grad_()
    slices = slices_of(current, settings.inner_steps)
    relu, clamp = settings.inner_relu, settings.inner_clamp
    constants = None if second_order else inner_gradients(loss, theta, alpha, slices, relu, clamp)
    expected = meta_loss(loss, theta, alpha, slices, listed(union), relu=relu, clamp=clamp, constants=constants)
    in_theta, in_alpha = torch.autograd.grad(expected, [theta, alpha])
    assert float(found.loss) == pytest.approx(float(expected.detach()), abs=1e-12)
    torch.testing.assert_close(flattened(found.weights), in_theta, rtol=0, atol=1e-11)
    torch.testing.assert_close(flattened(found.rates), in_alpha, rtol=0, atol=1e-11)
    assert float(in_alpha.norm()) > 1e-3


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_rate_of_0_moves_only_without_relu(relu: bool, second_order: bool) -> None:
    """The slope of ReLU at 0 is 0, in first order as in second."""
    setup = PROBLEMS["smooth"]
    changes = {"inner_steps": 2, "inner_relu": relu, "second_order": second_order}
    method = build_case(setup, changes)[2]
    for rate in method.rates.values():
        rate.flatten()[::3] = 0.0
    still = flattened(method.rates) == 0
    current = drawn(setup, 1, 6)
    found = flattened(method.meta_gradient(current, current.joined(drawn(setup, 0, 4))).rates)
    assert 10 < int(still.sum()) < len(still)
    assert bool(found[still].any()) is not relu
    assert bool(found[~still].any())


@pytest.mark.parametrize("second_order", [False, True])
def test_meta_gradients_equal_finite_differences(second_order: bool) -> None:
    """Of the meta-loss as a plain function of θ and α; in first order with the inner gradients fixed."""
    setup = PROBLEMS["smooth"]
    _, network, method, loss = build_case(setup, {"inner_steps": 2, "second_order": second_order})
    current = drawn(setup, 1, 4)
    union = current.joined(drawn(setup, 0, 2))
    found = method.meta_gradient(current, union)
    theta, alpha = flattened(network.trainable), flattened(method.rates)
    slices = slices_of(current, 2)
    constants = None if second_order else inner_gradients(loss, theta, alpha, slices, True, 0.0)

    def value(theta: Tensor, alpha: Tensor) -> float:
        return float(
            meta_loss(loss, theta, alpha, slices, listed(union), relu=True, clamp=0.0, constants=constants).detach()
        )

    some = torch.arange(0, len(theta), 5)

    def along(at: Tensor, function: Callable[[Tensor], float]) -> Tensor:
        def moved(part: Tensor) -> float:
            whole = at.clone()
            whole[some] = part
            return function(whole)

        return central_differences(moved, at[some])

    in_theta = along(theta, lambda moved: value(moved, alpha))
    in_alpha = along(alpha, lambda moved: value(theta, moved))
    torch.testing.assert_close(flattened(found.weights)[some], in_theta, rtol=0, atol=1e-8)
    torch.testing.assert_close(flattened(found.rates)[some], in_alpha, rtol=0, atol=1e-8)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_update_moves_the_rates_then_the_weights(asynchronous: bool) -> None:
    """α and θ are clipped separately; weights with negative new rates do not move."""
    changes = {"inner_steps": 3, "clip": 0.05, "rate_lr": 4.0, "asynchronous": asynchronous, "lr": 0.2}
    setup = PROBLEMS["conv"]
    _, network, method, _ = build_case(setup, changes)
    seen: list[Any] = []
    inner = method.meta_gradient

    def watched(current: Batch, union: Batch) -> Any:
        seen.append(inner(current, union))
        return seen[-1]

    method.meta_gradient = watched
    theta, alpha = flattened(network.trainable), flattened(method.rates)
    method.observe(drawn(setup, 1, 6))
    in_theta, in_alpha = flattened(seen[0].weights), flattened(seen[0].rates)
    assert float(in_theta.norm()) > 0.05
    assert float(in_alpha.norm()) > 0.05
    alpha = alpha - 4.0 * in_alpha * 0.05 / (in_alpha.norm() + 1e-6)
    step = in_theta * 0.05 / (in_theta.norm() + 1e-6)
    theta = theta - (alpha.clamp(min=0) if asynchronous else 0.2) * step
    torch.testing.assert_close(flattened(method.rates), alpha, rtol=0, atol=1e-12)
    torch.testing.assert_close(flattened(network.trainable), theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("second_order", [False, True])
def test_decays_shorten_the_inner_and_both_outer_steps(second_order: bool, asynchronous: bool) -> None:
    """Two decays multiply α, η and lr by the same factor; a new task starts with the full step sizes."""
    changes = {"inner_steps": 3, "clip": 0, "rate": 0.5, "rate_lr": 2.0, "lr": 0.2}
    setup = PROBLEMS["smooth"]
    _, network, method, loss = build_case(
        setup, {**changes, "second_order": second_order, "asynchronous": asynchronous}
    )
    method.after_batch(drawn(setup, 0, 4))
    seen: list[tuple[Batch, Batch]] = []
    inner = method.meta_gradient
    method.meta_gradient = lambda current, union: (seen.append((current, union)), inner(current, union))[1]
    for pace in (0.25, 1.0):
        if pace < 1:
            method.decay_lr(2)
            assert method.decay_lr(2) == pace * (0.5 if asynchronous else 0.2)
        else:
            method.begin_task()
        theta = flattened(network.trainable).requires_grad_()
        alpha = flattened(method.rates).requires_grad_()
        method.observe(drawn(setup, 1, 6))
        slices, union = slices_of(seen[-1][0], 3), listed(seen[-1][1])
        constants = None if second_order else inner_gradients(loss, theta, pace * alpha, slices, True, 0.0)
        expected = meta_loss(loss, theta, pace * alpha, slices, union, relu=True, clamp=0.0, constants=constants)
        in_theta, in_alpha = torch.autograd.grad(expected, [theta, alpha])
        rates = (alpha - pace * 2.0 * in_alpha).detach()
        weights = theta.detach() - pace * (rates.clamp(min=0) if asynchronous else 0.2) * in_theta
        torch.testing.assert_close(flattened(method.rates), rates, rtol=0, atol=1e-11)
        torch.testing.assert_close(flattened(network.trainable), weights, rtol=0, atol=1e-11)


def test_meta_batch_is_the_batch_and_replay_with_replacement() -> None:
    setup = PROBLEMS["mlp"]
    _, network, method = started_on(setup, "la-maml", {"buffer": 4, "replay_batch": 10})
    network.heads.add(None, 4)
    old, batch = drawn(setup, 0, 4), drawn(setup, 0, 6)
    method.after_batch(old)
    seen: list[tuple[Batch, Batch]] = []
    inner = method.meta_gradient
    method.meta_gradient = lambda current, union: (seen.append((current, union)), inner(current, union))[1]
    counts: list[int] = []
    orders = set()
    for _ in range(30):
        method.observe(batch)
        current, union = seen[-1]
        assert torch.equal(union.x[:6], batch.x)
        places = [int((batch.x == x).all(1).nonzero()) for x in current.x]
        assert sorted(places) == list(range(6))  # the batch itself, in another order
        orders.add(tuple(places))
        rows = [int((old.x == x).all(1).nonzero()) for x in union.x[6:]]
        assert len(rows) == 4
        counts.append(len(set(rows)))
    assert len(orders) > 20
    assert 1 < sum(counts) / len(counts) < 3.5  # 2.73 distinct ones of 4 are expected
    assert len(set(counts)) > 1


def test_weights_are_restored_after_a_failed_forward() -> None:
    setup = PROBLEMS["mlp"]
    _, network, method = started_on(setup, "la-maml", {"inner_steps": 2})
    network.heads.add(None, 4)
    before = flattened(network.trainable)
    batch = drawn(setup, 0, 4)
    broken = Batch(batch.x[:, :3], batch.y, batch.task)
    with pytest.raises(RuntimeError):
        method.meta_gradient(batch, broken)
    assert torch.equal(flattened(network.trainable), before)


def test_rates_are_kept_and_samples_stored_once_per_batch() -> None:
    setup = PROBLEMS["mlp"]
    _, network, method = started_on(setup, "la-maml", {})
    network.heads.add(None, 4)
    batch = drawn(setup, 0, 6)
    method.observe(batch)
    method.observe(batch)
    method.after_batch(batch)
    assert len(method.replay) == 6
    rates = flattened(method.rates)
    assert not torch.equal(rates, torch.full_like(rates, 0.15))
    method.end_task()
    network.heads.add(None, 4)
    method.begin_task()
    assert torch.equal(flattened(method.rates), rates)


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("second_order", [False, True])
def test_learns_tasks_with_and_without_heads(second_order: bool, heads: bool) -> None:
    changes = {"second_order": second_order, "rate": 0.1, "rate_lr": 0.05, "inner_steps": 2}
    learner, accuracies = learn_tasks("la-maml", changes, heads)
    assert sum(accuracies) / 3 > 85
    assert learner._method is not None
    sizes = learner._method.memory_bytes()
    assert sizes["rates"] == sum(p.nbytes for p in learner.network.trainable.values())
    assert sizes["replay"] > 0
    assert sizes["bases"] == 0


@pytest.mark.parametrize("second_order", [False, True])
def test_running_statistics_move_once_per_update(second_order: bool) -> None:
    assert statistics_moves("la-maml", {"second_order": second_order}) == {1}


@pytest.mark.parametrize("second_order", [False, True])
def test_the_same_seed_gives_the_same_bits(second_order: bool) -> None:
    assert same_bits("la-maml", {"second_order": second_order})
