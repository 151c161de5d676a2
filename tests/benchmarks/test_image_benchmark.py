"""Benchmarks declared by task specs: classes, heads, splits and views of small synthetic sets, against plain loops; and
the real ones against the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from own_images import EACH, TESTS, synthetic
from torch import nn

from steppe.benchmarks import image_benchmark as image_tasks
from steppe.benchmarks.cifar100_split import CIFAR100Split
from steppe.benchmarks.cifar100_superclass import ORDERS, CIFAR100Superclass
from steppe.benchmarks.image_benchmark import ImageBenchmark, Split, TaskSpec
from steppe.benchmarks.pmnist import PMNIST, PMNIST60k
from steppe.benchmarks.rotated_mnist import RotatedMNIST, rotate
from steppe.benchmarks.split_mnist import SplitMNIST
from steppe.benchmarks.tiny_imagenet import TinyImageNet
from steppe.data import cifar100, mnist, tiny_imagenet
from steppe.data.images import ImageArrays, ImageSet
from steppe.data.samples import Samples
from steppe.data.task import Task
from steppe.errors import DataError
from steppe.experiments.config import RunConfig
from steppe.models.gpm_alexnet import GPMAlexNet
from steppe.models.mlp import MLP
from steppe.settings import TrainingConfig, setting


def contents(samples: Samples | None) -> list[tuple[int, int, int, int]]:
    """(class, number, part, label) of every sample of a task."""
    assert samples is not None
    x, y = next(iter(samples.batches(len(samples), None)))
    flat = x.reshape(len(x), -1)
    return [(int(row[0]), int(row[1]), int(row[2]), int(label)) for row, label in zip(flat, y, strict=True)]


@dataclass(frozen=True)
class Fruit(ImageBenchmark):
    """Three classes, not in order, then two."""

    training = TrainingConfig()
    tasks: int = setting(2, "number of tasks")

    def images(self) -> ImageSet:
        return synthetic(6)

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        return [TaskSpec("first", (4, 0, 2), range(0, 3)), TaskSpec("second", (5, 1), range(7, 9))][: self.tasks]

    def split(self, seed: int) -> Split:
        return image_tasks.holdout(4, seed)

    def network(self) -> nn.Module:
        return MLP(3072, 10, 9)


def test_labels_are_outputs_of_the_head_in_the_specs_order() -> None:
    for task, plan in zip(Fruit().stream(0), Fruit().task_specs(0), strict=True):
        assert plan.classes is not None
        assert plan.head is not None
        row = dict(zip(plan.classes, plan.head, strict=True))
        seen = contents(task.train) + contents(task.val)
        assert all(label == row[kind] and part == 0 for kind, _, part, label in seen)
        assert sorted((kind, number) for kind, number, _, _ in seen) == sorted(
            (kind, number) for kind in plan.classes for number in range(EACH)
        )
        tested = contents(task.test)
        assert sorted(tested) == sorted((kind, n, 1, row[kind]) for kind in plan.classes for n in range(TESTS))
        assert task.head == plan.head


def test_held_out_is_numpys_legacy_shuffle_of_each_task() -> None:
    y = torch.zeros(30, dtype=torch.int64)
    for seed in (0, 3):
        train, valid = image_tasks.holdout(5, seed)(y)
        places = np.arange(30)
        np.random.RandomState(seed).shuffle(places)
        assert valid.tolist() == places[:5].tolist()
        assert train.tolist() == places[5:].tolist()
    longest, other = (image_tasks.holdout(5, seed)(y)[1].tolist() for seed in (2**63 - 1, 2**62 - 1))
    assert len(set(longest)) == 5
    assert longest != other  # although the last 32 bits of the seeds are equal


def test_held_out_of_each_class() -> None:
    y = torch.tensor([7, 8, 9] * 20)
    train, valid = image_tasks.holdout_per_class(4, 1)(y)
    assert sorted(train.tolist() + valid.tolist()) == list(range(60))
    assert y[valid].bincount()[7:].tolist() == [4, 4, 4]
    assert valid.tolist() != image_tasks.holdout_per_class(4, 2)(y)[1].tolist()


def test_random_samples_differ_between_tasks() -> None:
    split = image_tasks.random_subset(10, 0, held_out=0.3)
    y = torch.zeros(50, dtype=torch.int64)
    torch.manual_seed(0)
    for _ in range(3):
        picked = torch.randperm(50)[:10].tolist()
        train, valid = split(y)
        assert (valid.tolist(), train.tolist()) == (picked[:3], picked[3:])


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize(
    ("made", "data", "count"), [(CIFAR100Superclass, cifar100, 125), (CIFAR100Split, cifar100, 250)]
)
def test_held_out_samples_depend_on_the_runs_seed(
    made: type[ImageBenchmark], data: ModuleType, count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same indices in every task: the first of NumPy's legacy shuffle with the seed, in its order."""
    pictures = synthetic(each=60)
    monkeypatch.setattr(data, "load", lambda: pictures)
    for task, plan in list(zip(made().stream(seed), made().task_specs(seed), strict=True))[:3]:
        x, _ = pictures.select("train", plan.classes)
        whole = [(int(flat[0]), int(flat[1])) for flat in x.flatten(1)]
        places = np.arange(len(whole))
        np.random.RandomState(seed).shuffle(places)
        assert [(kind, number) for kind, number, *_ in contents(task.val)] == [whole[i] for i in places[:count]]
        assert [(kind, number) for kind, number, *_ in contents(task.train)] == [whole[i] for i in places[count:]]


