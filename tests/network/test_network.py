"""The model as methods see it: gradients at perturbed weights, heads, and everything restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import head_loss, no_hooks
from torch import Tensor, nn

from steppe.errors import ModelError
from steppe.network.network import Network
from steppe.projection.layers import projected_weights
from steppe.registry import find_method
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).to(dtype)


def samples(n: int, classes: int = 6, task: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    return Batch(torch.randn(n, 5, dtype=dtype), torch.randint(classes, (n,)), torch.full((n,), task))


def opened(model: nn.Module, *heads: range | None) -> Network:
    network = Network(model)
    for head in heads or (None,):
        network.heads.add(head, 6)
    return network


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def test_gradient_at_perturbed_weights_equals_autograd() -> None:
    model, batch = small(), samples(4)
    network = opened(model)
    shift = {name: torch.randn_like(p) for name, p in network.trainable.items()}
    moved = small()
    moved.load_state_dict({name: p.detach() + shift[name] for name, p in network.trainable.items()})
    loss = nn.functional.cross_entropy(moved(batch.x), batch.y)
    expected = torch.autograd.grad(loss, list(moved.parameters()))
    found_loss, found = network.loss_and_grad(batch, network.scratch.perturbed(shift))
    torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-13, atol=0)
    for g, name in zip(expected, found, strict=True):
        torch.testing.assert_close(found[name], g, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fails", [False, True])
def test_weights_come_back_bit_for_bit(dtype: torch.dtype, fails: bool) -> None:
    """They are stored, not recomputed: w + v − v would differ. Also if the forward fails at w + v."""
    model = small(dtype)
    network = opened(model)
    before = bits(model)
    for scale in (1e-3, 1e6):
        shift = {name: scale * torch.randn_like(p) for name, p in network.trainable.items()}
        if fails:
            with pytest.raises(RuntimeError):
                network.loss_and_grad(
                    Batch(torch.zeros(2, 9, dtype=dtype), *[torch.zeros(2, dtype=torch.int64)] * 2),
                    network.scratch.perturbed(shift),
                )
        else:
            network.loss_and_grad(samples(3, dtype=dtype), network.scratch.perturbed(shift))
        assert bits(model) == before


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 1000))
def test_masked_heads_equal_cross_entropy_on_slices(tasks: list[int], seed: int) -> None:
    """Samples of several tasks in one batch, one of them without its own head; gradients too."""
    heads: list[range | None] = [range(0, 2), None, range(2, 6)]
    generator = torch.Generator().manual_seed(seed)
    rows = [heads[task] or range(6) for task in tasks]
    labels = [row.start + int(torch.randint(len(row), (1,), generator=generator)) for row in rows]
    x = torch.randn(len(tasks), 5, dtype=torch.float64, generator=generator)
    model = small()
    network = opened(model, *heads)
    expected = head_loss(model(x), labels, [heads[task] for task in tasks])
    loss, gradient = network.loss_and_grad(Batch(x, torch.tensor(labels), torch.tensor(tasks)))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-14)
    slopes = torch.autograd.grad(expected, list(model.parameters()))
    for g, name in zip(slopes, gradient, strict=True):
        torch.testing.assert_close(gradient[name], g, rtol=1e-10, atol=1e-13)
    again = network.functional_loss(Batch(x, torch.tensor(labels), torch.tensor(tasks)), dict(network.trainable))
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-14)


def test_unused_and_frozen_parameters() -> None:
    """Parameters that the loss does not depend on have a zero gradient; frozen ones are no parameters here."""
    model = nn.ModuleDict({"used": nn.Linear(5, 6), "idle": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    _, gradient = opened(model).loss_and_grad(samples(3, dtype=torch.float32))
    assert set(gradient) == {"used.weight", "used.bias", "idle.weight", "idle.bias"}
    assert not gradient["idle.weight"].any()  # type: ignore[union-attr]
    assert gradient["used.weight"].any()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "lazy layers"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)), "lazy layers"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (nn.ReLU(), "no trainable parameter"),
        (nn.Linear(2, 2).half(), r"expected float32 or float64 weights, got torch\.float16"),
        (nn.Linear(2, 2).bfloat16(), r"torch\.bfloat16"),
    ],
)
def test_models_that_cannot_learn_are_rejected(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Network(model)


@pytest.mark.parametrize(
    ("stored", "prepare", "expected", "kind"),
    [
        (torch.tensor([[0, 51, 255]], dtype=torch.uint8), None, [[0.0, 0.2, 1.0]], torch.float64),
        (torch.tensor([[0.5, 2.0, 300.0]]), None, [[0.5, 2.0, 300.0]], torch.float64),
        (torch.tensor([[1, 2, 300]]), None, [[1, 2, 300]], torch.int64),
        (torch.tensor([[1, 2, 3]], dtype=torch.uint8), lambda x: x.float() - 1, [[0.0, 1.0, 2.0]], torch.float64),
    ],
    ids=["bytes", "floats", "integers", "own"],
)
def test_inputs_are_prepared_for_the_model(
    stored: Tensor, prepare: Callable[[Tensor], Tensor] | None, expected: Any, kind: torch.dtype
) -> None:
    kept = stored.clone()
    found = Network(small(), prepare).prepare_inputs(stored)
    assert found.dtype == kind
    torch.testing.assert_close(found, torch.tensor(expected, dtype=kind), rtol=1e-7, atol=0)
    assert torch.equal(stored, kept)


def test_each_modules_mode_is_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[2][0].eval()
    network = Network(model)

    def modes() -> list[bool]:
        return [module.training for module in model.modules()]

    found = modes()
    for training in (True, False):
        with network.mode(training=training):
            assert modes() == [training] * len(found)
        assert modes() == found
        with pytest.raises(RuntimeError), network.mode(training=training):
            model(torch.zeros(2, 3))
        assert modes() == found


FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("finetune", "er", "fs-er", "fs-dgpm", "fs-gpm", "fs-sgpm", "fs-rgpm", "la-dgpm", "dgpm")),
    *((name, {"ascent_form": "chunked"}) for name in ("fs-dgpm", "dgpm", "la-dgpm")),
    *((name, {"second_order": True}) for name in ("fs-dgpm", "dgpm")),
    ("fs-dgpm", {"second_order": True, "ascent_form": "chunked", "ascent_steps": 3}),
]


@pytest.mark.parametrize(("name", "changes"), FORMS)
def test_exactly_one_forward_of_an_update_moves_running_statistics(name: str, changes: dict[str, Any]) -> None:
    """In the first task and in one with bases, the first layer's statistics are those of D ∪ N, counted once."""
    model = nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 6)
    ).double()
    network = Network(model)
    entry = find_method(name)
    settings: Any = entry.settings.from_mapping({**entry.values(""), **changes})
    method = settings.start(network, projected_weights(model) if settings.uses_projection else {}, Streams(0))
    mean, updates = torch.zeros(5, dtype=torch.float64), 0
    for task in range(2):
        network.heads.add(None, 6)
        method.begin_task()
        for _ in range(2):
            batch, old = samples(6, task=task), samples(6)
            if name != "finetune":
                method.replay.sample = lambda count, old=old: old
            method.observe(batch)
            union = batch.x if name == "finetune" else torch.cat((batch.x, old.x))
            mean, updates = 0.9 * mean + 0.1 * union.mean(0), updates + 1
            for norm in (model[0], model[2]):
                assert int(norm.num_batches_tracked) == updates
            torch.testing.assert_close(model[0].running_mean, mean, rtol=1e-12, atol=1e-14)
            method.after_batch(batch)
        method.end_task()
        assert int(model[2].num_batches_tracked) == updates
    assert no_hooks(model)
    assert all(p.grad is None for p in model.parameters())
