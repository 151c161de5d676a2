"""Transforms against slow references: normalization channel by channel, crops and mirror images one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steppe.data.transforms import CropAndFlip, Normalize


def test_normalization_channel_by_channel() -> None:
    x = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8)
    kept = x.clone()
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 1.5)
    found = Normalize(mean, std)(x)
    expected = torch.stack([(x[:, c].double() / 255 - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, kept)


def test_normalization_of_flat_images() -> None:
    x = torch.randint(256, (4, 784), dtype=torch.uint8)
    torch.testing.assert_close(Normalize((0.1307,), (0.3081,))(x), (x.float() / 255 - 0.1307) / 0.3081)


def variants(image: Tensor, padding: int) -> list[Tensor]:
    """Every crop of a padded image, and its mirror image."""
    channels, height, width = image.shape
    framed = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    framed[:, padding : padding + height, padding : padding + width] = image
    found = []
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = framed[:, top : top + height, left : left + width]
            found += [crop, crop.flip(2)]
    return found


def test_exactly_the_possible_variants_occur() -> None:
    torch.manual_seed(0)
    image = torch.randint(1, 256, (3, 5, 4), dtype=torch.uint8)
    allowed = variants(image, 1)
    found = CropAndFlip(1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(1))
    counts = [int((found == variant).flatten(1).all(1).sum()) for variant in allowed]
    assert found.dtype == torch.uint8
    assert sum(counts) == 2000
    assert min(counts) > 2000 / len(allowed) / 2  # 111 expected of each, deviation 10


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 1000))
def test_variants_depend_only_on_the_generator(n: int, padding: int, seed: int) -> None:
    images = torch.randint(256, (n, 3, 6, 6), dtype=torch.uint8)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = CropAndFlip(padding)(images, torch.Generator().manual_seed(seed))
    other = CropAndFlip(padding)(images, torch.Generator().manual_seed(seed))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
