"""Data, models and calls that make learning impossible are rejected with a clear message, before anything is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import steppe
from steppe import DataError, DivergedError, Learner, ModelError, Task, UsageError
from steppe.learning import loop as training

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 4
N, LABELS = X.numpy(), Y.numpy()
METHODS = [steppe.ER(), steppe.FSDGPM(), steppe.FSDGPM(second_order=True), steppe.DERPlusPlus()]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


class Ending(nn.Module):
    """A linear layer, followed by some function of its output."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(6, 4), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


class Each(Dataset[Any]):
    """Creates each sample on access."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> Any:
        return self.make(place), int(Y[place])


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "complex": (lambda o: torch.complex(o, o), r"got torch\.complex64 instead of floating point"),
    "whole numbers": (lambda o: o.round().long(), r"got torch\.int64"),
    "truth values": (lambda o: o > 0, r"got torch\.bool"),
    "sparse": (lambda o: o.to_sparse(), r"got a torch\.sparse_coo tensor"),
    "without values": (lambda o: o.to("meta"), "got a tensor without values"),
    "detached": (lambda o: o.detach(), "has no gradient in any weight.*remove detach"),
    "through NumPy": (lambda o: torch.from_numpy(o.detach().numpy()), "has no gradient"),
    "made new": (lambda o: torch.zeros(len(o), 4), "has no gradient"),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("case", OUTPUTS)
def test_invalid_outputs_are_rejected(case: str, method: steppe.MethodConfig) -> None:
    end, says = OUTPUTS[case]
    with pytest.raises(ModelError, match=says):
        Learner(Ending(end), method).learn(Task((X, Y)))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_non_finite_output_is_rejected(method: steppe.MethodConfig) -> None:
    with pytest.raises(DivergedError, match="the loss became nan"):
        Learner(Ending(lambda o: o * torch.nan), method).learn(Task((X, Y)))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_output_needs_no_gradient_in_eval_mode(method: steppe.MethodConfig) -> None:
    model = Ending(lambda o: o if model.training else o.detach())
    learner = Learner(model, method)
    assert learner.learn(Task((X, Y))).updates == 4
    assert learner.predict(X).shape == (40,)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_models_are_rejected() -> None:
    whole, part = torch.jit.script(mlp()), nn.Sequential(torch.jit.trace(mlp(), X[:2]), nn.Linear(4, 4))
    with pytest.raises(
        ModelError, match=r"the model was created by torch\.jit\.script or torch\.jit\.trace.*original module"
    ):
        Learner(whole, steppe.ER())
    with pytest.raises(ModelError, match=r"the layer '0' was created by torch\.jit"):
        Learner(part, steppe.ER())


def test_meta_models_are_rejected() -> None:
    with pytest.raises(ModelError, match=r"'0\.weight' is on the device 'meta'.*to_empty"):
        Learner(mlp().to("meta"), steppe.ER())
    half = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).to("meta"), nn.Linear(8, 4))
    with pytest.raises(ModelError, match=r"'1\.weight' is on the device 'meta'"):
        Learner(half, steppe.ER())


MASKED = np.ma.masked_array(N, mask=N[:, :1] == N)  # the first number of each sample
DATA: dict[str, tuple[Any, Any, str]] = {
    "float8": (X.to(torch.float8_e4m3fn), Y, r"type torch\.float8_e4m3fn, which torch only stores.*half"),
    "the other float8": (X.to(torch.float8_e5m2), Y, r"type torch\.float8_e5m2"),
    "without values": (X.to("meta"), Y, "on the device 'meta', which has no values"),
    "labels without values": (X, Y.to("meta"), "on the device 'meta', which has no values"),
    "masked": (MASKED, LABELS, r"masked array with \d+ masked entries.*filled"),
    "masked labels": (N, np.ma.masked_array(LABELS, mask=LABELS == 1), "with 10 masked entries"),
    "objects": (N.astype(object), LABELS, "cannot be converted to tensors.*pass arrays or tensors of numbers"),
}


@pytest.mark.parametrize("case", DATA)
def test_invalid_data_is_rejected(case: str) -> None:
    x, y, says = DATA[case]
    with pytest.raises(DataError, match=f"june: the test data {says}|june: the test data .*{says}"):
        Task((X, Y), (x, y), name="june")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_data_is_rejected() -> None:
    x = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
    with pytest.raises(DataError, match=r"training data has numbers of type torch\.quint8.*tensor\.dequantize"):
        Task((x, Y))


@pytest.mark.parametrize("case", [case for case in DATA if not case.endswith("labels") and "labels" not in case])
def test_invalid_inputs_are_rejected_in_predict(case: str) -> None:
    x, _, says = DATA[case]
    learner = Learner(mlp(), steppe.ER())
    learner.learn(Task((X, Y)))
    with pytest.raises(DataError, match=f"the inputs to predict .*{says}"):
        learner.predict(x)


@pytest.mark.parametrize(
    "x", [None, "abc", X > 0, X.long(), X * 1j, X.to_sparse()], ids=["None", "text", "bool", "int", "complex", "sparse"]
)
def test_inputs_that_the_model_rejects(x: Any) -> None:
    learner = Learner(mlp(), steppe.ER())
    learner.learn(Task((X, Y)))
    with pytest.raises(DataError, match="the inputs to predict"):
        learner.predict(x)


@pytest.mark.parametrize(
    "x", [N[::-1].copy()[::-1], N[:, ::-1].copy()[:, ::-1], N.astype(">f4"), np.ma.masked_array(N)], ids=str
)
def test_arrays_of_any_memory_layout_are_accepted(x: Any) -> None:
    """Reversed, with another byte order, or masked arrays without masked entries: the numbers are the same."""
    found = []
    for given in (X, x):
        torch.manual_seed(0)
        learner = Learner(mlp(), steppe.ER())
        learner.learn(Task((given, LABELS[::-1].copy()[::-1])))
        found.append([*learner.model.parameters(), learner.predict(given)])
    assert all(map(torch.equal, *found))


SAMPLES: dict[str, tuple[Callable[[int], Any], str]] = {
    "masked": (lambda place: MASKED[place], "masked array"),
    "backwards": (lambda place: N[place][::-1], "cannot be collated into a batch.*negative"),
    "without values": (lambda place: X[place].to("meta"), "on the device 'meta'"),
    "float8": (lambda place: X[place].to(torch.float8_e4m3fn), "which torch only stores"),
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("case", SAMPLES)
def test_invalid_dataset_samples_are_rejected(case: str, loaded: bool) -> None:
    make, says = SAMPLES[case]
    data: Any = DataLoader(Each(make), batch_size=10) if loaded else Each(make)
    learner = Learner(mlp(), steppe.ER())
    with pytest.raises(DataError, match=f"june: the training data .*{says}"):
        learner.learn(Task(data, name="june"))
    assert learner.num_tasks == 0


AUGMENTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda x: x[:, :5], r"a tensor of shape \(10, 5\) for inputs of shape \(10, 6\)"),
    "more dimensions": (lambda x: x[:, None], r"a tensor of shape \(10, 1, 6\) for inputs of shape \(10, 6\)"),
    "another type": (lambda x: x.double(), r"a tensor of type torch\.float64 for inputs of type torch\.float32"),
    "bytes": (lambda x: x.byte(), r"a tensor of type torch\.uint8 for inputs of type torch\.float32"),
    "complex": (lambda x: x * 1j, r"a tensor of type torch\.complex64 for inputs of type torch\.float32"),
    "no values": (lambda x: x.to("meta"), "a tensor on meta for inputs on cpu"),
    "sparse": (lambda x: x.to_sparse(), r"a torch\.sparse_coo tensor for inputs that are torch\.strided"),
}


@pytest.mark.parametrize("method", [steppe.Finetune(), steppe.ER()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("case", AUGMENTS)
def test_invalid_variants_are_rejected(case: str, method: steppe.MethodConfig) -> None:
    augment, says = AUGMENTS[case]
    learner = Learner(mlp(), method)
    task = Task((X, Y), augment=lambda x, generator: augment(x), name="june")
    with pytest.raises(DataError, match=f"june: `augment` returned {says}; it must return"):
        learner.learn(task)
    assert learner.num_tasks == 0
    learner.learn(Task((X, Y)))


def test_in_place_augment_does_not_change_a_loaders_batches() -> None:
    batches = [(X[:20].clone(), Y[:20]), (X[20:].clone(), Y[20:])]
    loader: Any = DataLoader(range(40), batch_size=20, collate_fn=lambda parts: batches[parts[0] // 20])  # type: ignore[arg-type]
    Learner(mlp(), steppe.ER()).learn(Task(loader, augment=lambda x, generator: x.mul_(2)), epochs=3)
    assert torch.equal(torch.cat([x for x, _ in batches]), X)


@pytest.mark.parametrize("chain", [False, True])
def test_non_finite_outputs_have_no_accuracy(chain: bool) -> None:
    """argmax returned output 0 for NaN, which a fourth of the labels are."""
    model = mlp() if chain else Ending(lambda o: o)
    learner = Learner(model, steppe.ER())
    learner.learn(Task((X, Y)))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(DivergedError, match=r"june: the model's output on some of the test data is NaN"):
        learner.evaluate(Task((X, Y), (X, Y), name="june"))


def test_non_finite_outputs_on_permuted_digits() -> None:
    """They are evaluated together, in a separate code path."""
    tasks = steppe.PMNIST(tasks=2, samples=20, test_samples=30).stream(seed=0)
    learner = Learner(nn.Sequential(nn.Linear(784, 10)), steppe.ER())
    learner.learn(tasks[0])
    with torch.no_grad():
        next(learner.model.parameters()).fill_(torch.nan)
    with pytest.raises(DivergedError, match=r"permutation 1: the model's output"):
        learner.evaluate(tasks)


@pytest.fixture
def report_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)


@pytest.mark.usefixtures("report_every_batch")
@pytest.mark.parametrize("call", ["learn", "validate", "load_state_dict"])
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: type(method).__name__)
def test_learner_rejects_nested_calls_while_learning(call: str, method: steppe.MethodConfig) -> None:
    learner = Learner(mlp(), method)

    def callback(event: object) -> None:
        if call == "load_state_dict":
            learner.load_state_dict(learner.state_dict())
        else:
            getattr(learner, call)(Task((X, Y)))

    with pytest.raises(UsageError, match=r"is learning a task; call .* after `learn` has returned"):
        learner.learn(Task((X, Y)), callback=callback)
    assert learner.num_tasks == 1  # as with any error in a callback
    learner.learn(Task((X, Y)))


@pytest.mark.usefixtures("report_every_batch")
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: type(method).__name__)
def test_predicting_and_saving_while_learning(method: steppe.MethodConfig, tmp_path: Path) -> None:
    found = []
    for asks in (True, False):
        torch.manual_seed(0)
        learner = Learner(mlp(), method)

        def callback(event: object, learner: Learner = learner, asks: bool = asks) -> None:
            if asks:
                learner.evaluate(Task((X, Y), (X, Y)))
                learner.predict(X)
                learner.save(tmp_path / "learner")

        learner.learn(Task((X, Y)), epochs=2, callback=callback)
        found.append([*learner.model.parameters()])
    assert all(map(torch.equal, *found))
