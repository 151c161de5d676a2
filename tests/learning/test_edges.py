"""Edge cases of models and data that once failed silently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe.errors import DataError
from steppe.methods.parts.sharpness import SharpnessAscent
from steppe.network.network import Network
from steppe.projection.hooks import capture_inputs
from steppe.projection.importance import Ones, Spectral
from steppe.projection.layers import projected_weights
from steppe.projection.memory import GradientMemory
from steppe.tensors.batch import Batch

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 4


class TwoOffsets(nn.Module):
    """Two parameters of the same shape whose gradients are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (self.a + self.b)


def test_gradients_that_share_memory_are_not_scaled_twice() -> None:
    model = TwoOffsets()
    network = Network(model)
    network.heads.add(None, 4)
    batch = Batch(X, Y, torch.zeros_like(Y))
    _, g = network.loss_and_grad(batch)
    seen = []
    shifted = network.loss_and_grad

    def spy(part: Batch, at: dict[str, Tensor] | None = None, **options: object) -> object:
        seen.append(None if at is None else {name: w - network.trainable[name].detach() for name, w in at.items()})
        return shifted(part, at, **options)  # type: ignore[arg-type]

    network.loss_and_grad = spy  # type: ignore[assignment, method-assign]
    SharpnessAscent(lr=0.1, steps=1)(network, GradientMemory(Ones()), batch, batch)
    assert seen[-1] is not None
    for name in ("a", "b"):
        torch.testing.assert_close(seen[-1][name], 0.1 * g[name])


def test_excluding_one_layer_excludes_its_shared_weight() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), second, nn.Linear(6, 4))
    assert set(projected_weights(model, ("2",))) == {"3.weight"}


def test_failed_task_does_not_affect_the_next() -> None:
    """Its head and samples are dropped."""
    learner = steppe.Learner(nn.Linear(6, 4), steppe.ER(), seed=0)
    learner.learn(steppe.Task((X, Y % 2), (X, Y % 2), head=range(0, 2), name="good"))
    bad = TensorDataset(X, torch.where(torch.arange(40) == 39, 3, Y % 2))
    with pytest.raises(DataError, match="bad: the training data has labels"):
        learner.learn(steppe.Task(bad, head=range(0, 2), name="bad"))
    later = steppe.Task((X, Y % 2 + 2), (X, Y % 2 + 2), head=range(2, 4), name="later")
    learner.learn(later, epochs=30)
    assert learner.evaluate(later)[0] > 55


def test_excluding_the_head_does_not_make_the_previous_layer_the_head() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    learner = steppe.Learner(model, steppe.FSDGPM(), exclude=("2",))
    learnt = learner.learn(steppe.Task((X, Y % 2), head=range(0, 2)))
    assert set(learnt.diagnostics["ranks"]) == {"0.weight", "1.weight"}


def test_every_unprotected_matrix_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Bilinear(6, 6, 5)
            self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
            self.places = nn.Parameter(torch.zeros(1, 5))
            self.head = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.pairs(x, x) + self.places))

    with pytest.warns(UserWarning, match=r"places, pairs.weight, norm.parametrizations.weight.original$"):
        steppe.Learner(Model(), steppe.FSDGPM()).learn(steppe.Task((X, Y)))


