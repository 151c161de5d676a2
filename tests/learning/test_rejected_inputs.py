"""Inputs that cannot be learned from are rejected: the right error type, a message that names the problem, and no
changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from own_models import Table, bright, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from steppe import (
    ER,
    FSDGPM,
    DataError,
    Finetune,
    Learner,
    ModelError,
    SteppeError,
    Task,
    UsageError,
)
from steppe.data import idx

X, Y = bright(8)(40, 0)


def corrupted_inputs(value: float) -> Tensor:
    """Inputs in which sample 7 contains this non-finite value."""
    x = X.clone()
    x[7, 3] = value
    return x


class Empty(IterableDataset[Any]):
    """Without a length, so that it shows only when it is read."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Lengthless(Dataset[Any]):
    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return X[place], 0


class Lengths(Dataset[Any]):
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return X[place, : 8 if place == 0 else 7], 0


class Pictures(Dataset[Any]):
    """PIL-like images without a transform to tensors."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> tuple[object, int]:
        return object(), 0


class Counted(IterableDataset[Any]):
    """It has no samples."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Unlabelled(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> Tensor:
        return X[place]


TASKS: dict[str, tuple[Callable[[], Task], type[SteppeError], str]] = {
    "no sample": (lambda: Task((X[:0], Y[:0]), name="digits"), DataError, "digits: the training data is empty"),
    "no test sample": (lambda: Task((X, Y), (X[:0], Y[:0])), DataError, "the test data is empty"),
    "empty dataset": (lambda: Task(TensorDataset(X[:0], Y[:0])), DataError, "the training data is empty"),
    "NaN": (
        lambda: Task((corrupted_inputs(torch.nan), Y), name="digits"),
        DataError,
        "digits: .*NaN or infinity.*sample 7",
    ),
    "infinity": (
        lambda: Task((X, Y), (corrupted_inputs(torch.inf), Y)),
        DataError,
        "test data .*NaN or infinity.*sample 7",
    ),
    "lengths": (lambda: Task((X, Y[:9])), DataError, r"\(40, 8\) and labels of shape \(9,\)"),
    "sparse inputs": (lambda: Task((X.to_sparse(), Y), name="digits"), DataError, "digits: .*sparse_coo.*to_dense"),
    "sparse labels": (lambda: Task((X, Y.to_sparse())), DataError, "torch.sparse_coo; expected dense"),
    "no length": (lambda: Task(Lengthless()), DataError, "without a length"),
    "no sample in a stream": (lambda: Task(Counted()), DataError, "the training data is empty"),
    "unknown form": (lambda: Task({"x": X}), DataError, "has the type dict"),
    "head with gaps": (lambda: Task((X, Y), head=range(0, 4, 2), name="digits"), DataError, "digits: invalid head"),
    "head of nothing": (lambda: Task((X, Y), head=range(2, 2)), DataError, "invalid head"),
}


@pytest.mark.parametrize("case", TASKS)
def test_invalid_tasks_are_rejected(case: str) -> None:
    make, kind, message = TASKS[case]
    with pytest.raises(kind, match=message):
        make()


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        return {"scores": self.inner(x), "inputs": x}