def test_tiny_imagenet_holds_out_by_the_seed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = synthetic(200, (3, 8, 8), each=60)
    monkeypatch.setattr(tiny_imagenet, "load", lambda: pictures)
    for seed in (0, 7):
        task, plan = TinyImageNet().stream(seed)[0], TinyImageNet().task_specs(seed)[0]
        places = np.arange(60)
        np.random.RandomState(seed).shuffle(places)
        assert plan.classes is not None
        held = contents(task.val)
        for kind in plan.classes:
            assert sorted(number for other, number, *_ in held if other == kind) == sorted(places[:50].tolist())


@pytest.mark.parametrize("made", [SplitMNIST, RotatedMNIST, PMNIST, PMNIST60k])
def test_digits_are_picked_by_the_seed(made: type[ImageBenchmark]) -> None:
    """One generator draws for all tasks, in sequence."""
    for seed in (0, 7):
        benchmark = made.from_mapping({"samples": 30, "tasks": 2})
        picks = torch.Generator().manual_seed(seed)
        for task, plan in zip(benchmark.stream(seed), benchmark.task_specs(seed), strict=True):
            x, _ = benchmark.images().select("train", plan.classes)
            chosen = x[torch.randperm(len(x), generator=picks)[:30]]
            expected = chosen if plan.view is None else plan.view(chosen)
            parts = [part for part in (task.val, task.train) if part is not None]
            seen = torch.cat([next(iter(part.batches(99, None)))[0] for part in parts])
            assert torch.equal(seen, expected)


