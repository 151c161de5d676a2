"""A wrapped optimizer is the base optimizer in everything but where its steps lead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_memories import backward, share_inside, small, weights_of, with_memory
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

import steppe

MAKERS: dict[str, tuple[Callable[[Any], Optimizer], float]] = {  # with the least share that leaks by the gradient
    "adam": (lambda params: torch.optim.Adam(params, lr=1e-3), 0.1),
    "sgd with weight decay": (lambda params: torch.optim.SGD(params, lr=0.001, weight_decay=10.0), 0.1),
    "adamw": (lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1), 0.1),
}


@pytest.mark.parametrize(("make", "leak"), MAKERS.values(), ids=MAKERS)
def test_the_step_is_projected_not_only_the_gradient(make: Callable[[Any], Optimizer], leak: float) -> None:
    shares = {}
    for project in ("gradient", "step", "both"):
        model = small()
        memory = with_memory(model)
        optimizer = memory.wrap(make(model.parameters()), project=project)
        before = weights_of(model)
        for _ in range(20):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        shares[project] = share_inside(memory, before)
    assert shares["gradient"] > leak
    assert max(shares["step"], shares["both"]) < 1e-5


def test_plain_sgd_needs_its_gradient_projected_only() -> None:
    """The two ways agree where the papers use them."""
    models = [small(dtype=torch.float64) for _ in range(2)]
    for model, project in zip(models, ("gradient", "step"), strict=True):
        torch.manual_seed(1)
        memory = with_memory(model, threshold=0.9, importance="spectral")
        optimizer = memory.wrap(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), project=project)
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)


def test_it_is_the_base_optimizer_in_everything_else() -> None:
    model = small()
    base = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])
    optimizer = with_memory(model).wrap(base)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults is base.defaults
    backward(model)
    optimizer.step()
    assert len(base.state) == 4
    plain = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    plain.load_state_dict(optimizer.state_dict())  # a checkpoint fits with and without the wrapper
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.state is base.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    assert "AdamW" in repr(optimizer)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        lambda optimizer: SequentialLR(
            optimizer, [LambdaLR(optimizer, lambda step: 0.1), CosineAnnealingLR(optimizer, 5)], milestones=[2]
        ),
    ],
)
def test_schedulers(schedule: Callable[[Optimizer], Any], recwarn: pytest.WarningsRecorder) -> None:
    lrs: list[list[float]] = []
    for wrapped in (False, True):
        model = small()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = with_memory(model).wrap(base) if wrapped else base
        scheduler = schedule(optimizer)
        lrs.append([])
        for _ in range(5):
            backward(model)
            optimizer.step()
            scheduler.step()
            lrs[-1].append(base.param_groups[0]["lr"])
    assert lrs[0] == lrs[1]
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_a_scheduler_of_the_base_optimizer() -> None:
    model = small()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(base, lambda step: 0.5**step)
    optimizer = with_memory(model).wrap(base)
    backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    """Scaled gradients make the same step; where one overflows, the step is skipped and the scale lowered."""
    models = [small(dtype=torch.float64) for _ in range(2)]
    memories = []
    for model in models:
        torch.manual_seed(2)
        memories.append(with_memory(model))
    plain, scaled = (
        memory.wrap(torch.optim.AdamW(memory.model.parameters(), lr=0.01, fused=fused)) for memory in memories
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for _ in range(3):
        x = torch.randn(8, 10, dtype=torch.float64)
        for model, optimizer in zip(models, (plain, scaled), strict=True):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            (scaler.scale(loss) if optimizer is scaled else loss).backward()
        plain.step()
        scaler.step(scaled)
        scaler.update()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
    before = weights_of(models[1])
    scaled.zero_grad()
    (scaler.scale(models[1](x).square().sum()) * float("inf")).backward()
    scaler.step(scaled)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, before[name]) for name, p in models[1].named_parameters())
    assert not hasattr(scaled, "found_inf")


def test_unscaling_to_clip() -> None:
    model = small()
    optimizer = with_memory(model).wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.randn(8, 10)).sum()).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
    before = weights_of(model)
    scaler.step(optimizer)
    moved = sum(float((p - before[name]).detach().square().sum()) for name, p in model.named_parameters())
    assert 0 < moved**0.5 <= 0.1001


def test_gradients_accumulate() -> None:
    models = [small(dtype=torch.float64) for _ in range(2)]
    batches = torch.randn(4, 5, 10, dtype=torch.float64)
    for model, parts in zip(models, (batches, [batches.flatten(0, 1)]), strict=True):
        torch.manual_seed(3)
        optimizer = with_memory(model).wrap(torch.optim.Adam(model.parameters(), lr=0.01))
        for part in parts:
            model(part).square().sum().backward()
        optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_closure_and_its_loss() -> None:
    model = small()
    memory = with_memory(model)
    optimizer = memory.wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    before = weights_of(model)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model)

    with torch.no_grad():
        assert float(optimizer.step(closure).detach()) > 0
    assert share_inside(memory, before) < 1e-5
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_hooks_see_the_wrapped_optimizer_and_its_step() -> None:
    model = small()
    memory = with_memory(model)
    optimizer = memory.wrap(torch.optim.AdamW(model.parameters()))
    seen: list[tuple[str, Any]] = []
    before = weights_of(model)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("pre", optimizer)))
    handle = optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(("post", share_inside(memory, before) < 1e-4))
    )
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "note": 1})
    backward(model)
    optimizer.step()
    assert seen == [("pre", optimizer), ("post", True)]
    handle.remove()
    optimizer.step()
    assert len(seen) == 3
    assert optimizer.state_dict()["note"] == 1


def test_add_param_group() -> None:
    model = small()
    memory = with_memory(model)
    optimizer = memory.wrap(torch.optim.SGD(model[0].parameters(), lr=0.1))
    backward(model)
    optimizer.step()
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})
    before = weights_of(model)
    backward(model)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert share_inside(memory, before) < 1e-5
    with pytest.raises(steppe.UsageError, match="do not belong to the memory's model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2


def test_two_optimizers_share_a_memory() -> None:
    model = small()
    memory = with_memory(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    both = [memory.wrap(torch.optim.Muon(matrices, lr=0.01)), memory.wrap(torch.optim.AdamW(vectors))]
    before = weights_of(model)
    for _ in range(3):
        backward(model)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert share_inside(memory, before) < 1e-5


def test_named_parameters() -> None:
    model = small()
    memory = with_memory(model)
    optimizer = memory.wrap(torch.optim.SGD(model[0].named_parameters(), lr=0.1))
    optimizer.add_param_group({"params": model[2].named_parameters()})
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
    before = weights_of(model)
    backward(model)
    optimizer.step()
    assert share_inside(memory, before) < 1e-5


def test_half_precision_weights() -> None:
    model = small(dtype=torch.bfloat16)
    memory = with_memory(model)
    assert {p.basis.dtype for p in memory.projectors.values()} == {torch.float32}
    optimizer = memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights_of(model)
    backward(model)
    optimizer.step()
    assert share_inside(memory, before) < 0.05  # the weights themselves are rounded to 8 bits


def test_wrong_arguments() -> None:
    model = small()
    memory = steppe.GradientProjectionMemory(model)
    with pytest.raises(steppe.UsageError, match=r"expected a torch\.optim\.Optimizer"):
        memory.wrap(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(steppe.UsageError, match=r"of shape \(12, 10\).* do not belong to the memory's model"):
        memory.wrap(torch.optim.SGD(small().parameters(), lr=0.1))
    wrapped = memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(steppe.UsageError, match="is a ProjectedOptimizer; wrap the innermost optimizer, once"):
        memory.wrap(wrapped)
    with pytest.raises(steppe.UsageError, match=r"unknown project 'steps'\. Did you mean 'step'"):
        memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1), project="steps")
