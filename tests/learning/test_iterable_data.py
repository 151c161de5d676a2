"""Streams: datasets that are iterated, with and without a length, alone and in a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nest_models import OnePass, Rows, SizedStream, Stream, TextModel
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import steppe
from steppe import ER, DataError, EpochEnded, Learner, Padding, Progress, Ragged, Task
from steppe.data.samples import as_samples

PADDING = Padding({"input_ids": 0, "attention_mask": 0})


def collated(samples: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {
        key: Ragged(torch.tensor(sample[key]) for sample in samples) for key in ("input_ids", "attention_mask")
    }
    return {**made, "labels": torch.tensor([sample["labels"] for sample in samples])}


def rows(seed: int = 0, count: int = 23) -> Rows:
    return Rows(count, 0, seed)


FORMS: dict[str, Callable[[], Any]] = {
    "stream": lambda: Stream(rows()),
    "sized": lambda: SizedStream(rows()),
    "loader": lambda: DataLoader(Stream(rows()), batch_size=5, collate_fn=collated),
    "sized loader": lambda: DataLoader(SizedStream(rows()), batch_size=5, collate_fn=collated),
    "loader with workers": lambda: DataLoader(
        Stream(rows()), batch_size=5, collate_fn=collated, num_workers=1, multiprocessing_context="fork"
    ),
}


def learner() -> Learner:
    return Learner(TextModel(), ER(lr=0.1, buffer=10), padding=PADDING)


def weights(learner: Learner) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in learner.model.parameters()]


def equal(one: Learner, other: Learner) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


def reference(epochs: int) -> Learner:
    """Taught the same batches through a loader of a map-style dataset."""
    made = learner()
    made.learn(Task(DataLoader(rows(), batch_size=5, collate_fn=collated)), epochs=epochs)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_every_epoch_iterates_again(form: str) -> None:
    made, events = learner(), []
    task = Task(FORMS[form](), name="stream")
    result = made.learn(task, batch_size=5, epochs=3, callback=events.append)
    assert result.updates == 15
    assert [event.batches for event in events if isinstance(event, EpochEnded)] == [5, 5, 5]
    assert equal(made, reference(3))
    assert repr(task) == (
        "Task('stream', 23 samples, head=None)" if "sized" in form else "Task('stream', a stream, head=None)"
    )


def test_progress_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.learning.loop._REPORT_EVERY", -1.0)
    events: list[Any] = []
    learner().learn(Task(Stream(rows())), batch_size=5, callback=events.append)
    assert [(event.batch, event.batches) for event in events if isinstance(event, Progress)] == [
        (number, None) for number in range(1, 6)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_streams_to_test_and_validate(form: str) -> None:
    made = learner()
    task = Task(FORMS[form](), FORMS[form](), val=FORMS[form]())
    made.learn(task, batch_size=5, epochs=4, patience=1)
    plain = Task(rows(), rows())
    assert made.evaluate(task) == made.evaluate(plain)


@pytest.mark.parametrize("stop", [1, 3, 5, 8])
@pytest.mark.parametrize("form", FORMS)
def test_resumed_it_skips_what_was_seen(form: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as without the interruption, if the stream iterates alike."""
    monkeypatch.setattr("steppe.learning.loop._REPORT_EVERY", -1.0)
    whole, cut = learner(), learner()
    whole.learn(Task(FORMS[form]()), batch_size=5, epochs=2)
    count = 0

    class StopHereError(Exception):
        pass

    def callback(event: Any) -> None:
        nonlocal count
        count += 1
        if count == stop:
            cut.save(tmp_path / "learner")
            raise StopHereError

    with pytest.raises(StopHereError):
        cut.learn(Task(FORMS[form]()), batch_size=5, epochs=2, callback=callback)
    resumed = steppe.load(tmp_path / "learner", TextModel())
    resumed.learn(Task(FORMS[form]()), batch_size=5, epochs=2)
    assert equal(resumed, whole)


def test_a_stream_that_is_its_own_iterator_loses_no_sample() -> None:
    """What was read to check it is given back; a second epoch is refused in words."""
    for form in (OnePass(rows()), DataLoader(OnePass(rows()), batch_size=5, collate_fn=collated)):
        made = learner()
        assert made.learn(Task(form), batch_size=5).updates == 5
        assert equal(made, reference(1))
    with pytest.raises(DataError, match="yields no batch in epoch 2; an IterableDataset must start anew"):
        learner().learn(Task(OnePass(rows())), batch_size=5, epochs=2)


class Shuffled(IterableDataset[Any]):
    """Draws its order from torch's global generator."""

    def __iter__(self) -> Iterator[Any]:
        data = rows()
        return iter([data[place] for place in torch.randperm(len(data)).tolist()])


def test_a_stream_that_shuffles_does_so_from_the_learners_seed() -> None:
    torch.manual_seed(1)
    one, other = learner(), learner()
    one.learn(Task(Shuffled()), batch_size=5, epochs=2)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    other.learn(Task(Shuffled()), batch_size=5, epochs=2)
    assert equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_streams_cannot_do() -> None:
    streams = [Task(Stream(rows()), name="one"), Task(SizedStream(rows()), name="two")]
    for task in streams:
        with pytest.raises(DataError, match=rf"{task.name}: the training data is an IterableDataset, whose samples"):
            learner().learn([task, Task(rows())])
    loader = Task(DataLoader(Stream(rows()), collate_fn=collated), name="three")
    with pytest.raises(DataError, match=r"three: the training data is .* samples cannot be indexed"):
        learner().learn([loader, Task(rows())])


def test_a_look_at_a_stream_changes_nothing() -> None:
    stream = Stream(rows())
    samples = as_samples(stream)
    for count in (1, 4, 2):
        x, y = samples.first(count)
        assert len(y) == len(x["input_ids"]) == count
    assert stream.walks == 2
    assert sum(len(y) for _, y in samples.batches(5, None)) == 23
    assert sum(len(y) for _, y in samples.batches(5, None, skip=2)) == 13