class Rebinding(nn.Module):
    """Updates its running statistics by assigning a new tensor to the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.layer(x)


@pytest.mark.parametrize("second_order", [False, True])
def test_reassigned_buffer_is_updated_once_per_update(second_order: bool) -> None:
    model = Rebinding()
    learnt = steppe.Learner(model, steppe.FSDGPM(second_order=second_order)).learn(steppe.Task((X, Y)), batch_size=8)
    assert float(model.seen) == learnt.updates == 5


def test_layer_with_all_zero_inputs_gets_no_basis() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Threshold(1e9, 0.0), nn.Linear(5, 4))
    memory = GradientMemory(Spectral(2.0), projected_weights(model))
    memory.rebuild(Network(model), X, 0.99)
    assert set(memory.projectors) == {"0.weight"}


@pytest.mark.parametrize("part", ["train", "test"])
def test_loader_without_batches_is_rejected(part: str) -> None:
    empty = DataLoader(TensorDataset(X[:3], Y[:3]), batch_size=8, drop_last=True)
    task = steppe.Task(empty) if part == "train" else steppe.Task((X, Y), empty)
    learner = steppe.Learner(nn.Linear(6, 4), steppe.Finetune())
    if part == "test":
        learner.learn(task)
    with pytest.raises(DataError, match="yields no batch"):
        (learner.learn if part == "train" else learner.evaluate)(task)


@pytest.mark.parametrize("x", [(X * 10).to(torch.uint8), X.double(), X.reshape(40, 2, 3)])
def test_inputs_of_another_shape_or_dtype_are_rejected(x: Tensor) -> None:
    learner = steppe.Learner(nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), steppe.ER())
    learner.learn(steppe.Task((X, Y), name="first"))
    with pytest.raises(DataError, match=r"second: inputs are .* earlier tasks"):
        learner.learn(steppe.Task((x, Y), name="second"))


def test_custom_collate_function() -> None:
    rows = [{"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True)]

    def collate(parts: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([part["x"] for part in parts]), torch.tensor([part["y"] for part in parts])

    loader = DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    assert steppe.Learner(nn.Linear(6, 4), steppe.ER()).learn(steppe.Task(loader)).updates == 5


def test_invalid_dataset_sample_is_named_by_index() -> None:
    spoilt = X.clone()
    spoilt[17, 2] = torch.nan
    with pytest.raises(DataError, match=r"digits: the training data has NaN .* sample 17"):
        steppe.Learner(nn.Linear(6, 4), steppe.ER()).learn(steppe.Task(TensorDataset(spoilt, Y), name="digits"))


@pytest.mark.parametrize("method", [steppe.Multitask(), steppe.Oracle()])
def test_upper_bounds_reject_tasks_in_sequence(method: steppe.MethodConfig) -> None:
    learner = steppe.Learner(nn.Linear(6, 4), method)
    learner.learn([steppe.Task((X, Y)), steppe.Task((X, Y))])
    with pytest.raises(steppe.UsageError, match="all tasks at once"):
        learner.learn(steppe.Task((X, Y)))


def test_icarl_can_learn_tasks_jointly() -> None:
    data = [(X, Y % 2), (X, Y % 2 + 2)]
    tasks = [steppe.Task(d, d, head=range(2 * place, 2 * place + 2)) for place, d in enumerate(data)]
    learner = steppe.Learner(nn.Linear(6, 4), steppe.ICaRL(exemplars=8))
    learner.learn(tasks)
    assert len(learner.evaluate(tasks)) == 2
    with pytest.raises(steppe.UsageError, match="overlaps an earlier"):
        steppe.Learner(nn.Linear(6, 4), steppe.ICaRL()).learn([tasks[0], tasks[0]])


def test_weight_frozen_later_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    learner = steppe.Learner(model, steppe.ER())
    learner.learn(steppe.Task((X, Y)))
    model[0].weight.requires_grad_(False)
    with pytest.raises(steppe.ModelError, match=r"'0.weight' was frozen"):
        learner.learn(steppe.Task((X, Y)))


def test_learning_inside_no_grad_and_invalid_arguments() -> None:
    with torch.no_grad():
        assert steppe.Learner(nn.Linear(6, 4), steppe.ER()).learn(steppe.Task((X, Y))).updates == 4
    with pytest.raises(steppe.UsageError, match=r"expected a steppe\.Task, got Tensor"):
        steppe.Learner(nn.Linear(6, 4), steppe.ER()).learn((X, Y))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="range"):
        steppe.Task((X, Y), head=5)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(steppe.UsageError, match="CUDA"):
            steppe.Learner(nn.Linear(6, 4), steppe.ER(), device="cuda")


def test_evaluation_does_not_change_the_global_generator() -> None:
    """Iterating over a DataLoader draws from it."""
    task = steppe.Task((X, Y), DataLoader(TensorDataset(X, Y), batch_size=8))
    learner = steppe.Learner(nn.Linear(6, 4), steppe.ER())
    before = torch.get_rng_state()
    learner.learn(task)
    learner.evaluate(task)
    assert torch.equal(torch.get_rng_state(), before)


def test_overflow_raises_a_clear_error() -> None:
    for name, value in (("buffer", 10**400), ("buffer", 10**5000), ("buffer", 1e300), ("lr", 10**400)):
        with pytest.raises(steppe.UsageError, match=name):
            steppe.ER.from_mapping({name: value})


def test_too_small_batch_for_batchnorm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    with pytest.raises(DataError, match=r"digits: a batch of one sample .* batch_size"):
        steppe.Learner(model, steppe.Finetune()).learn(steppe.Task((X[:9], Y[:9]), name="digits"), batch_size=8)


def test_strings_as_data_are_rejected() -> None:
    with pytest.raises(DataError, match="words: the training data cannot be converted to tensors"):
        steppe.Task((["a", "b"], [0, 1]), name="words")


def test_loader_with_batch_size_none() -> None:
    """The dataset yields whole batches, as with `batch_size=None`."""
    parts = [(X[start : start + 10], Y[start : start + 10]) for start in (0, 10, 20, 30)]
    loader = DataLoader(parts, batch_size=None)  # type: ignore[arg-type]
    learner = steppe.Learner(nn.Linear(6, 4), steppe.ER(), seed=0)
    assert learner.learn(steppe.Task(loader, loader)).updates == 4
    with torch.no_grad():
        right = int((learner.model(X).argmax(1) == Y).sum())
    assert learner.evaluate(steppe.Task(loader, loader)) == [pytest.approx(100 * right / 40)]
    assert 0 < right < 40


def test_empty_validation_loader_is_rejected() -> None:
    empty = DataLoader(TensorDataset(X[:3], Y[:3]), batch_size=4, drop_last=True)
    with pytest.raises(DataError, match="the validation data yields no batch"):
        steppe.Learner(nn.Linear(6, 4), steppe.ER()).learn(steppe.Task((X, Y), val=empty), patience=1)


def test_inputs_that_require_grad_are_detached_for_replay() -> None:
    """Features computed by the user's own network: the replay buffer must not keep its graph alive."""
    features = (X * nn.Parameter(torch.ones(6))).relu()
    for source in ((features, Y), DataLoader(TensorDataset(features, Y), batch_size=10)):
        learner = steppe.Learner(nn.Linear(6, 4), steppe.ER())
        learner.learn(steppe.Task(source))
        method = learner.validate(steppe.Task(source))
        drawn = method.replay.sample(5)  # type: ignore[attr-defined]
        assert not drawn.x.requires_grad


