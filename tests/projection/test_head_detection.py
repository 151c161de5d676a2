"""Which layer computes a model's output: what may follow the head, and which models have no single head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from own_models import Table
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize, softmax

import steppe
from steppe.network.network import Network
from steppe.projection.coverage import find_covered_weights
from steppe.projection.head_detection import mixes_rows
from steppe.projection.hooks import find_head_weight
from steppe.projection.layers import coverable_weights

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


class Finished(nn.Module):
    """A body, a head, another layer of the same size, and a function of them."""

    def __init__(self, use: Callable[[Finished, Tensor], Tensor], size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.use, self.size = use, size
        self.body, self.head, self.skip = nn.Linear(6, 5), nn.Linear(5, size), nn.Linear(6, size)
        self.scale, self.rows = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1, size))
        self.matrix, self.norm, self.layer_norm = (
            nn.Parameter(torch.randn(size, size)),
            nn.BatchNorm1d(size),
            nn.LayerNorm(size),
        )
        self.register_buffer("fixed", torch.randn(size, size))
        self.conv = nn.Conv1d(5, size, 1)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def out(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def with_skip_in_place(m: Finished, x: Tensor) -> Tensor:
    y = m.out(x)
    y += m.skip(x)
    return y


def unused_last(m: Finished, x: Tensor) -> Tensor:
    y = 2 * m.out(x)
    m.skip(x)
    return y


ONE = {
    "nothing": lambda m, x: m.out(x),
    "a temperature": lambda m, x: m.out(x) / 3,
    "a learned temperature": lambda m, x: m.out(x) * m.scale.exp(),
    "learned scales and shifts": lambda m, x: m.out(x) * m.rows + m.norm.weight,
    "log_softmax": lambda m, x: log_softmax(m.out(x), 1),
    "softmax": lambda m, x: softmax(m.out(x), 1),
    "a mask": lambda m, x: m.out(x).masked_fill(torch.arange(m.size) == 1, -torch.inf),
    "a mask and log_softmax": lambda m, x: log_softmax(m.out(x).masked_fill(torch.arange(m.size) == 1, -torch.inf), 1),
    "a function of each": lambda m, x: 5 * torch.tanh(m.out(x)) + m.out(x),
    "in place": lambda m, x: m.out(x).mul_(3),
    "unit length": lambda m, x: 10 * normalize(m.out(x)),
    "statistics": lambda m, x: m.norm(m.out(x)),
    "another shape": lambda m, x: m.out(x)[:, None].reshape(len(x), m.size) * 2,
    "the mean of two looks": lambda m, x: (m.out(x) + m.out(-x)) / 2,
    "what is detached": lambda m, x: m.out(x) + m.skip(x).detach(),
    "nothing of the last": unused_last,
    "weights times zero": lambda m, x: 2 * m.out(x) + 0 * m.matrix.sum(),
    "the input": lambda m, x: m.out(x) + x[:, :1],
}
MANY_ROWS = {  # with four outputs these cannot be distinguished from a matrix
    "unit length and log_softmax": lambda m, x: log_softmax(10 * normalize(m.out(x)), 1),
    "a layer norm": lambda m, x: m.layer_norm(m.out(x)),
}
NONE = {
    "a skip run last": lambda m, x: m.out(x) + m.skip(x),
    "a skip run first": lambda m, x: m.skip(x) + m.out(x),
    "a skip in place": with_skip_in_place,
    "a gate": lambda m, x: m.out(x) * torch.sigmoid(m.skip(x)),
    "a dead skip": lambda m, x: m.out(x) + m.skip(0 * x),
    "a learned matrix": lambda m, x: m.out(x) @ m.matrix,
    "cosines": lambda m, x: 10 * normalize(m.out(x)) @ normalize(m.matrix).t(),
    "fixed directions": lambda m, x: m.out(x) @ m.fixed,
    "fixed directions, of unit length": lambda m, x: normalize(m.out(x)) @ m.fixed,
    "distances to learned points": lambda m, x: -(m.out(x)[:, None] - m.matrix).square().sum(2),
    "rows of two": lambda m, x: torch.cat((m.out(x)[:, :2], m.skip(x)[:, 2:]), 1),
}


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in [*ONE, *MANY_ROWS] for size in (4, 7, 30) if name in ONE or size > 4]
)
def test_what_may_follow_the_head(name: str, size: int) -> None:
    model = Finished({**ONE, **MANY_ROWS}[name], size).eval()
    assert find_head_weight(model, coverable_weights(model), X) == "head.weight"
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("size", [4, 7, 30])
@pytest.mark.parametrize("name", NONE)
def test_outputs_without_a_single_head(name: str, size: int) -> None:
    model = Finished(NONE[name], size).eval()
    assert find_head_weight(model, coverable_weights(model), X) is None
    with pytest.raises(steppe.ModelError, match=r"no single layer computes the model's output: .*exclude=\("):
        find_covered_weights(Network(model), X, (), multi_head=True)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["cosines", "a learned matrix", "distances to learned points"])
def test_trainable_matrix_is_the_head_even_with_few_outputs(name: str) -> None:
    model = Finished(NONE[name], 2).eval()
    assert find_head_weight(model, coverable_weights(model), X) is None


def test_a_convolution_may_be_the_head() -> None:
    model = Finished(lambda m, x: m.conv(m.features(x)[:, :, None]).flatten(1))
    assert find_head_weight(model, coverable_weights(model), X) == "conv.weight"


def test_a_frozen_skip_does_not_hide_the_head() -> None:
    model = Finished(NONE["a skip run last"])
    model.skip.requires_grad_(False)
    assert find_head_weight(model, coverable_weights(model), X) == "head.weight"


@pytest.mark.filterwarnings("ignore:these weights belong")
def test_head_that_is_not_a_layer_can_be_named() -> None:
    """In a cosine classifier, the layer that computes the features must be protected."""
    model, y = Finished(NONE["cosines"]), torch.arange(2)
    for exclude, covered in ((("matrix",), {"body", "head"}), (("head",), {"body"})):
        learner = steppe.Learner(model, steppe.GPM(), exclude=exclude)
        result = learner.learn(steppe.Task((X, y), head=range(2)))
        assert set(result.diagnostics["ranks"]) == {f"{name}.weight" for name in covered}
    model = Finished(NONE["a skip run last"])
    result = steppe.Learner(model, steppe.GPM(), exclude=("head", "skip")).learn(steppe.Task((X, y), head=range(2)))
    assert set(result.diagnostics["ranks"]) == {"body.weight"}


def test_hidden_layer_calls_are_an_error() -> None:
    """As in a compiled model, which bypasses all hooks."""
    model = Finished(lambda m, x: m.head.forward(torch.tanh(m.body.forward(x))))
    with pytest.raises(
        steppe.ModelError, match=r"the model hides the calls of its layers.*before torch.compile \(model._orig"
    ):
        find_covered_weights(Network(model), X, (), multi_head=True)


def test_nothing_to_cover_is_an_error_with_heads_too() -> None:
    with (
        pytest.warns(UserWarning, match="cannot cover"),
        pytest.raises(steppe.ModelError, match="no layer that a gradient memory can cover"),
    ):
        steppe.Learner(Table(6), steppe.GPM()).learn(steppe.Task((X, torch.arange(2)), head=range(2)))


@pytest.mark.parametrize("size", [5, 6, 12])
def test_mixing_by_the_jacobian_alone(size: int) -> None:
    """Against hand-made Jacobians: a diagonal, a common scale, a common shift, and a matrix."""
    draw = torch.Generator().manual_seed(size)
    diagonal, u, v, w = (torch.randn(size, dtype=torch.float64, generator=draw) for _ in range(4))
    matrix = torch.randn(size, size, dtype=torch.float64, generator=draw)
    rows = list(range(size))
    for kept in (diagonal.diag(), diagonal.diag() + torch.outer(u, v), diagonal.diag() + torch.outer(u, v) + w):
        assert not mixes_rows(kept, rows)
        assert not mixes_rows(kept[::2], rows[::2])
        assert mixes_rows(kept + 0.1 * matrix, rows)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_small_mixing_is_distinguished_from_rounding(scale: float) -> None:
    """Rounding in float32 may make off-diagonal entries some millionths of the diagonal."""
    generator = torch.Generator().manual_seed(2)
    rows = list(range(8))
    beside = torch.randn(8, 8, dtype=torch.float64, generator=generator).fill_diagonal_(0)
    alone = torch.diag(1 + torch.rand(8, dtype=torch.float64, generator=generator))
    for share, mixed in ((1e-2, True), (1e-3, True), (1e-4, True), (1e-6, False), (0.0, False)):
        assert mixes_rows(scale * (alone + share * beside), rows) is mixed
