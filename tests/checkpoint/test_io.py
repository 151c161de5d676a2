"""State files: round trips, and any fault of a file is one error that names it."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import bright, mlp
from torch import Tensor, nn

import steppe
from steppe.checkpoint.io import parse_state, read_state, write_state
from steppe.checkpoint.tree import flatten_tree, unflatten_tree
from steppe.errors import ModelError, RunError, SteppeError, UsageError
from steppe.tensors.batch import Batch
from steppe.tensors.ragged import Ragged

KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
X, Y = bright(8)(24, 0)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = (4 * torch.randn(shape, generator=generator)).to(draw(st.sampled_from(KINDS)))
    return made.mT if made.ndim > 1 and draw(st.booleans()) else made


def batches() -> st.SearchStrategy[Batch]:
    return st.builds(Batch, tensors(), tensors(), tensors())


@st.composite
def ragged(draw: st.DrawFn, count: int | None = None) -> Ragged:
    lengths = draw(st.lists(st.integers(0, 3), min_size=count or 1, max_size=count or 4))
    return Ragged(torch.arange(2 * length).reshape(length, 2) for length in lengths)


@st.composite
def nest_batches(draw: st.DrawFn) -> Batch:
    count = draw(st.integers(1, 3))
    leaf = st.one_of(ragged(count), st.just(torch.arange(3 * count).reshape(count, 3)), st.just(torch.ones(count)))
    keys = st.text() | st.integers()
    nest = st.recursive(
        leaf,
        lambda inner: st.dictionaries(keys, inner, min_size=1) | st.lists(inner, min_size=1, max_size=2).map(tuple),
        max_leaves=4,
    )
    return Batch(draw(nest), draw(ragged(count) | st.just(torch.arange(count))), torch.zeros(count))


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors() | batches() | nest_batches()
    | ragged()
    | st.builds(lambda start, length: range(start, start + length), st.integers(), st.integers(0, 1000))
)  # fmt: skip
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, with NaN equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, Ragged):
        return same(one.rows, other.rows)
    if isinstance(one, Batch):
        return all(same(getattr(one, part), getattr(other, part)) for part in ("x", "y", "task"))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@given(trees)
def test_any_tree_round_trips(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    content, beside = flatten_tree(tree)
    assert same(unflatten_tree(json.loads(json.dumps(content)), beside), tree)
    path = tmp_path_factory.mktemp("state") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # the disk is not tested here
        write_state(path, "learner", tree)
    assert same(read_state(path, "learner"), tree)


def small_file(path: Path) -> bytes:
    write_state(path, "run", {"weights": {"a/b": torch.arange(3.0)}, "age": 7, "x": [None, 0.5, "é", range(2)]})
    return path.read_bytes()


def test_every_flipped_bit_and_every_truncation_is_rejected(tmp_path: Path) -> None:
    raw = small_file(tmp_path / "file")
    for place in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(RunError):
            parse_state(bytes(changed), "run", "file")
    for length in range(len(raw)):
        with pytest.raises(RunError):
            parse_state(raw[:length], "run", "file")


def header_with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    """Change the header of a file, and correct the hash where possible."""

    def work(path: Path) -> None:
        header, numbers = hostile.opened(path.read_bytes())
        change(header)
        path.write_bytes(hostile.rehashed(hostile.closed(header, numbers)))

    return work


def torch_file(content: object) -> bytes:
    written = io.BytesIO()
    torch.save(content, written)
    return written.getvalue()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "truncated"),
    "missing": (lambda p: p.unlink(), "cannot read .*No such file"),
    "a directory": (lambda p: (p.unlink(), p.mkdir()), "it is a directory, not a file"),
    "zeros": (lambda p: p.write_bytes(bytes(999)), "cannot be read"),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "cannot be read"),
    "torch's own format": (lambda p: p.write_bytes(torch_file({"a": 1})), "cannot be read"),
    "a header beyond the file": (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), "truncated"),
    "a header of lists without end": (
        lambda p: p.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        "nested more than 300 levels",
    ),
    "weights of another program": (header_with(lambda h: h.pop("__metadata__")), "not written by steppe"),
    "metadata that is a list": (header_with(lambda h: h.update(__metadata__=[])), "cannot be read"),
    "another kind": (lambda p: hostile.with_header(p, kind="learner"), "it contains a learner, not a run"),
    "a later version": (lambda p: hostile.with_header(p, version="2"), "version '2'.*reads version 1"),
    "no version": (lambda p: hostile.with_header(p, version=""), "version ''"),
    "another hash": (header_with(lambda h: h["__metadata__"].update(age=1)), "cannot be read"),
    "no content": (header_with(lambda h: h["__metadata__"].pop("content")), "cannot be read"),
    "content that is no JSON": (lambda p: hostile.with_header(p, content="{"), "cannot be read"),
    "content without end": (
        lambda p: hostile.with_header(p, content="[" * 100_000 + "]" * 100_000),
        "nested more than 300 levels",
    ),
    "a number without end": (lambda p: hostile.with_header(p, content="9" * 100_000), "Exceeds the limit"),
    "a tensor that is not there": (
        lambda p: hostile.with_header(p, content='{"tensor": "b"}'),
        "tensor 'b' is missing",
    ),
    "a tensor a thousand times": (
        lambda p: hostile.with_header(p, content=json.dumps([{"tensor": "weights/a/b"}] * 1000)),
        "used twice",
    ),
    "a node of no kind": (lambda p: hostile.with_header(p, content='{"object": "os.system"}'), "no state contains"),
    "a range of words": (lambda p: hostile.with_header(p, content='{"range": ["a", "b"]}'), "no state contains"),
    "a range without end": (lambda p: hostile.with_header(p, content='{"range": [0, 1000000000000]}'), "cannot be"),
    "a key that is a list": (lambda p: hostile.with_header(p, content='{"items": [[[], 1]]}'), "no state contains"),
    "10^15 elements": (header_with(lambda h: h["weights/a/b"].update(shape=[10**15])), "cannot be read"),
    "10^15 elements said to be there": (
        header_with(lambda h: h["weights/a/b"].update(shape=[10**15], data_offsets=[0, 4 * 10**15])),
        "cannot be read",
    ),
    "a negative shape": (header_with(lambda h: h["weights/a/b"].update(shape=[-3])), "cannot be read"),
    "a type that is none": (header_with(lambda h: h["weights/a/b"].update(dtype="F99")), "cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_invalid_files_are_rejected(case: str, tmp_path: Path) -> None:
    damage, says = DAMAGES[case]
    path = tmp_path / "state.safetensors"
    small_file(path)
    damage(path)
    with pytest.raises(RunError, match=says) as refused:
        read_state(path, "run")
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_empty_tensor_of_an_enormous_shape_is_rejected(tmp_path: Path) -> None:
    """Code that allocates a tensor like it would run out of memory."""
    write_state(tmp_path / "file", "run", torch.zeros(0, 10**9))
    with pytest.raises(RunError, match="enormous"):
        read_state(tmp_path / "file", "run")


class Unknown(steppe.Finetune):
    """An unregistered method."""


def saved(method: steppe.MethodConfig, path: Path) -> None:
    learner = steppe.Learner(mlp(), method)
    learner.learn(steppe.Task((X, Y)))
    learner.save(path)


def within(*way: str, **changes: Any) -> Callable[[Any], None]:
    """Change a part of a state."""

    def work(state: Any) -> None:
        for step in way:
            state = state[step]
        state.update(changes)

    return work


def nothing(state: Any) -> None:
    """No change."""


LOADING: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], type[SteppeError], str]] = {
    "no model": (nothing, lambda: "mlp", UsageError, "got str"),
    "a model of other layers": (nothing, lambda: nn.Linear(8, 4), ModelError, "pass the model that was saved"),
    "a model of other sizes": (nothing, lambda: mlp(8, 5), ModelError, "pass the same model"),
    "a model of other numbers": (nothing, lambda: mlp().double(), ModelError, "pass the same model"),
    "unknown method": (within("settings", kind="Magic"), mlp, UsageError, "unknown method Magic"),
    "unknown setting": (within("settings", "values", rate=1), mlp, UsageError, "rate"),
    "setting out of range": (within("settings", "values", lr=-1.0), mlp, UsageError, "lr = -1"),
    "settings that are a list": (within(settings=[]), mlp, RunError, "resumable learner"),
    "a list": (lambda state: [state], mlp, RunError, "resumable learner"),
    "an empty state": (lambda state: {"age": 1}, mlp, RunError, "'settings'"),
    "a seed that is a word": (within(seed="one"), mlp, UsageError, "seed = 'one'"),
    "an excluded layer": (within(exclude=["9"]), mlp, UsageError, "exclude names '9'"),
    "weights of another shape": (
        within("network", "weights", **{"0.weight": torch.zeros(2, 2)}),
        mlp,
        ModelError,
        "'0.weight' is",
    ),
    "a buffer that is a number": (
        lambda state: (state["network"].update(self_made=["x"]), state["network"]["weights"].update(x=5))[0],
        mlp,
        RunError,
        "the buffer 'x' is not a tensor",
    ),
    "self-made buffers that are numbers": (within("network", self_made=[5]), mlp, RunError, "names of layers"),
    "weights that are numbers": (within("network", "weights", **{"0.weight": 5}), mlp, RunError, "resumable learner"),
    "a covered layer that is none": (within(covered={"9.weight": True}), mlp, RunError, "'9.weight'"),
    "inputs of no kind": (within(inputs=[[8], "float99"]), mlp, RunError, "float99"),
    "inputs that are code": (within(inputs=[[8], "load"]), mlp, RunError, "unknown dtype"),
    "a method's part": (within("method", network=None), mlp, RunError, "expected the state keys"),
    "a buffer that lies": (within("method", "replay", age=5), mlp, RunError, "cannot hold"),
    "a buffer of numbers": (within("method", "replay", stored=[1, 2]), mlp, RunError, "resumable learner"),
    "heads without end": (
        lambda state: (state.update(outputs=10**6), state["network"].update(heads=[range(2)] * 101))[0],
        mlp,
        RunError,
        "invalid number of outputs, 1000000, for 101 heads",
    ),
    "outputs beyond all": (within(outputs=10**15), mlp, RunError, "invalid number of outputs"),
    "a generator of another kind": (within("streams", pickers={"replay draws": Y}), mlp, RunError, "resumable learner"),
}


@pytest.mark.parametrize("case", LOADING)
def test_invalid_learner_files_are_rejected(case: str, tmp_path: Path) -> None:
    """The model passed in does not change."""
    change, build, kind, says = LOADING[case]
    path = tmp_path / "learner.safetensors"
    saved(steppe.FSDGPM(buffer=30), path)
    hostile.forged(path, "learner", change)
    model = build()
    before = {} if isinstance(model, str) else {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind, match=says):
        steppe.load(path, model)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_unregistered_method_is_named(tmp_path: Path) -> None:
    saved(Unknown(), tmp_path / "file")
    with pytest.raises(UsageError, match="the unknown method Unknown; register it first"):
        steppe.load(tmp_path / "file", mlp())


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        (steppe.EWC(), within("method", "penalty", centre={}), "parameter names do not match"),
        (steppe.EWC(), within("method", "penalty", "importance", **{"0.bias": torch.zeros(1)}), "the weight's shape"),
        (
            steppe.GEM(tasks=2),
            within("method", "memory", "rings", written=torch.ones(5).bool()),
            "memory or tasks differ",
        ),
    ],
)
def test_method_state_must_fit(
    method: steppe.MethodConfig, change: Callable[[Any], None], says: str, tmp_path: Path
) -> None:
    saved(method, tmp_path / "file")
    hostile.forged(tmp_path / "file", "learner", change)
    with pytest.raises(RunError, match=says):
        steppe.load(tmp_path / "file", mlp())


ROWS = {"flat": torch.arange(5), "lengths": torch.tensor([2, 3]), "y": torch.arange(2), "task": torch.zeros(2)}
PACKED = {"ragged": ["flat", "lengths"]}
BROKEN: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "too few elements": (PACKED, {**ROWS, "flat": torch.arange(4)}),
    "negative lengths": (PACKED, {**ROWS, "lengths": torch.tensor([-1, 6])}),
    "lengths of no list": (PACKED, {**ROWS, "lengths": torch.tensor(5)}),
    "lengths of no integers": (PACKED, {**ROWS, "lengths": torch.tensor([2.0, 3.0])}),
    "elements of no list": (PACKED, {**ROWS, "flat": torch.tensor(0)}),
    "one tensor": ({"ragged": ["flat"]}, ROWS),
    "other samples than targets": ({"nest": [{"tensor": "flat"}, {"tensor": "y"}, {"tensor": "task"}]}, ROWS),
    "no inputs": ({"nest": [{"items": []}, {"tensor": "y"}, {"tensor": "task"}]}, ROWS),
    "inputs that are numbers": ({"nest": [3, {"tensor": "y"}, {"tensor": "task"}]}, ROWS),
    "no targets": ({"nest": [PACKED, None, {"tensor": "task"}]}, ROWS),
    "fewer targets": ({"nest": [PACKED, {"tensor": "flat"}, {"tensor": "task"}]}, {**ROWS, "flat": torch.arange(5)}),
    "no tasks": ({"nest": [PACKED, {"tensor": "y"}]}, ROWS),
}


@pytest.mark.parametrize("case", BROKEN)
def test_nests_that_cannot_be(case: str) -> None:
    tree, held = BROKEN[case]
    with pytest.raises(ValueError, match=r"\w"):
        unflatten_tree(tree, held)
