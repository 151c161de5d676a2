"""A wrapped optimizer is copied, saved and interrupted as a whole."""

from __future__ import annotations

import copy
import io
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_memories import backward, share_inside, small, weights_of, with_memory
from torch import Tensor, nn
from torch.optim import Optimizer

import steppe


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Iterator[None]:
    """Also in a process that was started with SIGINT ignored, as shells start background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    """A model and its optimizer copied together go on like the originals."""
    model = small()
    memory = with_memory(model)
    optimizer = memory.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    backward(model)
    optimizer.step()
    other, twin = copied((model, optimizer))
    for m, o in ((model, optimizer), (other, twin)):
        torch.manual_seed(5)
        o.zero_grad()
        backward(m)
        o.step()
    assert twin.memory.model is other
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert not any(p.data_ptr() == q.data_ptr() for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_loop_resumed_from_a_checkpoint_gives_the_same_bits() -> None:
    def made() -> tuple[nn.Module, steppe.GradientProjectionMemory, steppe.ProjectedOptimizer]:
        model = small()
        memory = steppe.GradientProjectionMemory(model, threshold=0.9, importance="spectral")
        return model, memory, memory.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))

    def train(parts: Any, seed: int) -> None:
        model, memory, optimizer = parts
        torch.manual_seed(seed)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        memory.update(torch.randn(5, 10))

    first = made()
    train(first, 7)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = made()
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for parts in (first, second):
        train(parts, 8)
    assert all(torch.equal(p, q) for p, q in zip(first[0].parameters(), second[0].parameters(), strict=True))
    assert all(
        torch.equal(p.basis, q.basis) and torch.equal(p.importance, q.importance)
        for p, q in zip(first[1].projectors.values(), second[1].projectors.values(), strict=True)
    )


def test_an_empty_memory_changes_no_bits() -> None:
    models = [small(), small()]
    memory = steppe.GradientProjectionMemory(models[1])
    optimizers = [torch.optim.AdamW(models[0].parameters()), memory.wrap(torch.optim.AdamW(models[1].parameters()))]
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(4)
        backward(model)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_closure_that_fails_leaves_the_weights_outside_the_memory() -> None:
    model = small()
    memory = with_memory(model)
    optimizer = memory.wrap(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5))
    before, calls = weights_of(model), []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        return backward(model)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert share_inside(memory, before) < 1e-5


@pytest.mark.parametrize("flat", [False, True])
def test_ctrl_c_within_a_step_waits_for_its_end(flat: bool) -> None:
    """No signal can leave a step half projected, nor the weights perturbed."""

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            signal.raise_signal(signal.SIGINT)
            return super().step(closure)

    model = small()
    memory = with_memory(model)
    optimizer: Optimizer = memory.wrap(Interrupted(model.parameters(), lr=0.01, weight_decay=1.0))
    if flat:
        optimizer = steppe.FlatSharpness(optimizer)
    before = weights_of(model)

    def closure() -> Tensor:
        model.zero_grad()
        return backward(model)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert share_inside(memory, before) < 1e-5


def test_ctrl_c_within_a_closure_is_handled_at_once() -> None:
    model = small()
    optimizer = with_memory(model).wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    reached = []

    def closure() -> Tensor:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        return backward(model)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert not reached
