"""Samples in every form: each one once per epoch, a smaller last batch, the order from the generator alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import steppe
from steppe.data.samples import Samples, TensorSamples, as_samples
from steppe.errors import DataError


class Numbers(Dataset[tuple[list[float], int]]):
    """Plain Python values, as in many users' datasets."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> tuple[Any, int]:
        return torch.tensor([float(place), 2.0 * place]), place


def tensors(n: int) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(n)
    return torch.stack((numbers, 2 * numbers), 1).float(), numbers


FORMS: dict[str, Callable[[int], Samples]] = {
    "tensors": lambda n: as_samples(tensors(n)),
    "arrays": lambda n: as_samples([part.numpy() for part in tensors(n)]),
    "dataset": lambda n: as_samples(Numbers(n)),
    "tensor dataset": lambda n: as_samples(TensorDataset(*tensors(n))),
    "viewed": lambda n: TensorSamples(tensors(n)[0] / 2, tensors(n)[1], lambda x: 2 * x),
}


def labels_of(samples: Samples, size: int, order: torch.Generator | None) -> list[list[int]]:
    """The labels of every batch, after checking that the inputs belong to them."""
    found = []
    for x, y in samples.batches(size, order):
        assert y.dtype == torch.int64
        torch.testing.assert_close(x, torch.stack((y, 2 * y), 1).float())
        found.append(y.tolist())
    return found


@pytest.mark.parametrize("form", FORMS)
@given(n=st.integers(1, 30), size=st.integers(1, 12), seed=st.integers(0, 1000))
def test_every_sample_exactly_once(form: str, n: int, size: int, seed: int) -> None:
    samples = FORMS[form](n)
    straight = labels_of(samples, size, None)
    assert list(chain(*straight)) == list(range(n))
    shuffled = labels_of(samples, size, torch.Generator().manual_seed(seed))
    assert sorted(chain(*shuffled)) == list(range(n))
    expected = [size] * (n // size) + ([n % size] if n % size else [])
    assert [len(batch) for batch in straight] == [len(batch) for batch in shuffled] == expected
    assert samples.count_batches(size) == len(expected)
    assert len(samples) == n


@pytest.mark.parametrize("form", FORMS)
def test_order_depends_only_on_the_generator(form: str) -> None:
    """It is the same in every form, differs in the next epoch, and does not use the global generator."""
    samples, found = FORMS[form](40), torch.get_rng_state()
    order = torch.Generator().manual_seed(5)
    first, second = labels_of(samples, 7, order), labels_of(samples, 7, order)
    twin = torch.Generator().manual_seed(5)
    for walk in (first, second):
        assert list(chain(*walk)) == torch.randperm(40, generator=twin).tolist()
    assert first != second
    samples.first()
    assert torch.equal(torch.get_rng_state(), found)


def test_a_loader_keeps_its_own_batches_and_order() -> None:
    loader = DataLoader(Numbers(11), batch_size=4, sampler=list(range(10, -1, -1)))
    samples = as_samples(loader)
    assert labels_of(samples, 3, torch.Generator()) == [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1, 0]]
    assert (len(samples), samples.count_batches(3)) == (11, 3)
    assert samples.first(2)[1].tolist() == [10, 9]


class Own(Sampler[int]):
    """Draws from every global generator, and shuffles its own list of indices meanwhile."""

    def __init__(self) -> None:
        self.places, self.epoch = [7, 8, 9, 10], 0
        self.array, self.by_class = np.arange(4), {3: [5, 6]}
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.places)
        self.python.shuffle(self.by_class[3])
        np.random.shuffle(self.array)
        self.numpy.shuffle(self.array)
        moved = int(self.array[0]) + self.by_class[3][0] + self.epoch + int(torch.randint(9, (), generator=self.torch))
        moved += int(torch.randint(9, ()))
        return iter([self.places[(place + moved) % 4] for place in range(4)])

    def __len__(self) -> int:
        return 4


class Named(Numbers):
    """Yields names instead of indices."""

    def __getitem__(self, place: Any) -> tuple[Any, int]:
        return super().__getitem__(int(place.removeprefix("number ")))


