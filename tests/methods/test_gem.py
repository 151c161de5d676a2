"""GEM: ring contents, past gradients computed both ways, the dual problem, and whole updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_baselines import (
    FlatGEM,
    ListRings,
    Normed,
    compare,
    enumerated_dual,
    image_tasks,
    learn_tasks,
    same_bits,
    started,
    statistics_moves,
)
from reference_update import PROBLEMS, drawn
from torch import Tensor, nn

from steppe import GEM, DivergedError, Learner, Task, UsageError
from steppe.fast.factored import FactoredGrad, to_dense
from steppe.fast.factored_rows import FactoredRows, block_products
from steppe.methods.gem import solve_dual
from steppe.methods.parts.ring_buffer import TaskRingBuffer
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.task_gradients import PastTasks, Rows
from steppe.network.network import Network
from steppe.tensors.batch import Batch

SMALL = {"lr": 0.1, "memory": 12, "tasks": 3}
CASES: dict[str, dict[str, Any]] = {
    "plain": {**SMALL},
    "strength": {**SMALL, "strength": 0.5},
    "unclipped": {**SMALL, "clip": 0},
    "tightly clipped": {**SMALL, "clip": 0.2},
    "one slot": {**SMALL, "memory": 4, "momentum": 0},
    "slots never reached": {**SMALL, "memory": 60},
}


@pytest.mark.parametrize("problem", ["mlp", "smooth", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_the_flat_reference(problem: str, case: str) -> None:
    slow = compare(FlatGEM, "gem", CASES[case], PROBLEMS[problem])
    assert slow.projections > 0


# Rings ---------------------------------------------------------------------------------------------------------------


@given(
    slots=st.integers(1, 7),
    spare=st.integers(0, 2),
    tasks=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4),
)
def test_ring_contents_equal_a_loop(slots: int, spare: int, tasks: list[list[int]]) -> None:
    memory = slots * (len(tasks) + 1) + min(spare, len(tasks))
    rings, slow = TaskRingBuffer(memory, len(tasks) + 1), ListRings(memory, len(tasks) + 1)
    number = 0
    for place, sizes in enumerate([*tasks, [1]]):  # the last task only reads
        rings.begin_task()
        slow.begin_task()
        for size in sizes:
            x = torch.arange(number, number + size)
            number += size
            rings.add(Batch(x.to(torch.uint8).unsqueeze(1), x, torch.full_like(x, place)))
            slow.write(x.tolist())
        found = {int(batch.task[0]): batch.y.tolist() for batch in rings.past()}
        assert found == {task: held for task, held in enumerate(slow.past()) if held}


def test_rings_store_bytes_and_report_their_size() -> None:
    rings = TaskRingBuffer(25, 3)
    assert rings.memory_bytes() == 0
    rings.begin_task()
    rings.add(Batch(torch.zeros(2, 5, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), torch.zeros(2).long()))
    assert rings.memory_bytes() == 24 * (5 + 8 + 8)


def test_more_tasks_than_rings_are_rejected() -> None:
    learner = Learner(Normed(), GEM(memory=4, tasks=2))
    first, second, third = image_tasks(3)
    learner.learn(first)
    learner.learn(second)
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    with pytest.raises(UsageError, match="tasks = 2"):
        learner.learn(third)
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())


def test_memory_smaller_than_the_number_of_tasks_is_rejected() -> None:
    with pytest.raises(UsageError, match="memory = 5 shared by tasks = 10"):
        GEM(memory=5, tasks=10)


# The past tasks' gradients -------------------------------------------------------------------------------------------


class MeanShifted(nn.Module):
    """Its samples affect each other, although all its layers are linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        return hidden - hidden.mean(0)


class Twice(nn.Module):
    """Uses its hidden layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.hidden(torch.tanh(self.hidden(x)))))
        return out


class Tied(nn.Module):
    """Uses a layer's weight outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.hidden(x)) @ self.hidden.weight)
        return out


