"""The baselines on one flat weight vector, transcribed from their descriptions: lists of samples, loops, float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from reference import ListReservoir, Sample, head_loss
from reference_update import Problem, coverage, drawn, listed
from torch import Tensor, nn

from steppe.data.task import Task
from steppe.learning.learner import Learner
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight, projected_weights
from steppe.registry import find_method
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch


class Flat:
    """A network as a function of a flat vector, and SGD with momentum on it."""

    def __init__(self, s: Any, problem: Problem, model: nn.Module, seeds: Callable[[str], int]) -> None:
        self.s, self.problem, self.model = s, problem, model
        self.shapes = {key: p.shape for key, p in model.named_parameters()}
        self.w = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.velocity = torch.zeros_like(self.w)
        self.seeds = seeds
        self.task = -1

    def begin_task(self) -> None:
        self.task += 1
        self.velocity = torch.zeros_like(self.w)

    def after_batch(self, samples: list[Sample]) -> None: ...

    def end_task(self) -> None: ...

    def logits(self, w: Tensor, samples: list[Any]) -> Tensor:
        return self.problem.forward(self.model, self.parts(w), torch.stack([s[0] for s in samples]), False)[0]

    def parts(self, w: Tensor) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        return {
            key: part.reshape(shape) for (key, shape), part in zip(self.shapes.items(), w.split(sizes), strict=True)
        }

    def loss(self, w: Tensor, samples: list[Any]) -> Tensor:
        return head_loss(self.logits(w, samples), [s[1] for s in samples], [self.problem.heads[s[2]] for s in samples])

    def slope(self, function: Callable[[Tensor], Tensor], w: Tensor | None = None) -> tuple[float, Tensor]:
        w = (self.w if w is None else w).detach().clone().requires_grad_()
        value = function(w)
        return float(value.detach()), torch.autograd.grad(value, w)[0]

    def clipped(self, g: Tensor) -> Tensor:
        return g * min(1.0, self.s.clip / (float(g.norm()) + 1e-6)) if self.s.clip else g

    def descend(self, g: Tensor) -> None:
        self.velocity = self.s.momentum * self.velocity + g
        self.w = self.w - self.s.lr * self.velocity


class FlatEWC(Flat):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.terms: list[tuple[Tensor, Tensor]] = []  # F and w* of every past task
        self.first: list[Sample] = []

    def penalised(self, w: Tensor, samples: list[Sample]) -> Tensor:
        total = self.loss(w, samples)
        for importance, reached in self.terms:
            total = total + self.s.strength * (importance * (w - reached) ** 2).sum()
        return total

    def observe(self, samples: list[Sample]) -> float:
        loss, g = self.slope(lambda w: self.penalised(w, samples))
        self.descend(self.clipped(g))
        return loss

    def after_batch(self, samples: list[Sample]) -> None:
        for sample in samples:
            if len(self.first) < self.s.samples:
                self.first.append(sample)

    def end_task(self) -> None:
        _, g = self.slope(lambda w: self.loss(w, self.first))
        self.terms.append((g**2, self.w.clone()))
        self.first = []


class ListRings:
    """Slots filled sample by sample."""

    def __init__(self, memory: int, tasks: int) -> None:
        self.size = memory // tasks
        self.slots: list[list[Any]] = []
        self.position = 0

    def begin_task(self) -> None:
        self.slots.append([None] * self.size)

    def write(self, samples: list[Any]) -> None:
        for sample in samples:
            if self.position == self.size:
                break
            self.slots[-1][self.position] = sample
            self.position += 1
        if self.position == self.size:
            self.position = 0

    def past(self) -> list[list[Any]]:
        return [[sample for sample in ring if sample is not None] for ring in self.slots[:-1]]


def enumerated_dual(p: Tensor, c: Tensor, bound: float) -> Tensor:
    """argmin ½vᵀPv + cᵀv subject to v ≥ bound, by trying every subset of the variables at the bound."""
    count = len(c)
    for held in itertools.product((False, True), repeat=count):
        free = [i for i in range(count) if not held[i]]
        v = torch.full_like(c, bound)
        if free:
            rest = [i for i in range(count) if held[i]]
            right = -c[free] - (p[free][:, rest] @ v[rest] if rest else 0)
            v[free] = torch.linalg.solve(p[free][:, free], right)
        slope = p @ v + c
        if all(v[i] >= bound - 1e-12 for i in free) and all(slope[i] >= -1e-10 for i in range(count) if held[i]):
            return v
    raise AssertionError("a strictly convex problem has a solution")


class FlatGEM(Flat):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rings = ListRings(self.s.memory, self.s.tasks)
        self.projections = 0

    def begin_task(self) -> None:
        super().begin_task()
        self.rings.begin_task()

    def past_gradients(self) -> list[Tensor]:
        rings = [ring for ring in self.rings.past() if ring]
        return [self.clipped(self.slope(lambda w, ring=ring: self.loss(w, ring))[1]) for ring in rings]

    def observe(self, samples: list[Sample]) -> float:
        loss, g = self.slope(lambda w: self.loss(w, samples))
        self.descend(self.projected(self.clipped(g)))
        return loss

    def projected(self, g: Tensor) -> Tensor:
        rows = self.past_gradients()
        if all(float(g @ row) >= 0 for row in rows):
            return g
        self.projections += 1
        a = torch.stack(rows)
        v = enumerated_dual(a @ a.T + 1e-3 * torch.eye(len(a), dtype=a.dtype), a @ g, self.s.strength)
        return g + a.T @ v

    def after_batch(self, samples: list[Sample]) -> None:
        self.rings.write(samples)


class FlatAGEM(FlatGEM):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.draws = random.Random(self.seeds("replay draws"))

    def projected(self, g: Tensor) -> Tensor:
        if self.task == 0:
            return g
        if self.s.reference == "average":
            rows = self.past_gradients()
            reference = sum(rows) / len(rows)
        else:
            held = [sample for ring in self.rings.past() for sample in ring]
            picked = self.draws.sample(range(len(held)), min(self.s.reference_samples, len(held)))
            reference = self.clipped(self.slope(lambda w: self.loss(w, [held[i] for i in picked]))[1])
        if float(g @ reference) >= 0:
            return g
        self.projections += 1
        return g - (g @ reference) / (reference @ reference) * reference


class FlatReplay(Flat):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        pickers = [random.Random(self.seeds(name)) for name in ("replay draws", "replay pushes")]
        self.buffer = ListReservoir(self.s.buffer, *pickers)


class FlatDER(FlatReplay):
    def observe(self, samples: list[Sample]) -> float:
        noted, labelled = self.buffer.draw(len(samples)), self.buffer.draw(len(samples))

        def total(w: Tensor) -> Tensor:
            value = self.loss(w, samples)
            if noted:
                output, squares = self.logits(w, noted), torch.zeros((), dtype=w.dtype)
                for row, (*_, kept) in zip(output, noted, strict=True):
                    squares = squares + ((row - kept) ** 2).sum()
                value = value + self.s.alpha * squares / output.numel() + self.s.beta * self.loss(w, labelled)
            return value

        self.seen = self.logits(self.w, samples)
        loss, g = self.slope(total)
        self.descend(self.clipped(g))
        return loss

    def after_batch(self, samples: list[Sample]) -> None:
        for sample, output in zip(samples, self.seen, strict=True):
            self.buffer.push((*sample, output))


class FlatSAM(FlatReplay):
    def observe(self, samples: list[Sample]) -> float:
        union = samples + self.buffer.draw(len(samples))
        _, uphill = self.slope(lambda w: self.loss(w, union))
        v = self.s.rho * uphill / uphill.norm()
        loss, g = self.slope(lambda w: self.loss(w, union), self.w + v)
        self.descend(self.clipped(g))
        return loss

    def after_batch(self, samples: list[Sample]) -> None:
        for sample in samples:
            self.buffer.push(sample)


# Running both --------------------------------------------------------------------------------------------------------


def started(
    name: str, changes: dict[str, Any], model: nn.Module, covered: Mapping[str, ProjectedWeight] | None = None
) -> tuple[Any, Network, Any]:
    """Start a method by name on a model; `covered` is what it projects, if it does."""
    entry = find_method(name)
    settings: Any = entry.settings.from_mapping({**entry.values(""), **changes})
    network = Network(model)
    return settings, network, settings.start(network, (covered or {}) if settings.uses_projection else {}, Streams(3))


def started_on(problem: Problem, name: str, changes: dict[str, Any]) -> tuple[Any, Network, Any]:
    """Start a method on a problem's network."""
    model = problem.build()
    return started(name, changes, model, coverage(problem, model))


