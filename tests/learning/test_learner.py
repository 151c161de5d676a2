"""The front door: users' own models and data, what is covered, reproducibility, and nothing left behind."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from own_models import OWN, Own, Words, bright, mlp
from reference import no_hooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steppe import ER, FSDGPM, DataError, Finetune, Learner, ModelError, Task, UsageError
from steppe.methods.base import MethodConfig

BRISK = {"lr": 0.05, "buffer": 40, "basis_samples": 30, "ascent_lr": 0.02}
METHODS: dict[str, Callable[[], MethodConfig]] = {
    "fs-dgpm": lambda: FSDGPM(**BRISK),
    "fs-sgpm chunked": lambda: FSDGPM(**BRISK, importance="spectral", ascent_form="chunked"),
    "fs-rgpm": lambda: FSDGPM(
        **BRISK, importance="ridge", ascent_form="chunked", first_inputs="all", replay_weight=1.0, average=0.9
    ),
    "fs-er": lambda: ER(lr=0.05, buffer=40, ascent_steps=2, ascent_lr=0.02),
}


def built(own: Own, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return own.build().to(dtype)


def learnt(
    own: Own, method: MethodConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, tasks: int = 2
) -> tuple[Learner, list[Task]]:
    learner = Learner(built(own, dtype), method, seed=seed)
    stream = [Task(own.source(40, t), own.source(16, t), name=f"task {t}") for t in range(tasks)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for task in stream:
            learner.learn(task, epochs=2)
    return learner, stream


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_time_spent_on_the_memory_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only updates and the task's end move on."""
    learner, task = Learner(mlp(), Finetune()), Task(bright(8)(20, 0))
    method, now = learner.validate(task), 0.0
    observe, end_task = method.observe, method.end_task

    def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slower(*given: Any) -> Any:
            nonlocal now
            now += seconds
            return work(*given)

        return slower

    monkeypatch.setattr(method, "observe", taking(1.0, observe))
    monkeypatch.setattr(method, "end_task", taking(100.0, end_task))
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert learner.learn(task, batch_size=10).seconds == {"train": 2.0, "memory": 100.0}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", OWN)
def test_own_models_learn_and_are_left_clean(own: str, method: str) -> None:
    """The task is learnt; afterwards no hook, no gradient, no change of mode, no change of any global generator."""
    case = OWN[own]
    model = built(case)
    model.get_submodule(next(name for name, _ in model.named_children())).eval()
    modes = [module.training for module in model.modules()]
    learner = Learner(model, METHODS[method]())
    task = Task(case.source(80), case.source(16))
    found = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        learner.learn(task, epochs=12)
    reached = state(model)
    accuracy = learner.evaluate(task)
    assert same(reached, state(model))
    assert accuracy[0] > 75
    assert torch.equal(torch.get_rng_state(), found[0])
    assert random.getstate() == found[1]
    assert np.random.get_state()[1].tolist() == found[2]  # type: ignore[index,union-attr]
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert no_hooks(model)
    assert float(torch.tensor(1e-310, dtype=torch.float64) / 2) > 0  # denormals are flushed while learning only


@pytest.mark.parametrize("own", OWN)
def test_covered_weights_have_bases_and_unprotected_ones_are_named(own: str) -> None:
    case = OWN[own]
    learner = Learner(built(case), FSDGPM(**BRISK))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = learner.learn(Task(case.source(30)))
    assert set(result.diagnostics["ranks"]) == case.covered
    said = [str(w.message) for w in caught if "protection" in str(w.message)]
    assert len(said) == (case.unprotected is not None)
    assert case.unprotected is None or case.unprotected in said[0]


