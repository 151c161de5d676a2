"""A plugin for `bench/load.py`: plain SGD, some of whose runs fail, each in a way of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import steppe
from steppe.methods.finetune import Finetune
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.runtime.rng import Streams


@dataclass(frozen=True)
class Fragile(Finetune):
    """Settings of the fragile method: those of Finetune."""

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> steppe.Method:
        """Every tenth seed dies, raises or diverges, in turn."""
        method = super().start(network, covered, streams)
        if streams.seed % 10 == 0:
            method.observe = _FAILURES[streams.seed // 10 % len(_FAILURES)]  # type: ignore[method-assign]
        return method


def _dies(batch: steppe.Batch) -> Tensor:
    os._exit(9)


def _raises(batch: steppe.Batch) -> Tensor:
    raise RuntimeError("injected")


def _diverges(batch: steppe.Batch) -> Tensor:
    return torch.tensor(float("nan"))


_FAILURES = (_dies, _raises, _diverges)
steppe.register_method("fragile", Fragile, "Finetune that fails for every tenth seed.")
