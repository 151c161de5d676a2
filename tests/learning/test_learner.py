"""`Learner` with users' own models and data: coverage, reproducibility, and no side effects."""

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
from own_models import OWN, BreaksAt, Own, Words, bright, mlp
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


def build_model(own: Own, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return own.build().to(dtype)


def trained_learner(
    own: Own, method: MethodConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, tasks: int = 2
) -> tuple[Learner, list[Task]]:
    learner = Learner(build_model(own, dtype), method, seed=seed)
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


def test_time_for_the_memory_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock that only updates and the end of the task advance."""
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
def test_own_models_learn_without_side_effects(own: str, method: str) -> None:
    """The task is learned; afterwards no hook, gradient, mode or global generator has changed."""
    case = OWN[own]
    model = build_model(case)
    model.get_submodule(next(name for name, _ in model.named_children())).eval()
    modes = [module.training for module in model.modules()]
    settings = METHODS[method]()
    if any(isinstance(module, nn.Embedding) for module in model.modules()):  # no layer multiplies the data
        settings = settings.replace(**{"first_inputs": "buffer"} if method == "fs-rgpm" else {})
    learner = Learner(model, settings)
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
    assert float(torch.tensor(1e-310, dtype=torch.float64) / 2) > 0  # denormals are flushed only while learning


@pytest.mark.parametrize("own", OWN)
def test_covered_weights_have_bases_and_excluded_ones_have_none(own: str) -> None:
    case = OWN[own]
    for exclude in ((), sorted(case.newly_covered)):
        learner = Learner(build_model(case), FSDGPM(**BRISK), exclude=exclude)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = learner.learn(Task(case.source(30)))
        left = {name for name in case.covered if name.startswith(tuple(exclude))}
        assert set(result.diagnostics["ranks"]) == case.covered - left
        assert not [str(w.message) for w in caught if "protection" in str(w.message)]


def test_finetune_equals_a_plain_training_loop() -> None:
    """A DataLoader's own order and batches, SGD with momentum, gradient clipping."""
    x, y = bright(8)(23, 0)
    model, twin = (build_model(OWN["mlp"], torch.float64) for _ in range(2))
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
def test_every_form_of_the_data_gives_the_same_weights(form: Callable[[Tensor, Tensor], Any]) -> None:
    x, y = bright(8)(37, 0)
    models = [build_model(OWN["mlp"]) for _ in range(2)]
    for model, source in zip(models, [(x, y), form(x, y)], strict=True):
        learner = Learner(model, ER(**{k: BRISK[k] for k in ("lr", "buffer")}))  # type: ignore[arg-type]
        learner.learn(Task(source, source), epochs=2)
        assert learner.evaluate([Task(source, source)]) == learner.evaluate(Task((x, y), (x, y)))
    assert same(state(models[0]), state(models[1]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", ["mlp", "convolutional", "transformer"])
def test_results_depend_only_on_the_seed(own: str, method: str) -> None:
    """Bit for bit, dropout included, whatever draws from the global generator before or between the tasks."""
    first, _ = trained_learner(OWN[own], METHODS[method]())
    torch.rand(17)
    again = Learner(build_model(OWN[own]), METHODS[method]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for task in range(2):
            torch.manual_seed(99 + task)
            again.learn(Task(OWN[own].source(40, task)), epochs=2)
    assert same(state(first.model), state(again.model))
    other, _ = trained_learner(OWN[own], METHODS[method](), seed=1)
    assert not same(state(first.model), state(other.model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", ["mlp", "convolutional"])
def test_copies_are_independent(own: str, method: str) -> None:
    """A copy learns what the original would, without changing it."""
    learner, _ = trained_learner(OWN[own], METHODS[method]())
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
    single, _ = trained_learner(OWN["mlp"], METHODS[method]())
    double, _ = trained_learner(OWN["mlp"], METHODS[method](), dtype=torch.float64)
    exact = state(double.model)
    for name, value in state(single.model).items():
        torch.testing.assert_close(value.double(), exact[name], rtol=0, atol=2e-4)


def multi_head_task(task: int, n: int = 30) -> Task:
    """Two classes per task, on their own outputs."""
    x, y = bright(8)(n, task)
    head = range(2 * task, 2 * task + 2)
    return Task((x, y % 2 + head.start), (x, y % 2 + head.start), head=head, name=f"task {task}")


def test_multi_head_output_layer_is_detected_and_not_covered() -> None:
    learner = Learner(build_model(OWN["mlp"]), FSDGPM(**BRISK))
    learner.learn(multi_head_task(0), epochs=12)
    unseen = learner.model[4].weight[2:].clone()  # type: ignore[index]
    assert set(learner.learn(multi_head_task(1), epochs=1).diagnostics["ranks"]) == {"0.weight", "2.weight"}
    assert not torch.equal(learner.model[4].weight[2:], unseen)  # type: ignore[index]
    assert learner.evaluate(multi_head_task(0))[0] > 60


def test_predictions_stay_within_the_head() -> None:
    learner = Learner(build_model(OWN["mlp"]), ER())
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
    """No single layer computes the output: it is the sum of two halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.halves = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.halves(torch.relu(self.body(x))).reshape(len(x), 2, 4).sum(1)


def test_undetectable_head_must_be_named() -> None:
    with pytest.raises(ModelError, match=r"exclude=\("):
        Learner(Halved(), FSDGPM(**BRISK)).learn(multi_head_task(0))
    named = Learner(Halved(), FSDGPM(**BRISK), exclude=["halves"])
    assert set(named.learn(multi_head_task(0)).diagnostics["ranks"]) == {"body.weight"}


def test_exclusions() -> None:
    learner = Learner(build_model(OWN["mlp"]), FSDGPM(**BRISK), exclude=("2", "4.weight"))
    assert set(learner.learn(Task(bright(8)(20, 0))).diagnostics["ranks"]) == {"0.weight"}
    with pytest.raises(UsageError, match=r"'5\.weight'"):
        Learner(mlp(), FSDGPM(), exclude=("5.weight",))


def test_embedding_tied_to_a_linear_layer_is_rejected() -> None:
    words, labels = OWN["words"].source(20)
    with pytest.raises(ModelError, match=r"'table\.weight' is shared"):
        Learner(Words(tied=True), FSDGPM()).learn(Task((words, labels)))
    learner = Learner(Words(tied=True), FSDGPM(), exclude=("head",))
    assert set(learner.learn(Task((words, labels))).diagnostics["ranks"]) == {"hidden.weight"}


@pytest.mark.parametrize(("samples", "remarks"), [(25, 0), (500, 1)])
def test_more_basis_samples_than_the_buffer_holds_gives_a_remark(samples: int, remarks: int) -> None:
    learner = Learner(build_model(OWN["mlp"]), FSDGPM(buffer=25, basis_samples=samples))
    result = learner.learn(Task(bright(8)(40, 0)))
    assert len(result.remarks) == remarks
    assert all("500" in remark and "25" in remark for remark in result.remarks)
    assert result.bytes["replay"] == 25 * (8 * 4 + 8 + 8)
    assert result.bytes["bases"] == sum(4 * rank["rank"] * rank["of"] for rank in result.diagnostics["ranks"].values())


def give_up(output: Tensor) -> Tensor:
    raise RuntimeError("the model gave up")


def test_model_error_leaves_weights_of_a_complete_update() -> None:
    """An update takes three forwards, two of them at perturbed weights.

    Whichever of the second update's fails, the weights are those after the first.
    """
    reached = []
    for after in (3, 4, 5):
        torch.manual_seed(1)
        model = BreaksAt(after + 1, give_up)
        model.inner[2].eval()  # type: ignore[index]
        modes, found = [m.training for m in model.modules()], torch.get_rng_state()
        with pytest.raises(RuntimeError, match="gave up"):
            Learner(model, FSDGPM(ascent_lr=0.5)).learn(Task(bright(8)(40, 0)))
        assert no_hooks(model)
        assert [m.training for m in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), found)
        reached.append(state(model))
    torch.manual_seed(1)
    assert not same(reached[0], state(BreaksAt(1, give_up)))
    assert same(reached[0], reached[1])
    assert same(reached[0], reached[2])
