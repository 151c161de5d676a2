"""Mixed precision: matrix products in bfloat16 while learning, and float32 everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steppe
from steppe import FSDGPM, Learner, Task
from steppe.fast.factored import FactoredGrad, to_dense
from steppe.learning.events import EpochEnded, Event
from steppe.methods.base import MethodConfig
from steppe.models.lenet import LeNet
from steppe.network.network import Network
from steppe.registry import METHODS
from steppe.tensors.batch import Batch

CHANCE = torch.Generator().manual_seed(0)
IMAGES = torch.rand(48, 3, 8, 8, generator=CHANCE)
HALF = {"batch_size": 8, "precision": "bfloat16"}
SEQUENTIAL = [name for name in METHODS if name not in ("multitask", "oracle")]


def task(place: int) -> Task:
    """Bright or dark images with one channel: learned in a few updates."""
    y = torch.arange(48) % 2
    x = IMAGES.clone()
    x[:, place] += 2.0 * y[:, None, None]
    return Task((x, y + 2 * place), (x, y + 2 * place), head=range(2 * place, 2 * place + 2), name=f"channel {place}")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(216, 40), nn.ReLU(), nn.Linear(40, 4)),
    )


def chain() -> nn.Module:
    """Without convolutions: some methods compute the gradients of such a model differently."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))


def settings(name: str) -> MethodConfig:
    made = METHODS[name].settings.from_mapping(METHODS[name].values("cifar100-superclass"))
    assert isinstance(made, MethodConfig)
    return made


@pytest.mark.parametrize("made", [model, chain])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_every_method_learns(name: str, made: Callable[[], nn.Module]) -> None:
    learners = {precision: Learner(made(), settings(name)) for precision in ("float32", "bfloat16")}
    for place in range(2):
        for precision, learner in learners.items():
            learner.learn(task(place), epochs=6, batch_size=8, precision=precision)
    whole, mixed = learners.values()
    assert all(p.dtype == torch.float32 for p in mixed.model.parameters())
    assert mixed.evaluate(task(1))[0] > 90
    assert not all(map(torch.equal, whole.model.parameters(), mixed.model.parameters()))


def test_products_are_bfloat16_only_while_learning() -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    learner = Learner(model(), FSDGPM(buffer=20, basis_samples=10))
    learner.model[4].register_forward_hook(lambda layer, args, output: seen.append((layer.training, output.dtype)))
    learner.learn(task(0), **HALF)
    assert (True, torch.bfloat16) in seen
    assert {dtype for training, dtype in seen if not training} == {torch.float32}  # the bases
    seen.clear()
    learner.evaluate(task(0))
    learner.learn(task(1), batch_size=8)
    assert {dtype for _, dtype in seen} == {torch.float32}


def test_validation_and_evaluation_are_float32() -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    learner = Learner(model(), FSDGPM(buffer=20, basis_samples=10))
    learner.model[4].register_forward_hook(lambda layer, args, output: seen.append((layer.training, output.dtype)))
    first = task(0)
    validated = Task(first.train, first.test, val=first.test, head=range(2))

    def callback(event: Event) -> None:
        if isinstance(event, EpochEnded):
            learner.evaluate(first)

    learner.learn(validated, **HALF, epochs=2, patience=1, callback=callback)
    assert {dtype for training, dtype in seen if not training} == {torch.float32}
    assert (True, torch.bfloat16) in seen


def test_float64_is_rejected() -> None:
    learner = Learner(model().double(), FSDGPM())
    with pytest.raises(
        steppe.UsageError, match=r"bfloat16.*needs float32 weights, got torch\.float64.*model\.float\(\)"
    ):
        learner.learn(task(0), **HALF)
    assert learner.num_tasks == 0


def test_mixed_weight_dtypes_are_kept() -> None:
    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = chain(), nn.Linear(4, 60, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).double())

    network = Network(Sharp())
    network.heads.add(None, 60)
    batch = Batch(IMAGES[:8], torch.arange(8), torch.zeros(8, dtype=torch.int64))
    with network.autocast_to("bfloat16"):
        _, found = network.loss_and_grad(batch, factored={"head.weight": [network.model.head]})  # type: ignore[dict-item]
    assert isinstance(found["head.weight"], FactoredGrad)
    assert to_dense(found["head.weight"]).dtype == torch.float64
    assert to_dense(found["body.1.weight"]).dtype == torch.float32


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_learning_within_the_users_autocast(precision: str) -> None:
    """Autocast caches cast weights for as long as it is active, so updates would not be seen."""
    learner = Learner(model(), steppe.ER(buffer=20))
    before = torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        learner.learn(task(0), epochs=6, batch_size=8, precision=precision)
    assert torch.is_autocast_cache_enabled() == before
    assert learner.evaluate(task(0))[0] > 90


