"""The Hessian: products and top eigenvalue against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_models import OWN, bright
from reference_landscape import Bowl, bowl, standing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steppe.landscape import hessian
from steppe.landscape import profile as profiles
from steppe.landscape.directions import gaussian_noise
from steppe.landscape.hessian import hessian_product, top_eigenvalue
from steppe.network.network import Network
from steppe.tensors.batch import Batch


def dense(network: Network, batch: Batch, head: range | None) -> Tensor:
    """The whole Hessian, of a separately written loss."""
    names, shapes = list(network.trainable), [p.shape for p in network.trainable.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        weights = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        output = torch.func.functional_call(network.model, weights, (batch.x,))
        if head is None:
            return cross_entropy(output, batch.y)
        return cross_entropy(output[:, head.start : head.stop], batch.y - head.start)

    flat = torch.cat([p.detach().reshape(-1) for p in network.trainable.values()])
    return torch.autograd.functional.hessian(loss, flat, vectorize=True)


@pytest.mark.parametrize("head", [None, range(1, 4)])
@pytest.mark.parametrize("name", ["mlp", "sequence", "convolutional", "transformer"])
def test_eigenvalue_equals_the_dense_hessians(name: str, head: range | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "CHUNK", 8)
    own = OWN[name]
    x, y = own.data(20, 0)
    network, batch = standing(own.build().double(), x.double(), y if head is None else y % 3 + 1, head)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        matrix = dense(network, batch, head)
    v = gaussian_noise(network.trainable, 0, 0)
    found = hessian_product(network, batch, v)
    flat = torch.cat([each.reshape(-1) for each in v.values()])
    torch.testing.assert_close(torch.cat([each.reshape(-1) for each in found.values()]), matrix @ flat)
    assert top_eigenvalue(network, batch) == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-3)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_hessian_of_a_parabola(seed: int) -> None:
    model, matrix = bowl(torch.Generator().manual_seed(seed))
    network, batch = standing(model, torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert top_eigenvalue(network, batch, seed) == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-3)


@pytest.mark.parametrize("values", [[3.0], [3.0, -7.0], [-2.0, -5.0, -1.0]])
def test_few_weights_and_negative_curvature(values: list[float]) -> None:
    """The largest eigenvalue, not the largest in absolute value."""
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64))
    model = Bowl(matrix, torch.full((1, len(values)), 0.1, dtype=torch.float64))
    network, batch = standing(model, torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert top_eigenvalue(network, batch) == pytest.approx(max(values), rel=1e-3)


def test_a_flat_loss() -> None:
    network, batch = standing(nn.Linear(3, 1), torch.randn(6, 3), torch.zeros(6, dtype=torch.int64))
    assert top_eigenvalue(network, batch) == 0


def test_model_is_not_changed() -> None:
    x, y = OWN["convolutional"].data(20, 0)
    network, batch = standing(OWN["convolutional"].build(), x, y)
    before = {key: tensor.clone() for key, tensor in network.model.state_dict().items()}
    one = top_eigenvalue(network, batch)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.model.state_dict().items())
    assert all(p.grad is None for p in network.model.parameters())
    assert top_eigenvalue(network, batch) == one


def test_an_iteration_that_does_not_converge_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "_RESTARTS", 1)
    monkeypatch.setattr(hessian, "_VECTORS", 2)
    monkeypatch.setattr(hessian, "_TOLERANCE", 1e-14)
    network, batch = standing(OWN["mlp"].build().double(), *(lambda x, y: (x.double(), y))(*bright(8)(20, 0)))
    assert top_eigenvalue(network, batch) is None