LEARNING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Task], type[SteppeError], str]] = {
    "float labels": (mlp, lambda: Task((X, Y.float())), DataError, "labels of type torch.float32"),
    "boolean labels": (mlp, lambda: Task((X, Y > 1)), DataError, "labels of type torch.bool"),
    "one-hot labels": (mlp, lambda: Task((X, torch.eye(4)[Y])), DataError, r"labels of shape \(40, 4\)"),
    "validation labels": (mlp, lambda: Task((X, Y), val=(X, Y.float())), DataError, "the validation data has labels"),
    "label beyond the outputs": (
        mlp,
        lambda: Task((X, Y + 1), name="digits"),
        DataError,
        "digits: the training data has labels 1 to 4.*outputs 0 to 3",
    ),
    "negative label": (mlp, lambda: Task((X, Y - 1)), DataError, "labels -1 to 2"),
    "label outside the head": (
        mlp,
        lambda: Task((X, Y % 2), head=range(2, 4)),
        DataError,
        "labels 0 to 1.*outputs 2 to 3.*add 2",
    ),
    "test label": (mlp, lambda: Task((X, Y), (X, Y + 3)), DataError, "the test data has labels 3 to 6"),
    "label in a dataset": (
        mlp,
        lambda: Task(TensorDataset(X, Y + 1), name="digits"),
        DataError,
        "digits: the training data has labels",
    ),
    "head beyond the outputs": (
        mlp,
        lambda: Task((X, Y), head=range(0, 9)),
        DataError,
        "exceeds the model's 4 outputs",
    ),
    "NaN in a dataset": (
        mlp,
        lambda: Task(TensorDataset(corrupted_inputs(torch.nan), Y)),
        DataError,
        "NaN or infinity",
    ),
    "no pairs": (mlp, lambda: Task(Unlabelled()), DataError, "pairs"),
    "labels in columns": (
        mlp,
        lambda: Task(TensorDataset(X, Y[:, None])),
        DataError,
        r"shape \(4, 1\).*one class number",
    ),
    "labels in columns of a loader": (
        mlp,
        lambda: Task(DataLoader(TensorDataset(X, Y[:, None]))),
        DataError,
        r"shape \(4, 1\).*one class number",
    ),
    "several lengths": (
        mlp,
        lambda: Task(Lengths()),
        DataError,
        "training data has sequences of different lengths.*padding=steppe.Padding",
    ),
    "pictures": (mlp, lambda: Task(Pictures()), DataError, "collated into a batch.*ToTensor"),
    "a loader of pictures": (
        mlp,
        lambda: Task(DataLoader(Pictures())),
        DataError,
        "collated into a batch.*ToTensor",
    ),
    "a loader of several lengths": (
        mlp,
        lambda: Task(DataLoader(Lengths(), batch_size=4)),
        DataError,
        "collated into a batch.*pass the Dataset instead of a DataLoader",
    ),
    "an empty stream": (mlp, lambda: Task(Empty(), name="digits"), DataError, "digits: the training data is empty"),
    "a loader of an empty stream": (mlp, lambda: Task(DataLoader(Empty())), DataError, "training data is empty"),
    "validation shape": (
        mlp,
        lambda: Task((X, Y), val=(X[:, :5], Y)),
        DataError,
        r"validation inputs have shape \(5,\)",
    ),
    "shape": (mlp, lambda: Task((X[:, :5], Y), name="digits"), DataError, r"digits: inputs of shape \(5,\)"),
    "image shape": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 4)),
        lambda: Task((torch.zeros(9, 1, 4, 4), Y[:9])),
        DataError,
        r"inputs of shape \(1, 4, 4\) do not fit",
    ),
    "test shape": (mlp, lambda: Task((X, Y), (X[:, :5], Y)), DataError, r"test inputs have shape \(5,\)"),
    "nothing to cover": (Table, lambda: Task((X, Y)), ModelError, "no layer that a gradient memory can cover"),
    "nothing but a head": (
        lambda: nn.Linear(8, 4),
        lambda: Task((X, Y % 2), head=range(0, 2)),
        ModelError,
        "no layer that a gradient memory can cover",
    ),
    "two outputs": (
        Dictionary,
        lambda: Task((X, Y)),
        ModelError,
        r"got a dict without 'logits' \(it has 'scores', 'inputs'\)",
    ),
    "a map as output": (lambda: nn.Conv1d(1, 4, 3), lambda: Task((X[:, None], Y)), ModelError, r"\(1, 4, 6\)"),
}


@pytest.mark.filterwarnings("ignore:these weights")
@pytest.mark.parametrize("case", LEARNING)
def test_data_that_does_not_fit_the_model_is_rejected(case: str) -> None:
    """Weights do not change unless the fault shows only when the data is read."""
    build, make, kind, message = LEARNING[case]
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    learner = Learner(model, FSDGPM())
    with pytest.raises(kind, match=message):
        learner.learn(make())
    assert learner.num_tasks in (0, 1)  # 1: found only while learning
    if "dataset" not in case:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


TESTS: dict[str, tuple[Task, str]] = {
    "tensors beyond the outputs": (Task((X, Y), (X, Y + 1), name="d"), "d: the test data has labels 1 to 4, outside"),
    "a dataset": (
        Task((X, Y % 2 + 2), TensorDataset(X, Y % 2), head=range(2, 4), name="d"),
        "d: the test data has labels 0 to 1, outside the head, outputs 2 to 3.*add 2",
    ),
    "a loader": (
        Task((X, Y), DataLoader(TensorDataset(X, Y - 1), batch_size=5), name="d"),
        "d: the test data has labels -1 to",
    ),
    "head beyond the outputs": (
        Task((X, Y), (X, Y), head=range(0, 9), name="d"),
        r"^d: the head range\(0, 9\) exceeds the model's 4 outputs",
    ),
    "no output of the head": (
        Task((X, Y), (X, Y + 4), head=range(4, 8), name="d"),
        r"^d: the head range\(4, 8\) exceeds",
    ),
}


@pytest.mark.parametrize("case", TESTS)
def test_invalid_test_data_is_rejected(case: str) -> None:
    """An accuracy of 0 would suggest that the model knows nothing."""
    task, message = TESTS[case]
    with pytest.raises(DataError, match=message):
        Learner(mlp(), ER()).evaluate([task])


def test_empty_batches_are_no_test_data() -> None:
    empty = DataLoader(TensorDataset(X[None, :0], Y[None, :0]), batch_size=None)
    task = Task((X, Y), empty, name="digits")
    with pytest.raises(DataError, match="digits: the test data yields no batch"):
        Learner(mlp(), ER()).evaluate(task)


