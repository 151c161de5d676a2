"""Inputs that are dictionaries and tuples of tensors, in every method; outputs in every form; resumed to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nest_models import OUTPUTS, TextModel, Tokens, dict_task, ragged_task, texts
from small_tasks import settings_of
from torch import Tensor, nn

import steppe
from steppe import ER, DataError, Learner, Padding, Task
from steppe.methods.base import MethodConfig
from steppe.registry import METHODS
from steppe.tensors.batch import Batch
from steppe.tensors.nest import leaves

PADDING = Padding(0, mask="attention_mask", lengths="lengths")


def settings(method: str) -> MethodConfig:
    """Small buffers, and a rate at which twelve updates change something."""
    values = {"buffer": 12, "memory": 12, "basis_samples": 12, "exemplars": 12, "samples": 8, "reference_samples": 6}
    made = settings_of(method, "cifar100-superclass")
    own = {name: value for name, value in values.items() if name in made.as_dict()}
    return made.replace(**own, **({"tasks": 3} if "tasks" in made.as_dict() else {}))


def learner_of(method: str, form: str) -> Learner:
    exclude = ["classifier"] if method in ("fs-dgpm", "gpm", "sgp") else []
    return Learner(TextModel(), settings(method), exclude=exclude, padding=PADDING if form == "ragged" else None)


TASKS: dict[str, Callable[..., Task]] = {"dict": dict_task, "ragged": ragged_task}


class StopHereError(Exception):
    """What a callback raises."""


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_nests_and_resumes_to_the_bit(method: str, form: str, tmp_path: Path) -> None:
    """Saved in the second task by the callback and loaded, it ends with the same bits."""
    joint = METHODS[method].settings.schedule != "sequential"
    tasks = [TASKS[form](number, head=True) for number in range(2)]
    learner, saved = learner_of(method, form), tmp_path / "learner"
    if not joint:
        learner.learn(tasks[0], batch_size=5)
    given: Any = tasks if joint else tasks[1]
    result = learner.learn(given, batch_size=5, epochs=2)
    assert result.updates == (20 if joint else 10)
    assert all(size >= 0 for size in result.bytes.values())
    accuracies = learner.evaluate(tasks)

    again = learner_of(method, form)
    if not joint:
        again.learn(tasks[0], batch_size=5)
    place = 0

    def stop(event: Any) -> None:
        nonlocal place
        place += 1
        if place == 1:  # after the first epoch
            again.save(saved)
            raise StopHereError

    with pytest.raises(StopHereError):
        again.learn(given, batch_size=5, epochs=2, callback=stop)
    resumed = steppe.load(saved, TextModel())
    resumed.learn(given, batch_size=5, epochs=2)
    assert_same(weights(resumed), weights(learner))
    assert resumed.evaluate(tasks) == accuracies
    _assert_states_equal(resumed.state_dict()["method"], learner.state_dict()["method"])


def _assert_states_equal(one: Any, other: Any) -> None:
    """Bit by bit, inside lists, dictionaries and batches."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Batch):
        for mine, its in zip(leaves([one.x, one.y, one.task]), leaves([other.x, other.y, other.task]), strict=True):
            rows = (mine.rows, its.rows) if isinstance(mine, steppe.Ragged) else ([mine], [its])
            assert len(rows[0]) == len(rows[1])
            assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_states_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            _assert_states_equal(mine, its)
    else:
        assert one == other


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", TASKS)
@pytest.mark.parametrize("method", ["er", "fs-dgpm", "gem", "icarl", "der++", "gpm"])
def test_saved_between_any_two_batches(method: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an epoch too, where the batches that were seen are skipped."""
    monkeypatch.setattr("steppe.learning.loop._REPORT_EVERY", -1.0)
    tasks = [TASKS[form](number, head=True) for number in range(2)]
    learner = learner_of(method, form)
    learner.learn(tasks[0], batch_size=5)
    learner.learn(tasks[1], batch_size=5, callback=lambda event: learner.save(tmp_path / type(event).__name__))
    other = learner_of(method, form)
    other.learn(tasks[0], batch_size=5)
    count = 0

    def stop(event: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            other.save(tmp_path / "middle")
            raise StopHereError

    with pytest.raises(StopHereError):
        other.learn(tasks[1], batch_size=5, callback=stop)
    resumed = steppe.load(tmp_path / "middle", TextModel())
    resumed.learn(tasks[1], batch_size=5)
    assert_same(weights(resumed), weights(learner))


@pytest.mark.parametrize("form", ["tuple", "tensor", "object"])
def test_outputs_of_every_form_teach_alike(form: str) -> None:
    learners = [Learner(TextModel(each), ER(lr=0.1)) for each in ("output", form)]
    for learner in learners:
        for number in range(2):
            learner.learn(dict_task(number))
    assert_same(*(weights(learner) for learner in learners))
    assert len({tuple(learner.evaluate(dict_task(0))) for learner in learners}) == 1


def test_a_dictionary_teaches_what_a_tuple_and_a_tensor_do() -> None:
    """With a mask of ones, `model(ids)`, `model(ids, mask)` and `model(input_ids=…, attention_mask=…)` are one."""
    ids, _, y = texts(40, 0, 0)
    ones = torch.ones_like(ids)
    inputs: list[Any] = [ids, (ids, ones), [("input_ids", ids), ("attention_mask", ones)]]
    forms = [inputs[0], inputs[1], dict(inputs[2]), Tokens(inputs[2])]
    found = []
    for x in forms:
        learner = Learner(TextModel(), ER(lr=0.1, buffer=10))
        learner.learn(Task((x, y), (x, y)))
        found.append(weights(learner))
        assert learner.evaluate(Task((x, y), (x, y)))[0] == 100.0 * int((learner.predict(x) == y).sum()) / len(y)
    for other in found[1:]:
        assert_same(found[0], other)


def test_predictions_and_memory_of_dictionaries() -> None:
    learner = Learner(TextModel(), ER(lr=0.3, buffer=7))
    result = learner.learn(dict_task(0, count=200), epochs=5)
    ids, mask, y = texts(700, 0, 3)  # more than are predicted at once
    predicted = learner.predict({"input_ids": ids, "attention_mask": mask}, head=range(2))
    assert float((predicted == y).double().mean()) > 0.9
    assert learner.predict_proba({"attention_mask": mask, "input_ids": ids}).shape == (700, OUTPUTS)
    assert result.bytes["replay"] == 7 * (2 * 6 * 8 + 8 + 8)  # two inputs of six int64, a label and a task
    with torch.no_grad():
        expected = learner.model.eval()(ids, mask).logits
    assert torch.equal(learner.outputs({"input_ids": ids, "attention_mask": mask}), expected)


def test_input_transform_gets_and_returns_nests() -> None:
    seen: list[Any] = []

    def transform(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        seen.append(sorted(x))
        return x["input_ids"], x["attention_mask"]

    plain, transformed = Learner(TextModel(), ER(lr=0.1)), Learner(TextModel(), ER(lr=0.1), input_transform=transform)
    for learner in (plain, transformed):
        for number in range(2):
            learner.learn(dict_task(number, kind=Tokens))
    assert_same(weights(plain), weights(transformed))
    assert {tuple(keys) for keys in seen} == {("attention_mask", "input_ids")}


def test_augment_gets_and_returns_nests() -> None:
    ids, mask, y = texts(20, 0, 0)

    def shuffled(x: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        order = torch.randperm(x["input_ids"].shape[1], generator=generator)
        return {name: part[:, order] for name, part in x.items()}

    learner = Learner(TextModel(), ER())
    learner.learn(Task(({"input_ids": ids, "attention_mask": mask}, y), augment=shuffled))
    for augment in (
        lambda x, generator: x["input_ids"],
        lambda x, generator: {**x, "input_ids": x["input_ids"][:, :2]},
    ):
        with pytest.raises(DataError, match="`augment` returned"):
            learner.learn(Task(({"input_ids": ids, "attention_mask": mask}, y), augment=augment))


IDS, MASK, Y = texts(12, 0, 0)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (lambda: ({"input_ids": IDS, "attention_mask": MASK[:5]}, Y), "has 12 samples in 'input_ids' but 5 in"),
    "labels": (lambda: ({"input_ids": IDS}, Y[:3]), r"'input_ids': \(12, 6\)\} and labels of shape \(3,\)"),
    "text": (lambda: ({"input_ids": IDS, "text": ["a"] * 12}, Y), "cannot be converted to tensors"),
    "nothing": (lambda: ({}, Y), "has no tensor"),
    "none": (lambda: ({"input_ids": IDS, "attention_mask": None}, Y), "cannot be converted to tensors"),
    "key": (lambda: ({("a",): IDS}, Y), "has an input with the key"),
    "NaN": (lambda: ({"a": torch.tensor([1.0, torch.nan])}, Y[:2]), "NaN or infinity in the input 'a', .* sample 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_nests_that_are_no_task(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(DataError, match=f"digits: the training data .*{message}"):
        Task(make(), name="digits")


def test_tasks_of_different_structure_are_refused_before_work() -> None:
    learner = Learner(TextModel(), ER())
    learner.learn(dict_task(0))
    before = weights(learner)
    only = Task(({"input_ids": IDS}, Y), name="second")
    with pytest.raises(
        DataError, match=r"second: inputs are the parts 'input_ids', but .* 'attention_mask', 'input_ids'"
    ):
        learner.learn(only)
    longer = Task(({"input_ids": IDS[:, :4], "attention_mask": MASK[:, :4]}, Y), name="third")
    with pytest.raises(DataError, match=r"third: inputs are torch.int64 of shape \(4,\) in 'attention_mask'"):
        learner.learn(longer)
    test = Task(({"input_ids": IDS, "attention_mask": MASK}, Y), ({"input_ids": IDS}, Y), name="fourth")
    with pytest.raises(DataError, match="fourth: test inputs have shape"):
        learner.learn(test)
    with pytest.raises(DataError, match="the inputs to predict have the parts 'input_ids', but the model was trained"):
        learner.predict({"input_ids": IDS})
    with pytest.raises(DataError, match="the inputs to predict have a single tensor"):
        learner.predict(IDS)
    assert_same(before, weights(learner))
    with pytest.raises(DataError, match=r"do not fit the model: .*unexpected keyword argument 'words'"):
        Learner(TextModel(), ER()).learn(Task(({"words": IDS}, Y)))


class InPlace(nn.Module):
    """Overwrites its input, in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits: Tensor = self.head(a.relu_() + b if self.training else a.relu() + b)
        return logits


def test_a_model_that_works_in_place_gets_copies() -> None:
    torch.manual_seed(0)
    x = {"a": torch.randn(20, 3), "b": torch.randn(20, 3)}
    before = {name: part.clone() for name, part in x.items()}
    learner = Learner(InPlace(), ER())
    learner.learn(Task((x, torch.arange(20) % 2)), epochs=2)
    assert_same(before, x)
    method: Any = learner._method
    stored = method.replay.state_dict()["stored"]
    rows = {tuple(row) for row in before["a"].tolist()}
    assert all(tuple(row) in rows for row in stored.x["a"].tolist())


@pytest.mark.parametrize("form", TASKS)
def test_a_stream_of_batches_may_be_nests(form: str, tmp_path: Path) -> None:
    """Observed batch by batch, and resumed after the third, to the same bits."""
    learner = learner_of("er", form)
    pairs = []
    for number in range(6):
        data: Any = TASKS[form](number % 2).train
        pairs.append(data.take(torch.arange(5)))
    for number, pair in enumerate(pairs):
        if number == 3:
            learner.save(tmp_path / "learner")
        learner.observe(pair, update_every=12)
    resumed = steppe.load(tmp_path / "learner", TextModel())
    for pair in pairs[3:]:
        resumed.observe(pair, update_every=12)
    assert_same(weights(resumed), weights(learner))
