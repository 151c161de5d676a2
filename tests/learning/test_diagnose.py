"""Errors that show only while learning get clear messages: outputs in train mode, samples of different shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from own_models import mlp
from small_tasks import SEQUENTIAL, settings_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from steppe import ER, FSDGPM, DataError, Finetune, ICaRL, Learner, ModelError, Task
from steppe.errors import ShapesDifferError
from steppe.methods.base import MethodConfig
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.ring_buffer import TaskRingBuffer
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch

X, Y = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


class Outputs(NamedTuple):
    logits: Tensor
    aux_logits: Tensor


class Auxiliary(nn.Module):
    """A second output in train mode, as in GoogLeNet and Inception, and a BatchNorm, which needs two samples."""

    def __init__(self, form: str, spoilt: bool = False) -> None:
        super().__init__()
        self.norm, self.inner, self.aux = nn.BatchNorm1d(8), mlp(), nn.Linear(8, 4)
        self.form, self.spoilt = form, spoilt

    def forward(self, x: Tensor) -> Any:
        if self.spoilt and self.training:
            raise TypeError("something else")
        logits, aux = self.inner(self.norm(x)), self.aux(x)
        forms = {
            "tuple": (logits, aux),
            "Outputs": Outputs(logits, aux),
            "dict": {"out": logits, "aux": aux},
            "plain": logits,
        }
        return forms[self.form] if self.training else logits


METHODS = {"finetune": Finetune(), "er": ER(), "fs-dgpm": FSDGPM(buffer=10, basis_samples=10), "icarl": ICaRL()}


@pytest.mark.parametrize("form", ["tuple", "Outputs"])
@pytest.mark.parametrize("name", METHODS)
def test_auxiliary_outputs_are_ignored(name: str, form: str) -> None:
    learner, plain = (Learner(Auxiliary(form), METHODS[name], exclude=["inner.4"]) for form in (form, "plain"))
    plain.model.load_state_dict(learner.model.state_dict())
    for each in (learner, plain):
        each.learn(Task((X, Y), head=range(0, 2)))
    for weight, twin in zip(learner.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(weight, twin)


@pytest.mark.parametrize("name", METHODS)
def test_invalid_outputs_in_train_mode_are_named(name: str) -> None:
    model = Auxiliary("dict")
    learner = Learner(model, METHODS[name], exclude=["inner.4"])
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(
        ModelError, match=r"in train mode too, .* got a dict without 'logits' .*; disable auxiliary outputs"
    ):
        learner.learn(Task((X, Y), head=range(0, 2)))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert model.norm.num_batches_tracked <= 1  # the diagnosis changes nothing
    assert learner.num_tasks == 0


def test_other_model_errors_are_not_changed() -> None:
    with pytest.raises(TypeError, match=r"^something else$"):
        Learner(Auxiliary("tuple", spoilt=True), ER()).learn(Task((X, Y)))

    class Told(Finetune):
        def start(self, *arguments: Any) -> Any:
            method = super().start(*arguments)
            method.after_batch = lambda batch: batch.nothing  # type: ignore[assignment, return-value, method-assign]
            return method

    model = nn.Sequential(nn.BatchNorm1d(8), mlp())
    with pytest.raises(AttributeError, match="nothing"):
        Learner(model, Told()).learn(Task((X, Y)))
    assert model[0].num_batches_tracked == 1


class Sentences(Dataset[Any]):
    """Sequences of two lengths; the loader pads each batch to its longest sequence."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        length = self.lengths[place * len(self.lengths) // 20]
        return torch.randn(length, 3, generator=torch.Generator().manual_seed(place)), place % 2


def pad_batch(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.hidden, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.hidden(self.lstm(x)[0][:, -1]).relu())
        return output


def settings(method: str) -> MethodConfig:
    return ICaRL() if method == "icarl" else settings_of(method, "cifar100-superclass")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", SEQUENTIAL)
def test_samples_of_different_shapes_cannot_be_stored_together(method: str) -> None:
    """Two batches of length 5, then two of length 7. Methods that store samples reject them and name both shapes."""
    loader = DataLoader(Sentences((5, 7)), batch_size=5, collate_fn=pad_batch)
    learner, task = Learner(Reader(), settings(method)), Task(loader, head=range(0, 2), name="letters")
    if method == "finetune":  # stores nothing
        assert learner.learn(task).updates == 4
        return
    with pytest.raises(DataError, match=r"^letters: inputs of shape .* cannot be stored together") as caught:
        learner.learn(task)
    assert {"(5, 3)", "(7, 3)"} == {words[:6] for words in str(caught.value).split("of shape ")[1:]}
    fixed = DataLoader(Sentences((7, 7)), batch_size=5, collate_fn=pad_batch)
    assert learner.learn(Task(fixed, head=range(0, 2))).updates == 4


def batch(*shape: int) -> Batch:
    return Batch(torch.ones(*shape), torch.zeros(shape[0], dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64))


def test_samples_are_not_broadcast() -> None:
    """A row of length 1 could be assigned to one of length 5 without an error."""
    rings, streams = TaskRingBuffer(8, 2), Streams(0)
    rings.begin_task()
    reservoir = Reservoir(8, streams.python_rng("draws"), streams.python_rng("pushes"))
    for write in (rings.add, reservoir.add):
        write(batch(2, 5))
        with pytest.raises(ShapesDifferError, match=r"\(1,\) .* \(5,\)"):
            write(batch(2, 1))
    with pytest.raises(ShapesDifferError, match=r"\(5,\) .* \(1,\)"):
        batch(2, 5).joined(batch(2, 1))