def test_labels_of_a_validation_dataset_are_checked() -> None:
    task = Task((X, Y % 2 + 2), val=TensorDataset(X, Y % 2), head=range(2, 4), name="digits")
    with pytest.raises(DataError, match="digits: the validation data has labels 0 to 1, outside the head"):
        Learner(mlp(), ER()).learn(task, patience=1)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (range(0, 4, 2), r"^invalid head range\(0, 4, 2\); expected a non-empty range"),
        (range(1, 9), "exceeds the model's 4 outputs"),
        ((0, 2), r"invalid head \(0, 2\); expected a range"),
    ],
)
def test_invalid_heads_are_rejected_in_predict(head: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Learner(mlp(), ER()).predict(X, head)


def test_rejected_task_does_not_fix_the_input_kind() -> None:
    learner = Learner(mlp(), ER())
    with pytest.raises(DataError, match="has labels"):
        learner.learn(Task((X.double(), Y + 4)))
    learner.learn(Task((X, Y)))


@pytest.mark.parametrize("change", ["added", "unfrozen"])
def test_weights_that_would_not_be_trained_are_an_error(change: str) -> None:
    """Otherwise heads added task by task would keep their initial weights."""
    model = mlp()
    first = next(model.children())
    first.requires_grad_(False)
    learner = Learner(model, ER())
    learner.learn(Task((X, Y)))
    if change == "added":
        model.append(nn.Linear(4, 4))  # type: ignore[operator]
    else:
        first.requires_grad_(True)
    with pytest.raises(
        ModelError, match="was added or unfrozen after the learner was created, and would not be trained"
    ):
        learner.learn(Task((X, Y)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FSDGPM(ascent_steps=0), "ascent_steps = 0 .*at least 1"),
        (lambda: FSDGPM(threshold=0), "threshold = 0.0 .*above 0 and at most 1"),
        (lambda: FSDGPM(threshold=1.5), "threshold = 1.5 .*at most 1"),
        (lambda: FSDGPM(ascent_form="halves"), "ascent_form = 'halves' .*one of whole, chunked"),
        (lambda: ER(buffer=0), "buffer = 0"),
        (lambda: Finetune(lr=float("nan")), "lr = nan"),
        (lambda: Finetune(momentum=1.0), "momentum = 1.0 .*below 1"),
        (lambda: Learner(mlp(), ER).learn(Task((X, Y))), "method must be a method's settings"),  # type: ignore[arg-type]
        (lambda: Learner("mlp", ER()), "model must be a torch.nn.Module, got str"),  # type: ignore[arg-type]
        (lambda: Learner(mlp(), ER(), seed=1.5), r"seed = 1\.5"),  # type: ignore[arg-type]
        (lambda: Learner(mlp(), ER(), device="banana"), "unknown device 'banana'"),
        (lambda: Learner(mlp(), ER(), input_transform=5), "input_transform must be a function, got 5"),  # type: ignore[arg-type]
        (lambda: Learner(mlp(), ER(), exclude="head"), "exclude must be a list of names, such as .*, got 'head'"),
        (lambda: Learner(mlp(), ER()).learn(5), r"expected a steppe\.Task, got int"),  # type: ignore[arg-type]
        (lambda: Learner(mlp(), ER()).learn(None), r"expected a steppe\.Task, got NoneType"),  # type: ignore[arg-type]
        (lambda: Learner(mlp(), ER()).evaluate("ab"), r"expected a steppe\.Task, got str"),  # type: ignore[arg-type]
        (lambda: Learner(mlp(), ER()).learn(Task((X, Y)), epochs=0), "epochs = 0"),
        (lambda: Learner(mlp(), ER()).learn(Task((X, Y)), batch_size=0), "batch_size = 0"),
        (lambda: Learner(mlp(), ER()).learn(Task((X, Y)), updates_per_batch=-1), "updates_per_batch = -1"),
    ],
)
def test_values_out_of_range(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


IDX = bytes((0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3)) + bytes(6)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is not an IDX file"),
        (IDX[:3], "is not an IDX file"),
        (b"\x01" + IDX[1:], "is not an IDX file"),
        (IDX[:2] + b"\x0d" + IDX[3:], "is not an IDX file"),
        (IDX[:9], r"declares shape \[2, 0\]"),
        (IDX[:7] + b"\x00" + IDX[8:12], r"is empty: it declares shape \[0, 3\]"),
        (IDX[:-1], r"declares shape \[2, 3\] but has 5"),
        (IDX + b"x", r"declares shape \[2, 3\] but has 7"),
        (IDX[:4] + b"\xff" * 8 + IDX[12:], r"declares shape \[4294967295, 4294967295\]"),
        (IDX[:3] + b"\xff" + IDX[4:], "digits declares"),
        (IDX[:3] + b"\x00" + IDX[4:], r"declares shape \[\]"),
    ],
)
def test_invalid_idx_files_are_rejected(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        idx.parse_idx(raw, "digits")
