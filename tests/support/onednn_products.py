"""For tests of oneDNN: it computes all products, whatever their size and the processor, and they are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steppe.fast import matmul as products

NEEDS_ONEDNN = pytest.mark.skipif(
    products._onednn_product() is None or products._saving_hooks() is None or not torch.backends.mkldnn.is_available(),
    reason="this build of torch has no way to oneDNN",
)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def every_product_by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that it computed."""
    made: list[tuple[int, ...]] = []
    multiply = products._onednn_product()
    assert multiply is not None

    def counted(a: Tensor, b: Tensor, *rest: object) -> Tensor:
        assert b.is_contiguous() or b.t().is_contiguous()  # others are multiplied elementwise
        made.append((a.shape[0], a.shape[1], b.shape[0]))
        return multiply(a, b, *rest)

    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setattr(products, "_SIDES", 1)
    monkeypatch.setattr(products, "_WIDE", 0)
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: True)
    monkeypatch.setattr(products, "_onednn_product", lambda: counted)
    return made
