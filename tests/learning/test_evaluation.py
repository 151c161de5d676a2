"""Evaluating permuted tasks together gives the same accuracies as evaluating each alone, and is used only where it is
exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from steppe import ER, Learner, Task
from steppe.data.samples import PixelPermutation, TensorSamples
from steppe.data.transforms import Normalize
from steppe.errors import DataError
from steppe.fast.linear_chain import LinearChain

WIDTH, OUTPUTS = 12, 6


def model(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, 9, bias=bias), nn.ReLU(), nn.Linear(9, 7, bias=bias), nn.Tanh(), nn.Linear(7, OUTPUTS)
    ).double()


def tasks(count: int, samples: int = 40, heads: bool = False) -> list[Task]:
    """Tasks on the same bytes, each with its own permutation and labels."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(256, (samples, WIDTH), generator=generator, dtype=torch.uint8)
    made = []
    for number in range(count):
        head = range(number % 3, number % 3 + 3) if heads else None
        rows = head or range(OUTPUTS)
        y = torch.randint(rows.start, rows.stop, (samples,), generator=generator)
        seen = TensorSamples(x, y, PixelPermutation(torch.randperm(WIDTH, generator=generator)), cache_view=True)
        made.append(Task(seen, seen, head=head, name=f"order {number}"))
    return made