@pytest.mark.parametrize("made", [model, chain])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_users_autocast_sets_the_precision(name: str, made: Callable[[], nn.Module]) -> None:
    """Bit for bit; and the user's code afterwards is not affected."""
    one, other = (Learner(made(), settings(name)) for _ in range(2))
    one.learn(task(0), batch_size=8, precision="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        other.learn(task(0), batch_size=8)
    for learner in (one, other):
        learner.learn(task(1), batch_size=8)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_unsupported_autocast_is_rejected() -> None:
    learner = Learner(model(), steppe.ER())
    with torch.autocast("cpu", torch.float16), pytest.raises(steppe.UsageError, match=r"autocast to torch\.float16"):
        learner.learn(task(0))
    assert learner.num_tasks == 0


def test_precision_is_reset_after_a_failed_task() -> None:
    learner = Learner(model(), FSDGPM(buffer=20, basis_samples=10, lr=1e30, momentum=0.0, clip=0.0))
    with pytest.raises(steppe.DivergedError):
        learner.learn(task(0), **HALF)
    assert not learner.network._forward.is_mixed


@pytest.mark.parametrize("factored", [True, False])
def test_gradients_are_close_to_full_precision(factored: bool) -> None:
    network = Network(model())
    network.heads.add(None, 4)
    y = torch.arange(8) % 4
    batch = Batch(IMAGES[:8], y, torch.zeros_like(y))
    named = {"4.weight": [network.model[4]]} if factored else {}  # type: ignore[index]
    _, expected = network.loss_and_grad(batch, statistics=False)
    with network.autocast_to("bfloat16"):
        loss, found = network.loss_and_grad(batch, factored=named, statistics=False)  # type: ignore[arg-type]
    assert loss.dtype == torch.float32
    assert isinstance(found["4.weight"], FactoredGrad) is factored
    for name, g in found.items():
        product = to_dense(g)
        assert product.dtype == torch.float32
        assert not torch.equal(product, expected[name])
        assert float((product - expected[name]).norm()) < 0.15 * float(expected[name].norm()), name


def test_perturbations_below_bfloat16_resolution_are_not_lost() -> None:
    """Most weights do not change in bfloat16, but the others compensate: the loss rises as in full precision."""
    torch.manual_seed(0)
    network = Network(LeNet(outputs=4, size=8))
    network.heads.add(None, 4)
    y = torch.arange(48) % 4
    batch = Batch(IMAGES, y, torch.zeros_like(y))
    rises = []
    with network.mode(training=False):
        _, gradient = network.loss_and_grad(batch)
        place = network.scratch.perturbed(gradient, 0.1)
        moved = [place[name].bfloat16() != p.bfloat16() for name, p in network.trainable.items()]
        assert 0 < sum(int(each.sum()) for each in moved) < 0.3 * sum(each.numel() for each in moved)
        for precision in ("float32", "bfloat16"):
            with network.autocast_to(precision):
                before, after = (network.loss_and_grad(batch, at=at)[0] for at in (None, place))
            rises.append(float(after - before))
    assert rises[0] > 0
    assert rises[1] == pytest.approx(rises[0], rel=0.2)


def test_second_order_uses_bfloat16_too() -> None:
    found = []
    for precision in ("float32", "bfloat16"):
        learner = Learner(model(), FSDGPM(buffer=20, basis_samples=10, second_order=True))
        learner.learn(task(0), batch_size=8, precision=precision)
        found.append([p.detach() for p in learner.model.parameters()])
    assert not all(map(torch.equal, *found))
    assert all(bool(torch.isfinite(p).all()) for p in found[1])


@pytest.mark.usefixtures("fast_paths_on")
def test_linear_chain_is_off_in_bfloat16() -> None:
    learner = Learner(nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 4)), FSDGPM(buffer=20))
    x, y = torch.rand(30, 6, generator=CHANCE), torch.arange(30) % 4
    chains: list[Any] = []

    def callback(event: Event) -> None:
        chains.append(learner.network.chain)

    learner.learn(Task((x, y)), **HALF, callback=callback)
    assert chains
    assert all(chain is None for chain in chains)
    assert learner.network.chain is not None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resuming_gives_the_same_bits(precision: str, tmp_path: Path) -> None:
    def learner() -> Learner:
        return Learner(model(), FSDGPM(buffer=20, basis_samples=10), seed=3)

    how: dict[str, Any] = {"epochs": 3, "batch_size": 8, "precision": precision}
    whole, stopped = learner(), learner()
    whole.learn(task(0), **how)

    def save(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch == 1:
            stopped.save(tmp_path / "half-way")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.learn(task(0), **how, callback=save)
    again = steppe.load(tmp_path / "half-way", model())
    other = {**how, "precision": "float32" if precision == "bfloat16" else "bfloat16"}
    with pytest.raises(steppe.UsageError, match="precision"):
        again.learn(task(0), **other)
    again.learn(task(0), **how)
    assert all(map(torch.equal, again.model.state_dict().values(), whole.model.state_dict().values()))


@pytest.mark.parametrize("precision", ["float16", "half", "", 16, torch.bfloat16, None])
def test_unknown_precisions_are_rejected(precision: Any) -> None:
    learner = Learner(model(), FSDGPM())
    with pytest.raises(steppe.UsageError, match=r"precision.*float32.*bfloat16"):
        learner.learn(task(0), precision=precision)