@pytest.mark.parametrize("together", [False, True])
def test_augmentation_by_a_network_is_detached_for_replay(together: bool) -> None:
    varied = nn.Linear(6, 6)
    tasks = [steppe.Task((X, Y), augment=lambda x, generator: varied(x)) for _ in range(2)]
    learner = steppe.Learner(nn.Linear(6, 4), steppe.ER(buffer=20))
    for part in [tasks] if together else tasks:
        learner.learn(part)
    drawn = learner.validate(tasks[0]).replay.sample(20)  # type: ignore[attr-defined]
    assert not drawn.x.requires_grad
    rows = varied(X).detach()
    assert all(torch.isclose(rows, row).all(1).any() for row in drawn.x)  # the variants are stored nevertheless


def test_frozen_part_in_eval_mode_stays_in_eval_mode() -> None:
    backbone = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).requires_grad_(False).eval()
    model = nn.Sequential(backbone, nn.BatchNorm1d(5), nn.Linear(5, 4))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    steppe.Learner(model, steppe.ER()).learn(steppe.Task((X, Y)))
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert not torch.equal(model[1].running_mean, torch.zeros(5))  # type: ignore[arg-type]
    assert not backbone.training
    assert model[1].training


def test_frozen_part_in_train_mode_passes_gradients() -> None:
    frozen = nn.BatchNorm1d(6).requires_grad_(False)
    steppe.Learner(nn.Sequential(frozen, nn.Linear(6, 4)), steppe.ER()).learn(steppe.Task((X, Y)))
    assert not torch.equal(frozen.running_mean, torch.zeros(6))  # type: ignore[arg-type]


def test_sparse_gradients_are_rejected() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Flatten(), nn.Linear(16, 4))
    with pytest.raises(steppe.ModelError, match=r"layer '0' has sparse gradients.*sparse=False"):
        steppe.Learner(model, steppe.ER())


class Halved(nn.Module):
    """Uses autocast in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


@pytest.mark.parametrize(
    "method", [steppe.FSDGPM(), steppe.GPM(), steppe.ER()], ids=lambda method: type(method).__name__
)
def test_mixed_precision(method: steppe.MethodConfig) -> None:
    learner = steppe.Learner(Halved(), method)
    for _ in range(2):
        learner.learn(steppe.Task((X, Y), (X, Y)), epochs=8)
    assert learner.evaluate(steppe.Task((X, Y), (X, Y)))[0] > 30


def test_bases_are_never_in_half_precision() -> None:
    model = Halved()
    seen: list[tuple[torch.dtype, bool]] = []
    with capture_inputs(
        projected_weights(model), lambda weight, layer, x: seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
    ):
        model(X)
    assert seen == [(torch.float32, False)] * 3


class Heads(nn.Module):
    """One layer per task; their outputs are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return torch.cat((self.first(h), self.second(h)), 1)


@pytest.mark.filterwarnings("ignore:.*its head, rows")  # run twice, on purpose
def test_separate_heads_must_be_excluded() -> None:
    task = steppe.Task((X, Y % 2), head=range(2))
    for exclude in ((), ("body.0",), ("first",)):
        with pytest.raises(steppe.ModelError, match=r"runs has the weight 'second\.weight'"):
            steppe.Learner(Heads(), steppe.GPM(), exclude=exclude).learn(task)
    learner = steppe.Learner(Heads(), steppe.GPM(), exclude=("first", "second"))
    learner.learn(task)
    assert set(learner.validate(task).memory.projectors) == {"body.0.weight"}  # type: ignore[attr-defined]


DEFAULTS = {
    "ER": steppe.ER(),
    "FSDGPM": steppe.FSDGPM(),
    "GPM": steppe.GPM(),
    "GEM": steppe.GEM(tasks=2),
    "EWC": steppe.EWC(),
    "LaMAML": steppe.LaMAML(),
    "ICaRL": steppe.ICaRL(exemplars=8),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_device_has_no_effect(name: str) -> None:
    """The model and its data are on the CPU, even if new tensors are created on another device by default."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    tasks = [steppe.Task((X, Y % 2 + 2 * n), (X, Y % 2 + 2 * n), head=range(2 * n, 2 * n + 2)) for n in range(2)]
    with torch.device("meta"):
        learner = steppe.Learner(model, DEFAULTS[name], seed=0)
        for task in tasks:
            learner.learn(task)
        assert all(0 <= accuracy <= 100 for accuracy in learner.evaluate(tasks))