def slow_accuracy(learner: Learner, task: Task) -> float:
    """Sample by sample, through the model itself, from permuted inputs."""
    assert isinstance(task.test, TensorSamples)
    assert isinstance(task.test.view, PixelPermutation)
    rows = task.head or range(OUTPUTS)
    right = 0
    for sample, label in zip(task.test.x, task.test.y, strict=True):
        shown = torch.stack([sample[place] for place in task.test.view.order])[None]
        output = learner.model(learner.network.prepare_inputs(shown))[0].tolist()
        right += max(rows, key=lambda row: output[row]) == int(label)
    return 100 * right / len(task.test)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of permutations that each joint product covers."""
    served: list[int] = []
    found = LinearChain.outputs_for

    def outputs_for(self: LinearChain, x: Tensor, first: Tensor) -> object:
        served.append(len(first) // self.links[0].layer.out_features)
        return found(self, x, first)

    monkeypatch.setattr(LinearChain, "outputs_for", outputs_for)
    return served


@pytest.mark.usefixtures("fast_paths_on")
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_joint_evaluation_equals_one_by_one(products: list[int], heads: bool, bias: bool) -> None:
    listed = tasks(5, heads=heads)
    learner = Learner(model(bias=bias), ER())
    learner.learn(listed[0])
    assert learner.evaluate(listed) == pytest.approx([slow_accuracy(learner, task) for task in listed])
    assert products == [5]
    assert learner.evaluate(listed[3]) == pytest.approx([slow_accuracy(learner, listed[3])])


def test_labels_without_an_output_are_rejected_in_joint_evaluation_too(products: list[int]) -> None:
    good, bad = tasks(2)
    learner = Learner(model(), ER())
    learner.learn(good)
    bad.test.y[3] = OUTPUTS  # type: ignore[union-attr]
    with pytest.raises(DataError, match=f"order 1: the test data has labels 0 to {OUTPUTS}, outside the head"):
        learner.evaluate([good, bad])
    assert products == []


@given(samples=st.integers(1, 60), batch=st.integers(1, 25), at_once=st.integers(1, 6 * WIDTH * 9))
def test_chunk_sizes_make_no_difference(samples: int, batch: int, at_once: int) -> None:
    """Neither the number of samples nor the number of permutations per chunk."""
    listed = tasks(4, samples)
    learner = Learner(model(), ER())
    learner.validate(listed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("steppe.learning.evaluation.BATCH", batch)
        patched.setattr("steppe.learning.evaluation._AT_ONCE", at_once)
        assert learner.evaluate(listed) == pytest.approx([slow_accuracy(learner, task) for task in listed])


@pytest.mark.usefixtures("fast_paths_on")
def test_mixed_with_other_tasks(products: list[int]) -> None:
    """Tasks of another kind, or on other samples, are evaluated separately, and each accuracy is returned at its task's
    position."""
    (one, two), other = tasks(2), tasks(3)[0]
    assert isinstance(one.test, TensorSamples)
    plain = Task((one.test.x, one.test.y), (one.test.x, one.test.y))
    twin = Task(one.train, TensorSamples(one.test.x.clone(), one.test.y, one.test.view))
    listed = [one, plain, other, two, twin]
    learner = Learner(model(), ER())
    learner.validate(listed)
    together = learner.evaluate(listed)
    assert sorted(products) == [1, 1, 2]
    assert together == [learner.evaluate(task)[0] for task in listed]
    assert together[4] == together[0]
    assert len(set(together)) > 1


class Mirrored(ER):
    """ER with its own prediction rule."""

    def start(self, *arguments: object) -> object:  # type: ignore[override]
        method = super().start(*arguments)  # type: ignore[arg-type]
        method.__class__ = type("Own", (type(method),), {"scores": lambda self, x: -self.network.model(x)})
        return method


def ramp(x: Tensor) -> Tensor:
    """A transform that depends on the order of features."""
    return x.double() * torch.arange(WIDTH)


@pytest.mark.usefixtures("fast_paths_on")
@pytest.mark.parametrize(
    ("make", "together"),
    [
        (lambda: Learner(model(), ER()), True),
        (lambda: Learner(model(), ER(), input_transform=Normalize((0.1,), (0.3,))), True),
        (lambda: Learner(model(), ER(), input_transform=ramp), False),
        (lambda: Learner(nn.Sequential(model(), nn.Softmax(1)), ER()), False),
        (lambda: Learner(model(), Mirrored()), False),
    ],
    ids=["bytes", "normalised", "prepared by place", "no chain", "own scores"],
)
def test_joint_evaluation_only_if_order_is_irrelevant(
    products: list[int], make: Callable[[], Learner], together: bool
) -> None:
    listed = tasks(3)
    learner = make()
    learner.validate(listed)
    found = learner.evaluate(listed)
    assert bool(products) == together
    for task, accuracy in zip(listed, found, strict=True):
        assert task.test is not None
        x, y = next(iter(task.test.batches(len(task.test), None)))
        assert accuracy == pytest.approx(100 * float((learner.predict(x) == y).double().mean()))


def test_forward_hooks_see_every_evaluation(products: list[int]) -> None:
    listed = tasks(3)
    learner = Learner(model(), ER())
    learner.validate(listed)
    seen: list[int] = []
    hook = learner.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    learner.evaluate(listed)
    assert seen == [40, 40, 40]
    hook.remove()
    learner.learn(listed[0])  # checks again for the fast path
    forward = learner.model.forward
    learner.model.forward = lambda x: seen.append(-len(x)) or forward(x)  # type: ignore[func-returns-value]
    learner.evaluate(listed)
    assert seen == [40, 40, 40, -40, -40, -40]
    assert not products


def test_cached_views_are_computed_once() -> None:
    calls: list[int] = []

    def view(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x + 1

    x, y = torch.arange(6)[:, None].float(), torch.arange(6)
    samples = TensorSamples(x, y, view, cache_view=True)
    assert [part.flatten().tolist() for part in samples.first(2)] == [[1, 2], [0, 1]]
    assert calls == [2]  # shapes are found from a few samples, without applying the view to all
    calls.clear()
    for _ in range(2):
        walked = list(samples.batches(4, None))
        assert [batch[0].flatten().tolist() for batch in walked] == [[1, 2, 3, 4], [5, 6]]
        walked[0][0].zero_()  # a model may work in place
    assert calls == [6]
    assert samples.take(torch.tensor([2]))[0].tolist() == [[3.0]]
    assert calls == [6, 1]


@pytest.mark.parametrize("own", [ER, Mirrored])
@pytest.mark.parametrize("head", [None, range(2, 5)])
def test_predict_works_in_batches(own: type[ER], head: range | None) -> None:
    """Batches of the same size as in evaluation, so that whatever can be evaluated can be predicted."""
    learner = Learner(nn.Sequential(model(), nn.Softmax(1)), own())
    x, y = torch.randn(1200, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(1200) % 3 + 2
    task = Task((x, y), (x, y), head=head)
    learner.validate(task)
    seen: list[int] = []
    hook = learner.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    found = learner.predict(x, head)
    assert seen == [512, 512, 176]
    [accuracy] = learner.evaluate(task)
    assert seen[3:] == seen[:3]
    hook.remove()
    assert accuracy == 100 * int((found == y).sum()) / 1200
    one_by_one = [int(learner.predict(sample[None], head)) for sample in x[500:530]]
    assert found[500:530].tolist() == one_by_one
    assert len(set(one_by_one)) > 1
    assert learner.predict(x[:0], head).shape == (0,)
