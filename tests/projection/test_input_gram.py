"""The Gram matrix of the first layer's inputs: every training sample once, packed, at low rank, saved at any moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe import FSDGPM, Learner, ModelError, Task
from steppe.checkpoint.tree import clone_tree
from steppe.network.network import Network
from steppe.projection.input_gram import InputGram
from steppe.projection.layers import convolution_patches, projected_weights
from steppe.tensors.batch import Batch

MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), (7,), "0.weight"),
    "convolution in groups": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.Flatten(), nn.Linear(150, 3)),
        (4, 5, 5),
        "0.weight",
    ),
}


def made(name: str, rank: int = 0) -> tuple[Network, InputGram, str, tuple[int, ...]]:
    build, shape, weight = MODELS[name]
    torch.manual_seed(1)
    network = Network(build().double())
    return network, InputGram(network, projected_weights(network.model), rank), weight, shape


def batched(x: Tensor) -> Batch:
    return Batch.of_task(x, torch.zeros(len(x), dtype=torch.int64), 0)


def obvious(network: Network, name: str, x: Tensor) -> Tensor:
    """Σ x xᵀ, vector by vector."""
    columns = x[None] if name == "linear" else convolution_patches(network.model[0], x)  # type: ignore[index]
    return torch.stack([sum(torch.outer(v, v) for v in group) for group in columns])  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
def test_every_sample_counts_once(name: str) -> None:
    network, gram, weight, shape = made(name)
    x = torch.randn(230, *shape, dtype=torch.float64)
    for start in range(0, 230, 7):
        gram.add(batched(x[start : start + 7]))
        if start == 140:
            gram.pack()  # a task ends
    found = gram.grams()
    assert list(found) == [weight]
    torch.testing.assert_close(found[weight], obvious(network, name, x))
    gram.pack()
    size = found[weight].shape[1]
    assert gram.memory_bytes() == len(found[weight]) * size * (size + 1) // 2 * 8
    torch.testing.assert_close(gram.grams()[weight], found[weight], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_at_low_rank_the_strongest_directions_stay(name: str) -> None:
    network, gram, weight, shape = made(name, rank=3)
    x = torch.randn(60, *shape, dtype=torch.float64)
    gram.add(batched(x))
    gram.pack()
    energy, vectors = torch.linalg.eigh(obvious(network, name, x))
    strongest = vectors[..., -3:] @ torch.diag_embed(energy[..., -3:]) @ vectors[..., -3:].mT
    torch.testing.assert_close(gram.grams()[weight], strongest)
    assert gram.memory_bytes() == strongest.shape[0] * strongest.shape[1] * 3 * 8


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("moments", [(0,), (3,), (14, 15), (20, 29)])
def test_saved_at_any_moment_it_goes_on_to_the_same_bits(rank: int, moments: tuple[int, ...]) -> None:
    x = torch.randn(30, 10, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept: list[Any] = []
    for saved in ((), moments):
        _, gram, _, _ = made("linear", rank)
        for place, batch in enumerate(x):
            gram.add(batched(batch))
            if place in (9, 19):
                gram.pack()
            if place in saved:
                state = clone_tree(gram.state_dict(), "cpu")
                _, gram, _, _ = made("linear", rank)
                gram.load_state_dict(state)
        gram.pack()
        kept.append(gram.state_dict()["kept"])
    assert torch.equal(*kept)


def test_a_model_without_a_first_layer_is_refused() -> None:
    """Its inputs pass through weights that learn, so yesterday's products are not today's."""
    model = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 3))
    learner = Learner(model, FSDGPM(importance="ridge", first_inputs="all", buffer=20))
    with pytest.raises(ModelError, match="expected one covered layer whose inputs are the data, got 0"):
        learner.learn(Task((torch.randn(20, 7), torch.arange(20) % 3)))


def test_a_state_of_another_model_is_refused() -> None:
    _, gram, _, _ = made("linear")
    with pytest.raises(ValueError, match="not covered"):
        gram.load_state_dict({"weight": "other", "kept": None, "whole": None, "pending": None})