def test_cifar100_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten classes per task, in order; 250 images held out (here of 5,000); each task its own outputs."""
    monkeypatch.setattr(cifar100, "load", lambda: synthetic(each=50))
    tasks = CIFAR100Split().stream(1)
    assert len(tasks) == 10
    for number, task in enumerate(tasks):
        rows = range(10 * number, 10 * number + 10)
        assert task.head == rows
        seen = contents(task.train) + contents(task.val)
        assert {kind for kind, *_ in seen} == set(rows)
        assert all(label == kind for kind, _, _, label in seen)
        assert task.val is not None
        assert (len(task.train), len(task.val)) == (250, 250)
        assert task.augment is None
    x = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    found = CIFAR100Split().input_transform(x)[0, :, 0, 0]
    expected = [(100 - mean) / std for mean, std in ((125.3, 63.0), (123.0, 62.1), (113.9, 66.7))]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_test_images_are_shuffled_for_batch_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same images and labels for every seed, but not sorted by class."""
    monkeypatch.setattr(cifar100, "load", lambda: synthetic(each=50))
    in_turn = contents(CIFAR100Split(tasks=2).stream(0)[1].test)
    mixed = contents(CIFAR100Split(tasks=2, norm="every").stream(0)[1].test)
    assert [label for *_, label in in_turn] == sorted(label for *_, label in in_turn)
    assert sorted(mixed) == sorted(in_turn)
    assert len({label for *_, label in mixed[: len(mixed) // 2]}) > 5
    assert contents(CIFAR100Split(tasks=2, norm="every").stream(5)[1].test) == mixed
    assert not isinstance(CIFAR100Split().network(), GPMAlexNet)
    assert isinstance(CIFAR100Split(norm="every").network(), GPMAlexNet)


# From the specification, written out again.
SUPERCLASSES = """4,30,55,72,95 1,32,67,73,91 54,62,70,82,92 9,10,16,28,61 0,51,53,57,83 22,39,40,86,87 5,20,25,84,94
6,7,14,18,24 3,42,43,88,97 12,17,37,68,76 23,33,49,60,71 15,19,21,31,38 34,63,64,66,75 26,45,77,79,99 2,11,35,46,98
27,29,44,78,93 36,50,65,74,80 47,52,56,59,96 8,13,48,58,90 41,69,81,85,89"""


@pytest.mark.parametrize("order", ORDERS)
def test_cifar100_superclass(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One superclass per task; the head belongs to the superclass in every order; local labels are ranks."""
    monkeypatch.setattr(cifar100, "load", lambda: synthetic(each=50))
    classes = [[int(c) for c in group.split(",")] for group in SUPERCLASSES.split()]
    assert sorted(ORDERS[order]) == list(range(20))
    tasks = CIFAR100Superclass(order=order).stream(0)
    for number, task in zip(ORDERS[order], tasks, strict=True):
        assert task.head == range(5 * number, 5 * number + 5)
        assert {kind for kind, *_ in contents(task.train)} == set(classes[number])
        assert all(label == 5 * number + classes[number].index(kind) for kind, _, _, label in contents(task.train))
        assert task.val is not None
        assert (len(task.train), len(task.val)) == (125, 125)
    x = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    torch.testing.assert_close(CIFAR100Superclass().input_transform(x), x / 255)


def test_scrambled_reading_must_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = ImageArrays(
        (torch.randint(256, (3000, 3, 32, 32), dtype=torch.uint8), torch.arange(100).repeat(30)),
        (torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8), torch.arange(100)),
        [str(c) for c in range(100)],
        "noise",
    )
    monkeypatch.setattr(cifar100, "load", lambda: pictures)
    true, scrambled = CIFAR100Superclass(tasks=1), CIFAR100Superclass(tasks=1, reading="scrambled")
    right = torch.cat([next(iter(part.batches(999, None)))[0] for part in _parts(true.stream(0)[0])])
    wrong = torch.cat([next(iter(part.batches(999, None)))[0] for part in _parts(scrambled.stream(0)[0])])
    for image, other in zip(right, wrong, strict=True):
        flat = image.flatten()
        for c, h, w in ((0, 0, 0), (1, 0, 0), (2, 31, 31), (1, 7, 20)):
            assert other[c, h, w] == flat[96 * h + 3 * w + c]
    assert "true ones" in true.remarks()[0]
    assert "scrambled" in scrambled.remarks()[0]


def _parts(task: Task) -> list[Samples]:
    assert task.val is not None
    assert task.test is not None
    return [task.train, task.val, task.test]


def test_tiny_imagenet_takes_its_classes_from_the_seeds_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification's first five for seed 0; 50 images of each class held out; crops and flips in training."""
    monkeypatch.setattr(tiny_imagenet, "load", lambda: synthetic(200, (3, 8, 8), each=60))
    tasks = TinyImageNet().stream(0)
    assert len(tasks) == 40
    assert [kind for kind, *_ in contents(tasks[0].test)][::TESTS] == [131, 181, 22, 172, 144]
    assert TinyImageNet().remarks() == ["training images are cropped and mirrored at random (augment = true)."]
    assert TinyImageNet(augment=False).remarks() == ["training images stay as they are (augment = false)."]
    for number, task in enumerate(tasks):
        assert task.head == range(5 * number, 5 * number + 5)
        assert task.val is not None
        assert (len(task.train), len(task.val)) == (50, 250)
        assert task.augment is not None
    other = TinyImageNet().stream(1)
    assert contents(other[0].test) != contents(tasks[0].test)
    assert TinyImageNet(augment=False).stream(0)[0].augment is None


def test_tiny_imagenet_with_fewer_classes_has_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_imagenet, "load", lambda: synthetic(53, (3, 8, 8), each=60))
    assert len(TinyImageNet().stream(0)) == 10
    assert "53 of 200 classes are on disk: other tasks" in TinyImageNet().remarks()[0]
    assert "10 tasks instead of 40" in TinyImageNet().remarks()[0]
    assert len(TinyImageNet(tasks=3).stream(0)) == 3
    assert TinyImageNet(tasks=3).remarks()[0] == (
        "53 of 200 classes are on disk: other tasks than those of the whole set."
    )
    monkeypatch.setattr(tiny_imagenet, "load", lambda: synthetic(4, (3, 8, 8)))
    with pytest.raises(DataError, match="4 classes on disk"):
        TinyImageNet().stream(0)


def test_split_mnist() -> None:
    tasks = SplitMNIST(samples=40).stream(0)
    digits = mnist.load()
    for number, task in enumerate(tasks):
        assert task.head == range(2 * number, 2 * number + 2)
        _, y = next(iter(task.train.batches(40, None)))
        assert set(y.tolist()) == set(task.head)
        assert task.test is not None
        assert len(task.test) == int(((digits.test_y // 2) == number).sum())


def test_rotation_turns_counter_clockwise() -> None:
    picture = torch.zeros(1, 28, 28, dtype=torch.uint8)
    picture[0, 4:9, 12:16] = 200  # a block at the top
    picture[0, 12:16, 20:24] = 90  # and one on the right
    for degrees, quarter_turns in ((0.0, 0), (90.0, 1), (180.0, 2)):
        found = rotate(degrees)(picture.flatten(1)).reshape(28, 28)
        assert (found.int() - picture[0].rot90(quarter_turns).int()).abs().max() <= 1
    tilted = rotate(45.0)(picture.flatten(1)).reshape(28, 28)
    assert tilted[:14, :14].sum() > tilted[:14, 14:].sum()  # the block at the top has moved to the left


def test_rotated_mnist_turns_each_task_further() -> None:
    tasks = RotatedMNIST(tasks=3, degrees=90, samples=5).stream(0)
    assert [task.name for task in tasks] == [f"turned by {angle} degrees" for angle in (0, 90, 180)]
    assert tasks[0].test is not None
    digits = mnist.load().test_x[:20].reshape(20, 28, 28)
    assert tasks[2].test is not None
    found = next(iter(tasks[2].test.batches(20, None)))[0].reshape(20, 28, 28)
    assert (found.int() - digits.rot90(2, (1, 2)).int()).abs().max() <= 1


def test_long_pmnist_validates_on_a_tenth_and_standardises() -> None:
    tasks = PMNIST60k(tasks=1, samples=100).stream(0)
    assert tasks[0].val is not None
    assert (len(tasks[0].train), len(tasks[0].val)) == (90, 10)
    prepared = PMNIST60k().input_transform(mnist.load().train_x)
    assert abs(float(prepared.mean())) < 1e-3
    assert float(prepared.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("benchmark", ["cifar100-split", "cifar100-superclass"])
def test_the_cifar_protocol(benchmark: str) -> None:
    config = RunConfig.make(benchmark, "fs-dgpm")
    frozen = benchmark == "cifar100-superclass"
    assert config.training == TrainingConfig(epochs=50, batch_size=64, patience=6, freeze_norms=frozen)
    assert (config.training.lr_divisor, config.training.lr_min) == (2.0, 1e-5)


def test_the_tiny_imagenet_protocol() -> None:
    assert RunConfig.make("tiny-imagenet", "er").training == TrainingConfig(epochs=10, batch_size=10)


@pytest.mark.parametrize(
    ("benchmark", "change", "full"),
    [
        ("cifar100-superclass", [], True),
        ("cifar100-superclass", ["reading=scrambled"], True),
        ("cifar100-superclass", ["order=B"], False),
        ("cifar100-superclass", ["benchmark.tasks=19"], False),
        ("cifar100-split", ["norm=every"], False),
        ("cifar100-split", ["epochs=49"], False),
        ("cifar100-split", ["patience=5"], False),
        ("tiny-imagenet", ["augment=false"], False),
        ("tiny-imagenet", ["method.lr=0.5"], True),
    ],
)
def test_when_published_figures_apply(benchmark: str, change: list[str], full: bool) -> None:
    assert RunConfig.make(benchmark, "fs-dgpm", change).is_canonical is full