def shared() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "default": lambda: DataLoader(Numbers(11), batch_size=4),
    "a subset": lambda: DataLoader(Numbers(11), batch_size=4, sampler=SubsetRandomSampler([7, 8, 9], shared())),
    "a subset by the global generator": lambda: DataLoader(
        Numbers(11), batch_size=2, sampler=SubsetRandomSampler([7, 8])
    ),
    "weighted": lambda: DataLoader(
        Numbers(11), batch_size=4, sampler=WeightedRandomSampler([0] * 10 + [1.0], 5, generator=shared())
    ),
    "names": lambda: DataLoader(Named(11), batch_size=4, sampler=[f"number {place}" for place in (3, 1)]),
    "batches": lambda: DataLoader(Numbers(11), batch_sampler=[[4], [5, 6, 7]]),
    "its own": lambda: DataLoader(Numbers(11), batch_size=3, sampler=Own()),
    "its own, in batches": lambda: DataLoader(Numbers(11), batch_sampler=BatchSampler(Own(), 1, False)),
    "in bulk": lambda: DataLoader(
        TensorDataset(*tensors(11)),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(11), generator=shared()), 4, False),
    ),
    "in bulk, its own": lambda: DataLoader(
        TensorDataset(*tensors(11)), batch_size=None, sampler=BatchSampler(Own(), 2, False)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_looking_at_a_loader_does_not_change_its_samples(name: str) -> None:
    """Compared with a loader that was not looked at."""
    found = []
    for look in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        samples = as_samples(LOADERS[name]())
        looked = [samples.first(count)[1].tolist() for count in (1, 2, 2)] if look else []
        walks = [labels_of(samples, 1, None) for _ in range(2)]
        assert all(set(labels) <= set(chain(*walks[0])) for labels in looked)
        assert all(len(labels) >= count for labels, count in zip(looked, (1, 2, 2), strict=False))
        found.append([*walks, torch.rand(1).tolist(), random.random(), float(np.random.random())])
    assert found[0] == found[1]


def test_learning_from_loaders_with_a_sampler() -> None:
    x, y = torch.randn(40, 6), torch.arange(40) % 4
    late = SubsetRandomSampler([place for place in range(40) if y[place] >= 2])
    loader = DataLoader(TensorDataset(x, y), batch_size=10, sampler=late)
    for data in (loader, DataLoader(TensorDataset(x, y), batch_size=None, sampler=BatchSampler(late, 10, False))):
        learner = steppe.Learner(torch.nn.Linear(6, 4), steppe.ER())
        assert learner.learn(steppe.Task(data, data, val=data, head=range(2, 4)), patience=1).updates == 2
        with pytest.raises(DataError, match=r"digits: the training data has labels [23] to [23], outside the head"):
            learner.learn(steppe.Task(data, head=range(0, 2), name="digits"))


def test_samplers_that_cannot_be_copied() -> None:
    """An iterator is left to the loader; an empty sampler, or one of unknown length, is an error."""
    numbers, places = Numbers(11), iter([7, 8])
    assert as_samples(DataLoader(numbers, batch_size=2, sampler=places)).first()[1].tolist() == [0]
    assert list(places) == [7, 8]
    dropped = DataLoader(numbers, batch_size=4, sampler=[1, 2], drop_last=True)
    with pytest.raises(DataError, match="yields no batch"):
        as_samples(dropped).first()
    endless = DataLoader(numbers, batch_size=2, sampler=(place for place in (1, 2)))
    with pytest.raises(DataError, match="digits: the training data is a DataLoader whose sampler has no length"):
        steppe.Learner(torch.nn.Linear(2, 11), steppe.ER()).learn(steppe.Task(endless, name="digits"))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_labels_become_int64(kind: torch.dtype) -> None:
    samples = TensorSamples(torch.zeros(3, 2), torch.tensor([0, 2, 1], dtype=kind))
    assert samples.y.dtype == torch.int64
    assert samples.y.tolist() == [0, 2, 1]


def test_bytes_stay_bytes() -> None:
    x = torch.arange(6, dtype=torch.uint8).reshape(3, 2)
    batch, _ = next(TensorSamples(x, torch.arange(3)).batches(2, torch.Generator().manual_seed(0)))
    assert batch.dtype == torch.uint8


def test_empty_data_is_rejected() -> None:
    for samples in (FORMS["tensors"](0), FORMS["dataset"](0), as_samples(DataLoader(Numbers(0)))):
        with pytest.raises(DataError, match="is empty"):
            samples.first()


def inference_dataset() -> tuple[Tensor, Tensor]:
    """Features computed by a frozen network in inference mode."""
    with torch.inference_mode():
        return torch.randn(20, 12), torch.arange(20) % 4


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader", "loader of batches"])
@pytest.mark.parametrize("under", [False, True])
def test_learning_from_inference_tensors(form: str, under: bool) -> None:
    """Torch cannot compute gradients through them; outside inference mode they look like any other tensor."""
    pair = inference_dataset()
    forms: dict[str, object] = {
        "tensors": pair,
        "dataset": TensorDataset(*pair),
        "loader": DataLoader(TensorDataset(*pair), batch_size=5),
        "loader of batches": DataLoader([pair], batch_size=None),  # type: ignore[arg-type]
    }
    with torch.inference_mode(under):
        task = steppe.Task(forms[form])
    x, y = next(task.train.batches(5, None))
    assert [part.is_inference() for part in (x, y)] == [False, False]
    for method in (steppe.FSDGPM(), steppe.GPM()):
        model = torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
        assert steppe.Learner(model, method).learn(task).updates > 0
