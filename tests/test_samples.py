"""Samples in every form: each once per walk, the last batch smaller, the order from the generator alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import steppe
from steppe.data.samples import Samples, TensorSamples, as_samples
from steppe.errors import DataError


class Numbers(Dataset[tuple[list[float], int]]):
    """Plain Python values, as many users' datasets give."""

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


def walked(samples: Samples, size: int, order: torch.Generator | None) -> list[list[int]]:
    """The labels of every batch; inputs are checked to belong to them."""
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
    straight = walked(samples, size, None)
    assert list(chain(*straight)) == list(range(n))
    shuffled = walked(samples, size, torch.Generator().manual_seed(seed))
    assert sorted(chain(*shuffled)) == list(range(n))
    expected = [size] * (n // size) + ([n % size] if n % size else [])
    assert [len(batch) for batch in straight] == [len(batch) for batch in shuffled] == expected
    assert samples.count_batches(size) == len(expected)
    assert len(samples) == n


@pytest.mark.parametrize("form", FORMS)
def test_the_order_comes_from_the_generator_alone(form: str) -> None:
    """The same in every form; a second walk with the same generator differs; the global generator is not asked."""
    samples, found = FORMS[form](40), torch.get_rng_state()
    order = torch.Generator().manual_seed(5)
    first, second = walked(samples, 7, order), walked(samples, 7, order)
    twin = torch.Generator().manual_seed(5)
    for walk in (first, second):
        assert list(chain(*walk)) == torch.randperm(40, generator=twin).tolist()
    assert first != second
    samples.first()
    assert torch.equal(torch.get_rng_state(), found)


def test_a_loader_keeps_its_own_batches_and_order() -> None:
    loader = DataLoader(Numbers(11), batch_size=4, sampler=list(range(10, -1, -1)))
    samples = as_samples(loader)
    assert walked(samples, 3, torch.Generator()) == [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1, 0]]
    assert (len(samples), samples.count_batches(3)) == (11, 3)
    assert samples.first()[1].tolist() == [0]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_labels_become_int64(kind: torch.dtype) -> None:
    samples = TensorSamples(torch.zeros(3, 2), torch.tensor([0, 2, 1], dtype=kind))
    assert samples.y.dtype == torch.int64
    assert samples.y.tolist() == [0, 2, 1]


def test_bytes_stay_bytes() -> None:
    x = torch.arange(6, dtype=torch.uint8).reshape(3, 2)
    batch, _ = next(TensorSamples(x, torch.arange(3)).batches(2, torch.Generator().manual_seed(0)))
    assert batch.dtype == torch.uint8


def test_nothing_can_be_learnt_from_no_sample() -> None:
    for samples in (FORMS["tensors"](0), FORMS["dataset"](0), as_samples(DataLoader(Numbers(0)))):
        with pytest.raises(DataError, match="holds no sample"):
            samples.first()


def made_under_inference() -> tuple[Tensor, Tensor]:
    """Features as a frozen network gives them to whoever wants to be quick."""
    with torch.inference_mode():
        return torch.randn(20, 12), torch.arange(20) % 4


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader", "loader of batches"])
@pytest.mark.parametrize("under", [False, True])
def test_inference_tensors_can_be_learnt_from(form: str, under: bool) -> None:
    """Torch refuses to take gradients through them; where they come from, nobody learning outside may know."""
    pair = made_under_inference()
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
