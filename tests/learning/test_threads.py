"""Learners, a copy that predicts, and a plain model, each in its own thread."""

from __future__ import annotations

import pytest
import torch
from threads_torture import run_threads
from torch import nn


@pytest.mark.filterwarnings("ignore:these weights belong")
def test_threads_do_not_disturb_each_other() -> None:
    call, threads = nn.Module.__call__, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = run_threads(200)
    finally:
        torch.set_num_threads(threads)
    assert figures["learn calls"] >= 20
    assert figures["predict calls"] > 0
    assert figures["plain calls"] > 0
    assert {key: figures[key] for key in figures if "calls" not in key} == {"errors": 0, "different": 0}
    assert nn.Module.__call__ is call
