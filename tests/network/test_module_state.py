"""Weights and buffers that are restored: all of them or none, wherever an exception strikes."""

from __future__ import annotations

import torch
from splitting import split_everywhere
from torch import nn

from steppe.network import module_state
from steppe.network.module_state import buffers_apart, preserve_buffers, restore_tensors, tensors_of


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_an_interrupted_restore_leaves_the_old_tensors_or_the_saved_ones() -> None:
    model = convolutional()
    old = copies(model)
    saved = {name: tensor + 1 for name, tensor in old.items()}
    seen = set()
    for _ in split_everywhere(lambda: restore_tensors(model, saved, ()), restore_tensors):
        now = copies(model)
        assert equal(now, old) or equal(now, saved)
        seen.add(equal(now, saved))
        with torch.no_grad():
            for name, tensor in tensors_of(model).items():
                tensor.copy_(old[name])
    assert seen == {False, True}
    assert equal(copies(model), saved)


def test_interrupted_forwards_leave_the_models_own_buffers() -> None:
    x = torch.randn(5, 1, 4, 4)
    for manager in (preserve_buffers, buffers_apart):
        model = convolutional().train()
        own, before = dict(model.named_buffers()), copies(model)

        def forward(model: nn.Module = model, manager=manager) -> None:  # type: ignore[no-untyped-def]
            with manager(model):
                model(x)

        instants = 0
        for _ in split_everywhere(forward, manager, module_state._set_buffers):
            instants += 1
            assert all(own[name] is buffer for name, buffer in model.named_buffers()), manager.__name__
            if manager is preserve_buffers:
                assert equal(copies(model), before)
        assert instants > 4
