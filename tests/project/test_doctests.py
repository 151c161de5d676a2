"""The examples in the docstrings of `src/steppe` run, and the building blocks of methods are fully documented."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import steppe
from steppe.fast.switch import fast_paths
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.ring_buffer import TaskRingBuffer
from steppe.methods.parts.sgd import MomentumSGD
from steppe.methods.parts.sharpness import SharpnessAscent
from steppe.projection.importance import ImportanceRule, Ones, Sigmoid, Spectral
from steppe.projection.memory import GradientMemory
from steppe.projection.projector import SoftProjector
from steppe.registry import BENCHMARKS, METHODS

SOURCE = Path(steppe.__file__).parent
MODULES = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
BUILDING_BLOCKS = [
    steppe.GradientProjectionMemory,
    steppe.ProjectedOptimizer,
    steppe.FlatSharpness,
    steppe.ReservoirBuffer,
    steppe.Method,
    steppe.MethodConfig,
    Reservoir,
    TaskRingBuffer,
    MomentumSGD,
    SharpnessAscent,
    GradientMemory,
    SoftProjector,
    ImportanceRule,
    Ones,
    Sigmoid,
    Spectral,
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {**METHODS}, {**BENCHMARKS}
    if name.startswith("steppe.integrations."):
        try:
            importlib.import_module(name)
        except steppe.UsageError as error:
            pytest.skip(str(error))
    with fast_paths(True):  # some examples show warnings
        results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    for registered, known in zip((METHODS, BENCHMARKS), before, strict=True):
        for key in registered.keys() - known.keys():
            del registered[key]
    assert results.attempted > 0
    assert results.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("block", BUILDING_BLOCKS)
def test_building_blocks_document_every_argument(block: type) -> None:
    """Including importance rules, whose methods the protocol documents."""
    for name, method in vars(block).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        owner = ImportanceRule if block in (Ones, Sigmoid, Spectral) else block
        documented = inspect.getdoc(getattr(owner, name)) or ""
        for parameter in list(inspect.signature(method).parameters)[1:]:
            assert f"\n    {parameter}: " in documented, f"{block.__name__}.{name} does not document {parameter!r}"


@pytest.mark.parametrize("block", [block for block in BUILDING_BLOCKS if block is not ImportanceRule])
def test_building_blocks_have_an_example(block: type) -> None:
    assert ">>> " in (inspect.getdoc(block) or "")
