"""Layer rules against a plain loop over windows and against the layers' own arithmetic; and the covered weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_cases import F64, LAYERS
from reference import windows
from torch import Tensor, nn

from steppe.errors import ModelError
from steppe.projection.layers import RULES, projected_weights, register_rule


def columns_of(layer: nn.Module, x: Tensor) -> Tensor:
    (weight,) = projected_weights(nn.Sequential(layer)).values()
    return weight.rule(layer, x)


def add_batch(layer: Any, x: Tensor) -> Tensor:
    """A convolution's input or output, with a batch dimension if it was a single sample."""
    return x if x.ndim == len(layer.kernel_size) + 2 else x[None]


def spread(layer: Any, output: Tensor) -> Tensor:
    """A layer's output (or its gradient) as (groups, out / groups, n), in the order of the columns."""
    if isinstance(layer, nn.Linear):
        return output.reshape(1, -1, output.shape[-1]).mT
    output = add_batch(layer, output)
    by_channel = output.transpose(0, 1).reshape(output.shape[1], -1)
    return by_channel.reshape(layer.groups, -1, by_channel.shape[-1])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", LAYERS)
def test_columns_equal_windows_found_by_a_loop(case: str) -> None:
    layer, shape = LAYERS[case]
    x = torch.randn(*shape, **F64)
    if isinstance(layer, nn.Linear):
        vectors = x if x.ndim == 2 else [row for sequence in x for row in sequence]
        expected = torch.stack(list(vectors))[None]
    else:
        expected = windows(layer, add_batch(layer, x))
    assert torch.equal(columns_of(layer, x), expected)


@pytest.mark.parametrize("case", LAYERS)
def test_weight_times_columns_is_the_layers_output(case: str) -> None:
    """The weight's gradient is δ times the columns, so each of its rows lies in their span."""
    layer, shape = LAYERS[case]
    x = torch.randn(*shape, **F64)
    columns = columns_of(layer, x)
    weight: Any = layer.weight
    rows = weight.reshape(len(columns), -1, columns.shape[-1])
    output = layer(x)
    bias: Any = layer.bias
    plain = spread(layer, output) - (0 if bias is None else bias.reshape(len(columns), -1, 1))
    torch.testing.assert_close(rows @ columns.mT, plain, rtol=1e-11, atol=1e-12)
    slopes = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, weight, slopes)
    torch.testing.assert_close(gradient.reshape(rows.shape), spread(layer, slopes) @ columns, rtol=1e-11, atol=1e-12)


class Tied(nn.Module):
    """Two linear layers that share a weight, and layers that a memory cannot cover."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 4)
        self.block = nn.ModuleDict({"conv": nn.Conv1d(1, 2, 3), "norm": nn.BatchNorm1d(2), "inner": nn.Linear(4, 4)})
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 7)


ALL = {"table.weight", "first.weight", "block.conv.weight", "block.inner.weight", "head.weight"}


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [
        ((), set()),
        (("head",), {"head.weight"}),
        (("head.weight",), {"head.weight"}),
        (("block",), {"block.conv.weight", "block.inner.weight"}),
        (("block.inner", "head"), {"block.inner.weight", "head.weight"}),
        (("first", "second"), {"first.weight"}),
        (("blo",), set()),
    ],
)
def test_covered_weights_and_exclusions(exclude: tuple[str, ...], left_out: set[str]) -> None:
    """Layers, weights and whole blocks can be named; a prefix of a name does not count."""
    assert set(projected_weights(Tied(), exclude)) == ALL - left_out


def test_a_shared_weight_is_covered_once_with_all_its_layers() -> None:
    model = Tied()
    assert projected_weights(model)["first.weight"].layers == (model.first, model.second)


def test_frozen_weights_are_not_covered() -> None:
    model = Tied()
    model.head.weight.requires_grad_(False)
    assert set(projected_weights(model)) == ALL - {"head.weight"}


def test_weights_within_attention_belong_to_it() -> None:
    """Its output projection is a layer of its own that is never called."""
    model = nn.TransformerEncoderLayer(4, 2, 8)
    weights = projected_weights(model)
    assert set(weights) == {f"{name}.weight" for name in ("linear1", "linear2", "self_attn.out_proj")} | {
        "self_attn.in_proj_weight"
    }
    assert weights["self_attn.out_proj.weight"].layers == (model.self_attn,)
    assert weights["self_attn.out_proj.weight"].parameter is model.self_attn.out_proj.weight
    for entry in ("self_attn.out_proj", "self_attn.out_proj.weight"):
        assert set(projected_weights(model, (entry,))) == set(weights) - {"self_attn.out_proj.weight"}


def test_the_rule_of_the_nearest_type_counts() -> None:
    class Own(nn.Linear):
        pass

    def rule(layer: nn.Module, x: Tensor) -> Tensor:
        return x[None]

    try:
        register_rule(Own)(rule)
        (weight,) = projected_weights(nn.Sequential(Own(3, 2))).values()
        assert weight.rule is rule
    finally:
        del RULES[Own]


@pytest.mark.parametrize("exclude", [(), ("head",)])
def test_weight_shared_with_an_embedding_is_rejected_unless_excluded(exclude: tuple[str, ...]) -> None:
    model = Tied()
    model.head.weight = model.table.weight
    if exclude:
        assert set(projected_weights(model, exclude)) == ALL - {"head.weight", "table.weight"}
        return
    with pytest.raises(ModelError, match=r"'table\.weight' is shared.*exclude=\('table\.weight',\)"):
        projected_weights(model, exclude)


def test_new_layer_type_needs_one_registered_function() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

    class Subclass(Scale):
        pass

    model = nn.Sequential(Scale(), Subclass())
    assert projected_weights(model) == {}
    try:
        rule = register_rule(Scale)(lambda layer, x: x[None])
        found = projected_weights(model)
        assert set(found) == {"0.weight", "1.weight"}
        assert all(weight.rule is rule for weight in found.values())
    finally:
        del RULES[Scale]
