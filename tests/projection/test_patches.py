"""R Rᵀ of patches that are never extracted, against the patches themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steppe.projection.basis import Representation
from steppe.projection.layers import convolution_patches, projected_weights
from steppe.projection.patches import patch_product

pytestmark = pytest.mark.usefixtures("fast_paths_on")

F64: dict[str, Any] = {"dtype": torch.float64}
LAYERS: dict[str, nn.Conv2d] = {
    "square": nn.Conv2d(3, 4, 3, **F64),
    "padded": nn.Conv2d(3, 4, 5, padding=2, **F64),
    "oblong, step sideways": nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=(0, 1), **F64),
    "one row": nn.Conv2d(3, 4, (1, 3), **F64),
    "gaps sideways": nn.Conv2d(3, 4, (3, 2), dilation=(1, 2), **F64),
    "groups": nn.Conv2d(4, 6, 3, groups=2, padding=1, **F64),
    "circular": nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular", **F64),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_product_equals_that_of_the_patches(name: str, layout: torch.memory_format) -> None:
    layer = LAYERS[name]
    x = torch.randn(2, layer.in_channels, 7, 6, **F64).to(memory_format=layout)
    columns = convolution_patches(layer, x)
    found = patch_product(layer, x)
    assert found is not None
    torch.testing.assert_close(found[0], columns.mT @ columns, rtol=1e-12, atol=1e-12)
    assert found[1] == columns.shape[1]


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(1, 1, 3, stride=2), nn.Conv2d(1, 1, 2, dilation=2), nn.Conv2d(1, 1, 4), nn.Conv1d(1, 1, 2)],
    ids=["step down", "gaps down", "image hardly larger than the kernel", "one dimension"],
)
def test_not_used_if_strips_share_nothing(layer: nn.Module) -> None:
    shape = (1, 1, 6) if isinstance(layer, nn.Conv1d) else (1, 1, 6, 6)
    assert patch_product(layer, torch.randn(shape)) is None


@pytest.mark.parametrize("threshold", [0.9, 1.0], ids=["coarse", "precise"])
@pytest.mark.parametrize("sizes", [(4,), (1, 3), (3, 1)], ids=str)
def test_adding_calls_equals_adding_columns(sizes: tuple[int, ...], threshold: float) -> None:
    """One sample has 12 patches of size 18, so it is stored as columns; three are enough for the Gram matrix."""
    layer = nn.Conv2d(2, 3, 3, **F64)
    (weight,) = projected_weights(nn.Sequential(layer)).values()
    x = torch.randn(sum(sizes), 2, 6, 5, **F64)
    by_calls, by_columns = Representation(threshold), Representation(threshold)
    for part in torch.split(x, list(sizes)):
        by_calls.add_call(weight, layer, part)
    by_columns.add(weight.rule(layer, x))
    found, expected = by_calls.spectrum(), by_columns.spectrum()
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-9)
    along = by_calls.strengths_along(expected.vectors)
    torch.testing.assert_close(along, expected.values, rtol=1e-6, atol=1e-6)
