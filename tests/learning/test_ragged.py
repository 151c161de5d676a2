"""Sequences of different lengths: padded for the model, kept without padding, the same as padded by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nest_models import OUTPUTS, WORDS, Rows, TextModel, Tokens, ragged_task, sequences, texts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

import steppe
from steppe import ER, FSDGPM, DataError, Finetune, Learner, Padding, Ragged, Task, UsageError

MASKED = Padding(0, mask="attention_mask")


def weights(learner: Learner) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in learner.model.parameters()]


def assert_close(one: Learner, other: Learner) -> None:
    for mine, its in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("settings", [ER(lr=0.1, buffer=15), FSDGPM(lr=0.1, buffer=15, basis_samples=15)])
def test_padding_batch_by_batch_is_padding_by_hand(settings: Any) -> None:
    """With a mask, how far a batch is padded makes no difference; so a dictionary of whole tensors teaches the same."""
    ragged = Learner(TextModel().double(), settings, exclude=["classifier"], padding=MASKED)
    whole = Learner(TextModel().double(), settings, exclude=["classifier"])
    for number in range(2):
        ids, mask, y = texts(30, 2 * number, number)
        rows, _ = sequences(30, 2 * number, number)
        ragged.learn(Task((rows, y)), epochs=2)
        whole.learn(Task(({"input_ids": ids, "attention_mask": mask}, y)), epochs=2)
    assert_close(ragged, whole)
    ids, mask, y = texts(600, 0, 9)
    rows, _ = sequences(600, 0, 9)
    assert torch.equal(ragged.predict(rows), ragged.predict(Ragged(rows)))
    torch.testing.assert_close(ragged.outputs(rows), whole.outputs({"input_ids": ids, "attention_mask": mask}))


def test_every_form_of_the_same_sequences_teaches_alike() -> None:
    """Lists of tensors, arrays and numbers; a dictionary of them; a dataset; a loader that collates to `Ragged`."""
    rows, y = sequences(20, 0, 0)
    dataset = [(row, int(label)) for row, label in zip(rows, y, strict=True)]

    def collated(samples: list[tuple[Tensor, int]]) -> tuple[Ragged, Tensor]:
        return Ragged([row for row, _ in samples]), torch.tensor([label for _, label in samples])

    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, place: int) -> Any:
            return dataset[place]

    in_order = DataLoader(Pairs(), batch_size=5, collate_fn=collated)
    forms: dict[str, Any] = {
        "tensors": (rows, y),
        "arrays": ([row.numpy() for row in rows], y.numpy()),
        "numbers": ([row.tolist() for row in rows], y.tolist()),
        "explicit": (Ragged(rows), y),
        "named": ({"input_ids": rows}, y),
        "tokenizer": (Tokens(input_ids=[row.tolist() for row in rows]), y),
        "with labels": {"input_ids": rows, "labels": y},
        "dataset": Pairs(),
    }
    learners = {}
    for name, form in forms.items():
        learners[name] = Learner(TextModel(), ER(lr=0.1, buffer=8), padding=MASKED)
        learners[name].learn(Task(form), batch_size=5)
        assert all(
            torch.equal(*pair) for pair in zip(weights(learners[name]), weights(learners["tensors"]), strict=True)
        )
    loaded = Learner(TextModel(), ER(lr=0.1, buffer=8), padding=MASKED)
    assert loaded.learn(Task(in_order)).updates == 4


def test_samples_of_hugging_face_datasets() -> None:
    """Dictionaries of lists; each input has a padding value of its own."""
    padding = Padding({"input_ids": 0, "attention_mask": 0})
    rows = Learner(TextModel(), ER(lr=0.1, buffer=8), padding=padding)
    rows.learn(Task(Rows(24, 0, 0), Rows(10, 0, 1)))
    ids, y = sequences(24, 0, 0)
    masks = [torch.ones_like(row) for row in ids]
    tensors = Learner(TextModel(), ER(lr=0.1, buffer=8), padding=padding)
    tensors.learn(Task(({"input_ids": ids, "attention_mask": masks}, y)))
    assert all(torch.equal(*pair) for pair in zip(weights(rows), weights(tensors), strict=True))
    assert len(rows.evaluate(Task(Rows(24, 0, 0), Rows(10, 0, 1)))) == 1


class Listener(nn.Module):
    """A recurrent network over packed sequences (T, 3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 2)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        logits: Tensor = self.head(self.gru(packed)[1][0])
        return logits


def series(count: int, seed: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    return [
        torch.randn(2 + 3 * (place % 7), 3, generator=generator) + label for place, label in enumerate(y.tolist())
    ], y


def test_series_with_features_and_their_lengths() -> None:
    """A lone input keeps its place; lengths come by name; each prediction is that of the series alone."""
    rows, y = series(140, 0)
    model = Listener()
    learner = Learner(model, ER(lr=0.5, buffer=20), padding=Padding(0.0, lengths="lengths"))
    learner.learn(Task((rows, y), (rows, y)), epochs=8)
    assert learner.evaluate(Task((rows, y), (rows, y)))[0] > 90
    alone = torch.cat([learner.outputs([row]) for row in rows[:10]])
    torch.testing.assert_close(learner.outputs(rows[:10]), alone)
    assert {length for _, length, _ in model.seen} >= {2, 20}
    copies = [row.numpy() for row in rows]
    assert torch.equal(learner.predict(copies), learner.predict(rows))


def test_buffers_keep_sequences_without_padding() -> None:
    """To the byte, and not as views of larger batches."""
    rows, y = series(12, 0)
    learner = Learner(Listener(), ER(buffer=50), padding=Padding(lengths="lengths"))
    result = learner.learn(Task((rows, y)), batch_size=6)
    labels = 2 * 50 * 8  # a label and a task for each slot
    assert result.bytes["replay"] == sum(row.numel() * 4 for row in rows) + labels
    method: Any = learner._method
    stored = method.replay.state_dict()["stored"].x
    assert sorted(len(row) for row in stored.rows) == sorted(len(row) for row in rows)
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in stored.rows)