def compare(
    twin: type[Flat],
    name: str,
    changes: dict[str, Any],
    problem: Problem,
    batches: int = 3,
    after_task: Callable[[Any, Any], None] = lambda method, slow: None,
) -> Any:
    """Compare losses and weights after every update of three tasks, two updates per batch, the last one smaller.

    `after_task` may compare more, given the method and its twin.
    """
    settings, network, method = started_on(problem, name, changes)
    model = network.model
    slow = twin(settings, problem, model, Streams(3).derive_seed)
    outputs = 4 if problem.heads[0] is None else 6
    for task in range(3):
        network.heads.add(problem.heads[task], outputs)
        method.begin_task()
        slow.begin_task()
        for place in range(batches):
            batch = drawn(problem, task, 5 if place < batches - 1 else 3)
            for _ in range(2):
                loss, expected = method.observe(batch), slow.observe(listed(batch))
                assert abs(float(loss) - expected) < 1e-9
                weights = torch.cat([p.detach().flatten() for p in model.parameters()])
                torch.testing.assert_close(weights, slow.w, rtol=0, atol=1e-9)
            method.after_batch(batch)
            slow.after_batch(listed(batch))
        method.end_task()
        slow.end_task()
        after_task(method, slow)
    return slow


class Normed(nn.Module):
    """A small network with BatchNorm and dropout, multi-head or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.relu(self.norm(self.first(x)))
        hidden = nn.functional.dropout(hidden, 0.2, self.training).flatten(1)
        out: Tensor = self.second(hidden)
        return out


def image_tasks(count: int, heads: bool = True) -> list[Task]:
    """Images as bytes, two classes per task that differ in brightness."""
    generator = torch.Generator().manual_seed(5)
    tasks = []
    for place in range(count):
        y = torch.arange(24) % 2
        x = torch.randint(0, 120, (24, 1, 4, 4), generator=generator) + 100 * y.view(-1, 1, 1, 1)
        rows = range(2 * place, 2 * place + 2)
        data = (x.to(torch.uint8), y + 2 * place if heads else y)
        tasks.append(Task(data, data, head=rows if heads else None, name=f"task {place}"))
    return tasks


def learn_tasks(
    name: str, changes: dict[str, Any], heads: bool = True, seed: int = 1, elsewhere: int = 0
) -> tuple[Learner, list[float]]:
    """The accuracies after learning three image tasks, always with the same initial network.

    `elsewhere` random numbers are drawn outside before each task.
    """
    torch.manual_seed(8)
    entry = find_method(name)
    settings: Any = entry.settings.from_mapping({**entry.values(""), "lr": 0.05, **changes})
    learner = Learner(Normed(), settings, seed=seed)
    tasks = image_tasks(3, heads)
    for task in tasks:
        torch.rand(elsewhere)
        learner.learn(task, epochs=4, batch_size=8, updates_per_batch=2)
    return learner, learner.evaluate(tasks)


def same_bits(name: str, changes: dict[str, Any]) -> bool:
    """Whether two runs with one seed end in the same weights and buffers, bit for bit, whatever else draws random
    numbers, and a run with another seed does not."""
    one, two, other = (
        learn_tasks(name, changes, seed=seed, elsewhere=count)[0].model.state_dict()
        for seed, count in ((1, 0), (1, 7), (2, 0))
    )
    equal = all(torch.equal(value, two[key]) for key, value in one.items())
    return equal and not all(torch.equal(value, other[key]) for key, value in one.items())


def statistics_moves(name: str, changes: dict[str, Any]) -> set[int]:
    """How many forwards of each update moved BatchNorm's running statistics, over three tasks."""
    model = Normed()
    _, network, method = started(name, changes, model, projected_weights(model, exclude=("second",)))
    counts: set[int] = set()
    for place, task in enumerate(image_tasks(3)):
        network.heads.add(task.head, 6)
        method.begin_task()
        for x, y in task.train.batches(8, None):
            batch = Batch(x, y, torch.full_like(y, place))
            for _ in range(2):
                before = int(model.norm.num_batches_tracked)
                method.observe(batch)
                counts.add(int(model.norm.num_batches_tracked) - before)
            method.after_batch(batch)
        before = int(model.norm.num_batches_tracked)
        mean = model.norm.running_mean.clone()
        method.end_task()
        assert int(model.norm.num_batches_tracked) == before
        assert torch.equal(model.norm.running_mean, mean)
    return counts