class Unused(nn.Module):
    """Has a layer that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def past(model: nn.Module, heads: bool = False, sizes: tuple[int, ...] = (3, 3, 3)) -> tuple[Network, PastTasks]:
    network = Network(model.double())
    samples = []
    for task, size in enumerate(sizes):
        network.heads.add(range(task, task + 2) if heads else None, 4)
        y = torch.randint(task, task + 2, (size,)) if heads else torch.randint(0, 4, (size,))
        samples.append(Batch(torch.randn(size, 6, dtype=torch.float64), y, torch.full((size,), task)))
    return network, PastTasks(network, samples)


PLAIN = {
    "linear alone": lambda: nn.Linear(6, 4),
    "bias": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 30, bias=False), nn.Tanh(), nn.Linear(30, 4, bias=False)),
    "words": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4)),
}


@pytest.mark.usefixtures("fast_paths_on")
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("kind", PLAIN)
def test_joint_gradients_equal_one_by_one(kind: str, clip: float, heads: bool) -> None:
    network, tasks = past(PLAIN[kind](), heads)
    assert tasks.linear, "the fast way should serve this model"
    fast, slow = tasks.gradients(clip), tasks._one_by_one(clip)
    assert isinstance(fast, FactoredRows)
    current = Batch(torch.randn(2, 6, dtype=torch.float64), torch.tensor([1, 1]), torch.tensor([0, 0]))
    for g in (network.loss_and_grad(current)[1], network.loss_and_grad(current, factored=tasks.linear)[1]):
        torch.testing.assert_close(fast.products(g), slow.products(g), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.gram(), slow.gram(), rtol=1e-10, atol=1e-12)
    v = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    one, two = fast.combined(v), slow.combined(v)
    assert one.keys() == two.keys() == network.trainable.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-10, atol=1e-12)


def test_rows_are_the_clipped_gradients() -> None:
    network, tasks = past(PLAIN["bias"]())
    rows = tasks._one_by_one(0.05)
    for task, batch in enumerate(tasks.samples):
        for name, g in clip_by_norm(network.loss_and_grad(batch)[1], 0.05).items():
            torch.testing.assert_close(rows.parts[name][task], to_dense(g))
    flat = torch.cat([part.flatten(1) for part in rows.parts.values()], 1)
    torch.testing.assert_close(rows.gram(), flat @ flat.T)


class Seldom(nn.Linear):
    """Differs from a linear layer, but not on the samples of the trial."""

    seen = 0

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input) * (2 if self.seen > 50 else 1)


SLOW: dict[str, Any] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)),
    "batch norm that keeps nothing": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False, track_running_stats=False), nn.Linear(5, 4)
    ),
    "samples that affect each other": MeanShifted,
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4)),
    "another kind of weight": lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 4)),
    "a layer used twice": Twice,
    "a weight used outside its layer": Tied,
    "a layer never used": Unused,
    "a forward of its own": lambda: nn.Sequential(Seldom(6, 5), nn.Linear(5, 4)),
    "frozen weight": lambda: _with_frozen(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))),
}


def _with_frozen(model: nn.Sequential) -> nn.Module:
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", SLOW)
def test_other_models_are_computed_one_by_one(kind: str) -> None:
    network, tasks = past(SLOW[kind]())
    assert not tasks.linear
    rows = tasks.gradients(0)
    assert isinstance(rows, Rows)
    assert rows.parts.keys() == network.trainable.keys()


def test_rings_of_different_sizes_are_computed_one_by_one() -> None:
    assert not past(PLAIN["bias"](), sizes=(3, 2, 3))[1].linear


@pytest.mark.parametrize(("count", "outputs", "inputs"), [(1, 9, 20), (30, 4, 5)])
def test_block_products_in_both_ways(count: int, outputs: int, inputs: int) -> None:
    rows = FactoredGrad(
        torch.randn(3, count, outputs, dtype=torch.float64), torch.randn(3, count, inputs, dtype=torch.float64)
    )
    g = torch.stack([left.T @ right for left, right in zip(rows.left, rows.right, strict=True)]).flatten(1)
    torch.testing.assert_close(block_products(rows), g @ g.T)
    x = rows.right.flatten(0, 1)
    torch.testing.assert_close(block_products(rows, x @ x.T), g @ g.T)


@pytest.mark.usefixtures("fast_paths_on")
def test_single_precision_uses_the_fast_way_at_the_papers_size() -> None:
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(784, 100, bias=False), nn.ReLU(), nn.Linear(100, 10, bias=False)))
    network.heads.add(None, 10)
    task = torch.zeros(10, dtype=torch.int64)
    samples = [Batch(torch.rand(10, 784), torch.randint(0, 10, (10,)), task) for _ in range(19)]
    assert PastTasks(network, samples).linear


# The dual ------------------------------------------------------------------------------------------------------------


@given(tasks=st.integers(1, 6), size=st.integers(1, 9), strength=st.sampled_from([0.0, 0.3, 2.0]), seed=st.integers())
def test_dual_equals_enumeration_and_is_optimal(tasks: int, size: int, strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**40)
    a = torch.randn(
        tasks, size, dtype=torch.float64, generator=generator
    )  # often of lower rank than its number of rows
    g = torch.randn(size, dtype=torch.float64, generator=generator)
    v = solve_dual(a @ a.T, a @ g, strength)
    p = a @ a.T + 1e-3 * torch.eye(tasks, dtype=torch.float64)
    torch.testing.assert_close(v, enumerated_dual(p, a @ g, strength), rtol=1e-7, atol=1e-7)
    slope = p @ v + a @ g  # optimality: feasible, gradient not negative, and zero wherever v is off its bound
    assert (v >= strength - 1e-12).all()
    assert (slope >= -1e-8).all()
    assert float((slope * (v - strength)).abs().max()) < 1e-7
    products = a @ (g + a.T @ v)
    assert (products >= -1e-3 * v - 1e-8).all()  # no conflict remains, except for what the ridge allows


def test_dual_of_non_finite_gradients_is_an_error() -> None:
    with pytest.raises(DivergedError, match="lower the learning rate"):
        solve_dual(torch.tensor([[float("nan")]]), torch.tensor([-1.0]), 0.0)


def test_projected_step_increases_no_past_loss() -> None:
    """Without momentum, a short enough step does not increase the loss on any ring."""
    problem = PROBLEMS["smooth"]
    _, network, method = started(
        "gem", {"lr": 1e-5, "momentum": 0, "memory": 12, "tasks": 3, "clip": 0}, problem.build()
    )
    for task in range(2):
        network.heads.add(None, 4)
        method.begin_task()
        method.after_batch(drawn(problem, task, 4))
    network.heads.add(None, 4)
    method.begin_task()
    memories = [network.prepare(batch) for batch in method.memory.rings.past()]
    assert len(memories) == 2
    conflicts = 0
    for _ in range(20):
        batch = drawn(problem, 2, 5)
        g = network.loss_and_grad(batch)[1]
        conflicts += int((method.memory.past.gradients(0).products(g) < -0.05).any())
        before = [float(network.loss(memory).detach()) for memory in memories]
        method.observe(batch)
        after = [float(network.loss(memory).detach()) for memory in memories]
        assert all(new <= old + 1e-3 * 1e-5 + 1e-8 for new, old in zip(after, before, strict=True))
    assert conflicts > 0


# Through `Learner` ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [True, False])
def test_learns(heads: bool) -> None:
    learner, accuracies = learn_tasks("gem", {"memory": 24, "tasks": 3}, heads)
    assert accuracies[-1] > 80
    assert learner._method is not None
    assert learner._method.memory_bytes() == {"replay": 24 * (16 + 16), "bases": 0}


def test_same_seed_same_bits() -> None:
    assert same_bits("gem", {"memory": 12, "tasks": 3})


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("gem", {"memory": 24, "tasks": 3}) == {1}


def test_scalar_weight() -> None:
    """A learnable temperature; its products are scalars too."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale.exp() * self.layer(x)

    rows = Rows({"scale": torch.tensor([2.0, -3.0]), "weight": torch.tensor([[1.0, 0.0], [4.0, 5.0]])})
    g = {"scale": torch.tensor(7.0), "weight": torch.tensor([10.0, 1.0])}
    assert rows.products(g).tolist() == [14 + 10, -21 + 45]
    assert rows.gram().tolist() == [[4 + 1, -6 + 4], [-6 + 4, 9 + 41]]
    learner = Learner(Scaled(), GEM(memory=20, tasks=3))
    for shift in range(3):
        x = torch.randn(20, 6)
        learner.learn(Task((x, (torch.arange(20) + shift) % 4)), epochs=2)
    assert learner.num_tasks == 3