class Tagger(nn.Module):
    """A class for every word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, OUTPUTS)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(ids)).mT  # (n, classes, length), as cross_entropy takes them
        return logits


def test_targets_may_be_sequences(tmp_path: Path) -> None:
    """A class per word, padded with what the loss ignores; the same as padding everything by hand."""
    rows, _ = sequences(30, 0, 0)
    tags = [row % OUTPUTS for row in rows]
    padding, settings = Padding(0), ER(lr=0.5, buffer=30)
    learner = Learner(Tagger().double(), settings, padding=padding, loss=cross_entropy)
    before = learner.outputs(rows)
    learner.learn(Task((rows, tags)), epochs=3)
    learner.save(tmp_path / "learner")
    whole = Learner(Tagger().double(), settings, loss=cross_entropy)
    ids, mask, _ = texts(30, 0, 0)
    whole.learn(Task((ids, torch.where(mask > 0, ids % OUTPUTS, -100))), epochs=3)
    assert_close(learner, whole)
    assert before.shape == (30, OUTPUTS, max(map(len, rows)))
    loaded = steppe.load(tmp_path / "learner", Tagger().double(), loss=cross_entropy)
    for each in (learner, loaded):
        each.learn(Task((rows, tags)))
    assert all(torch.equal(*pair) for pair in zip(weights(loaded), weights(learner), strict=True))


def uneven() -> tuple[dict[str, list[Tensor]], Tensor]:
    rows, y = sequences(12, 0, 0)
    return {"input_ids": rows, "attention_mask": [torch.ones(len(row) + 1) for row in rows]}, y


CASES: dict[str, tuple[Padding | None, Callable[[], Any], str]] = {
    "no padding": (
        None,
        lambda: sequences(12, 0, 0),
        "data has sequences of different lengths; create the learner with",
    ),
    "no padding of a dataset": (
        None,
        lambda: Rows(12, 0, 0),
        "sequences of different lengths; create the learner with",
    ),
    "not named": (
        Padding({"attention_mask": 0}),
        lambda: Rows(12, 0, 0),
        "different lengths in 'input_ids', for which `padding` has no value",
    ),
    "mask in the data": (MASKED, lambda: Rows(12, 0, 0), "has the input 'attention_mask' already"),
    "several lengths": (Padding(lengths="lengths"), uneven, "in 'input_ids' and 'attention_mask' of one sample"),
    "features": (
        Padding(),
        lambda: ([torch.zeros(2, 3), torch.zeros(3, 4)], [0, 1]),
        r"with features \(3,\) and, in sample 1, .* \(4,\)",
    ),
    "numbers": (Padding(), lambda: ([torch.zeros(2), torch.tensor(1.0)], [0, 1]), "a sequence that is a single number"),
    "NaN": (
        Padding(),
        lambda: ([torch.zeros(2), torch.tensor([0.0, 1.0, torch.nan])], [0, 1]),
        "NaN or infinity in its inputs, first in sample 1",
    ),
    "fewer labels": (Padding(), lambda: (sequences(12, 0, 0)[0], [0, 1]), r"inputs of shape \(12, None\) and labels"),
}


@pytest.mark.parametrize("case", CASES)
def test_sequences_that_cannot_be_learned(case: str) -> None:
    """Before any work."""
    padding, make, message = CASES[case]
    learner = Learner(TextModel(), ER(), padding=padding)
    before = weights(learner)
    with pytest.raises(DataError, match=message):
        learner.learn(Task(make()))
    assert all(torch.equal(*pair) for pair in zip(before, weights(learner), strict=True))
    assert learner.num_tasks == 0


def test_sequences_to_predict_need_padding_too() -> None:
    learner = Learner(TextModel(), ER())
    with pytest.raises(
        DataError, match="the inputs to predict have sequences of different lengths; create the learner"
    ):
        learner.predict([torch.tensor([1]), torch.tensor([1, 2])])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Padding("0"), "expected numbers to fill up with, got '0'"),  # type: ignore[arg-type]
        (lambda: Padding({"a": None}), "expected numbers to fill up with, got None"),  # type: ignore[dict-item]
        (lambda: Padding(mask=3), "expected the name of an argument, got 3"),  # type: ignore[arg-type]
        (lambda: Padding(mask="m", lengths="m"), "are both named 'm'"),
        (lambda: Learner(TextModel(), ER(), padding=0), "padding must be a steppe.Padding"),  # type: ignore[arg-type]
    ],
)
def test_padding_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_state_needs_the_same_padding(tmp_path: Path) -> None:
    """A file holds it."""
    learner = Learner(TextModel(), Finetune(), padding=MASKED)
    learner.learn(ragged_task(0))
    learner.save(tmp_path / "learner")
    loaded = steppe.load(tmp_path / "learner", TextModel())
    rows, _ = sequences(9, 0, 4)
    assert torch.equal(loaded.predict(rows), learner.predict(rows))
    with pytest.raises(UsageError, match=r"saved with padding = .* this one has None"):
        Learner(TextModel(), Finetune()).load_state_dict(learner.state_dict())


def test_arrays_of_objects_are_no_sequences() -> None:
    given = np.array([np.zeros(2), np.zeros(3)], dtype=object)
    with pytest.raises(DataError, match="cannot be converted to tensors"):
        Task((given, [0, 1]))