def test_finetune_is_a_plain_training_loop() -> None:
    """A DataLoader's own order and batches, SGD with momentum, the gradient's norm clipped: as one would write it."""
    x, y = bright(8)(23, 0)
    model, twin = (built(OWN["mlp"], torch.float64) for _ in range(2))
    Learner(model, Finetune(lr=0.3, clip=0.2)).learn(Task(DataLoader(TensorDataset(x, y), batch_size=6)), epochs=2)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    for _ in range(2):
        for start in range(0, 23, 6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(x[start : start + 6].double()), y[start : start + 6]).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.2)
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x.numpy(), y.numpy()),
        lambda x, y: [x, y.int()],
        TensorDataset,
        lambda x, y: torch.utils.data.Subset(TensorDataset(x, y), range(len(y))),
    ],
    ids=["numpy", "list, int32", "dataset", "subset"],
)
def test_the_same_data_in_another_form_gives_the_same_weights(form: Callable[[Tensor, Tensor], Any]) -> None:
    x, y = bright(8)(37, 0)
    models = [built(OWN["mlp"]) for _ in range(2)]
    for model, source in zip(models, [(x, y), form(x, y)], strict=True):
        learner = Learner(model, ER(**{k: BRISK[k] for k in ("lr", "buffer")}))  # type: ignore[arg-type]
        learner.learn(Task(source, source), epochs=2)
        assert learner.evaluate([Task(source, source)]) == learner.evaluate(Task((x, y), (x, y)))
    assert same(state(models[0]), state(models[1]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", ["mlp", "convolutional", "transformer"])
def test_the_seed_alone_decides(own: str, method: str) -> None:
    """Bit for bit, dropout included, whatever the global generator did before or between the tasks."""
    first, _ = learnt(OWN[own], METHODS[method]())
    torch.rand(17)
    again = Learner(built(OWN[own]), METHODS[method]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for task in range(2):
            torch.manual_seed(99 + task)
            again.learn(Task(OWN[own].source(40, task)), epochs=2)
    assert same(state(first.model), state(again.model))
    other, _ = learnt(OWN[own], METHODS[method](), seed=1)
    assert not same(state(first.model), state(other.model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", ["mlp", "convolutional"])
def test_a_copy_learns_on_by_itself(own: str, method: str) -> None:
    """The same as the original would, and without touching it."""
    learner, _ = learnt(OWN[own], METHODS[method]())
    clone_tree, before = copy.deepcopy(learner), state(learner.network.model)
    task = Task(OWN[own].source(40, 2), name="task 2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        clone_tree.learn(task)
        assert same(before, state(learner.network.model))
        learner.learn(task)
    assert same(state(clone_tree.network.model), state(learner.network.model))
    assert not same(before, state(learner.network.model))


@pytest.mark.parametrize("method", METHODS)
def test_float32_is_close_to_float64(method: str) -> None:
    single, _ = learnt(OWN["mlp"], METHODS[method]())
    double, _ = learnt(OWN["mlp"], METHODS[method](), dtype=torch.float64)
    exact = state(double.model)
    for name, value in state(single.model).items():
        torch.testing.assert_close(value.double(), exact[name], rtol=0, atol=2e-4)


def headed(task: int, n: int = 30) -> Task:
    """Two classes per task, on rows of their own."""
    x, y = bright(8)(n, task)
    head = range(2 * task, 2 * task + 2)
    return Task((x, y % 2 + head.start), (x, y % 2 + head.start), head=head, name=f"task {task}")


def test_a_multi_heads_head_is_found_and_left_uncovered() -> None:
    learner = Learner(built(OWN["mlp"]), FSDGPM(**BRISK))
    learner.learn(headed(0), epochs=12)
    unseen = learner.model[4].weight[2:].clone()  # type: ignore[index]
    assert set(learner.learn(headed(1), epochs=1).diagnostics["ranks"]) == {"0.weight", "2.weight"}
    assert not torch.equal(learner.model[4].weight[2:], unseen)  # type: ignore[index]
    assert learner.evaluate(headed(0))[0] > 60


def test_predictions_stay_within_the_head() -> None:
    learner = Learner(built(OWN["mlp"]), ER())
    x, y = bright(8)(50, 0)
    with torch.no_grad():
        output = learner.model(x)
    for head in (None, range(1, 3)):
        rows = head or range(4)
        guesses = [max(rows, key=lambda row, scores=scores: scores[row]) for scores in output.tolist()]
        assert learner.predict(x, head).tolist() == guesses
        inside = [k for k in range(50) if int(y[k]) in rows]
        right = sum(guesses[k] == int(y[k]) for k in inside)
        test = Task((x, y), (x[inside], y[inside]), head=head)
        assert learner.evaluate(test) == [pytest.approx(100 * right / len(inside))]
    with pytest.raises(DataError, match="no test data"):
        learner.evaluate(Task((x, y)))


class Halved(nn.Module):
    """No layer gives the output: it is the sum of two halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.halves = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.halves(torch.relu(self.body(x))).reshape(len(x), 2, 4).sum(1)


def test_a_head_that_cannot_be_found_must_be_named() -> None:
    with pytest.raises(ModelError, match=r"exclude=\("):
        Learner(Halved(), FSDGPM(**BRISK)).learn(headed(0))
    named = Learner(Halved(), FSDGPM(**BRISK), exclude=["halves"])
    assert set(named.learn(headed(0)).diagnostics["ranks"]) == {"body.weight"}


def test_exclusions() -> None:
    learner = Learner(built(OWN["mlp"]), FSDGPM(**BRISK), exclude=("2", "4.weight"))
    assert set(learner.learn(Task(bright(8)(20, 0))).diagnostics["ranks"]) == {"0.weight"}
    with pytest.raises(UsageError, match=r"'5\.weight'"):
        Learner(mlp(), FSDGPM(), exclude=("5.weight",))


def test_a_table_tied_to_a_linear_layer_is_refused() -> None:
    words, labels = OWN["words"].source(20)
    with pytest.raises(ModelError, match=r"'table\.weight' is shared"):
        Learner(Words(tied=True), FSDGPM()).learn(Task((words, labels)))
    learner = Learner(Words(tied=True), FSDGPM(), exclude=("head",))
    assert set(learner.learn(Task((words, labels))).diagnostics["ranks"]) == {"hidden.weight"}


@pytest.mark.parametrize(("samples", "remarks"), [(25, 0), (500, 1)])
def test_more_basis_samples_than_the_buffer_holds_is_only_remarked(samples: int, remarks: int) -> None:
    learner = Learner(built(OWN["mlp"]), FSDGPM(buffer=25, basis_samples=samples))
    result = learner.learn(Task(bright(8)(40, 0)))
    assert len(result.remarks) == remarks
    assert all("500" in remark and "25" in remark for remark in result.remarks)
    assert result.bytes["replay"] == 25 * (8 * 4 + 8 + 8)
    assert result.bytes["bases"] == sum(4 * rank["rank"] * rank["of"] for rank in result.diagnostics["ranks"].values())


class Failing(nn.Module):
    """A forward that fails in training after some calls."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.inner, self.left = mlp(), after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        if self.left < 0:
            raise RuntimeError("the model gave up")
        return self.inner(x)


def test_an_error_within_the_model_leaves_nothing_behind() -> None:
    """An update takes three forwards, two of them at shifted weights. Whichever of the second update's fails, the
    weights are those after the first.
    """
    reached = []
    for after in (3, 4, 5):
        torch.manual_seed(1)
        model = Failing(after)
        model.inner[2].eval()  # type: ignore[index]
        modes, found = [m.training for m in model.modules()], torch.get_rng_state()
        with pytest.raises(RuntimeError, match="gave up"):
            Learner(model, FSDGPM(ascent_lr=0.5)).learn(Task(bright(8)(40, 0)))
        assert no_hooks(model)
        assert [m.training for m in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), found)
        reached.append(state(model))
    torch.manual_seed(1)
    assert not same(reached[0], state(Failing(0)))
    assert same(reached[0], reached[1])
    assert same(reached[0], reached[2])
