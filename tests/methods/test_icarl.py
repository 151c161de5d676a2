"""iCaRL: herding against brute force, its loss against a literal transcription, the nearest-mean rule, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_baselines import Normed, image_tasks, learn_tasks, same_bits, started_on, statistics_moves
from reference_projection_baselines import (
    flattened,
    herding,
    icarl_loss,
    nearest_mean,
)
from reference_update import PROBLEMS, drawn
from torch import nn

import steppe
from steppe import ICaRL, Learner, Task, UsageError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.methods.icarl import herd


@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 4), st.integers(0, 999))
def test_herding_equals_brute_force(n: int, count: int, width: int, seed: int) -> None:
    features = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert herd(features, count).tolist() == herding(features, count)


def test_herding_by_hand() -> None:
    """The mean is 3: first 4; then 2, since 4 and 2 average 3; then 0 (mean 2) before 9 (mean 5)."""
    features = torch.tensor([[0.0], [4.0], [9.0], [2.0], [0.0]], dtype=torch.float64)
    assert herd(features, 3).tolist() == [1, 3, 0]


def trained_icarl(changes: dict[str, Any], tasks: int, missing: int = -1) -> tuple[Any, Any]:
    """iCaRL on the convolutional problem after some tasks, in which one class may never occur."""
    setup = PROBLEMS["conv"]
    _, network, method = started_on(setup, "icarl", changes)
    for task in range(tasks):
        network.heads.add(setup.heads[task], 6)
        method.begin_task()
        for _ in range(4):
            batch = drawn(setup, task, 7)
            batch = batch[(batch.y != missing).nonzero().squeeze(1)]
            method.observe(batch)
            method.after_batch(batch)
        method.end_task()
    return network, method


@pytest.mark.parametrize(("gamma", "missing"), [(0.0, -1), (0.7, -1), (0.7, 2)])
def test_update_descends_the_reference_loss(gamma: float, missing: int) -> None:
    """In the middle of the third task, the step is the reference loss's gradient, clipped.

    A class that never occurred has no exemplar, but still counts among its head's classes.
    """
    network, method = trained_icarl({"exemplars": 12, "distillation": gamma, "clip": 0.8, "lr": 0.1}, 2, missing)
    setup = PROBLEMS["conv"]
    network.heads.add(setup.heads[2], 6)
    with torch.no_grad():
        for parameter in network.trainable.values():  # away from the weights that gave the stored logits
            parameter += 0.1 * torch.randn_like(parameter)
    method.begin_task()
    state = method._picker.getstate()
    picked, stored = method._sample_exemplars()
    method._picker.setstate(state)
    assert picked.y.tolist() == [label for label in range(4) if label != missing]  # one of each old class
    batch = drawn(setup, 2, 5)
    before = flattened(network.trainable)
    now = network.model(picked.x)
    old = [(z, kept, setup.heads[int(task)]) for z, kept, task in zip(now, stored, picked.task, strict=True)]
    expected = icarl_loss(network.model(batch.x), batch.y.tolist(), range(4, 6), old, gamma)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(expected, list(network.trainable.values()))])
    loss = method.observe(batch)
    assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-12)
    step = gradient * min(1.0, 0.8 / (float(gradient.norm()) + 1e-6))
    torch.testing.assert_close(flattened(network.trainable), before - 0.1 * step, rtol=0, atol=1e-12)
    assert float(icarl_loss(now[:0], [], range(4, 6), old, 1.0).detach()) > 1e-3


def test_class_with_few_samples_keeps_only_its_own() -> None:
    """It has fewer samples than its share: the rows after them belong to another class."""
    setup = PROBLEMS["conv"]
    _, network, method = started_on(setup, "icarl", {"exemplars": 60})
    for task in range(2):
        network.heads.add(setup.heads[task], 6)
        method.begin_task()
        batch = drawn(setup, task, 16)
        few = batch[torch.cat([(batch.y == label).nonzero()[:2, 0] for label in setup.heads[task]])]
        method.observe(few)
        method.after_batch(few)
        method.end_task()
        places = method.exemplars.rows
        held = {label: method.exemplars.batch.y[where.start : where.stop].tolist() for label, where in places.items()}
        assert held == {label: [label] * 2 for label in range(2 * task + 2)}
        assert len(method.exemplars.batch) == 4 * (task + 1)


def test_nearest_mean_far_from_0() -> None:
    """In float32, ‖a‖² − 2⟨a, b⟩ + ‖b‖² would lose the distances, which are less than a thousandth of the logits."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.fill_(3000.0)
    y = torch.arange(20) % 2
    learner = Learner(model, ICaRL(lr=1e-12, exemplars=6), input_transform=lambda x: x)
    learner.learn(Task((torch.eye(2)[y], y), head=range(2)))
    x = torch.eye(2)[y] + 0.6 * torch.randn(20, 2)
    nearest = torch.cdist(x.double(), torch.eye(2, dtype=torch.float64)).argmin(1)
    assert 0 < int((nearest != y).sum()) < 20
    assert learner.predict(x, range(2)).tolist() == nearest.tolist()


def test_every_exemplar_is_drawn() -> None:
    _, method = trained_icarl({"exemplars": 12}, 2)
    draws = torch.stack([method._sample_exemplars()[0].x for _ in range(60)])
    for place, places in enumerate(method.exemplars.rows.values()):
        kept = method.exemplars.batch.x[places.start : places.stop]
        assert all(bool((draws[:, place] == x).flatten(1).all(1).any()) for x in kept)


def test_end_of_task_herds_truncates_and_updates_logits() -> None:
    setup = PROBLEMS["conv"]
    _, network, method = started_on(setup, "icarl", {"exemplars": 14})
    chosen: dict[int, torch.Tensor] = {}
    for task, quota in enumerate((7, 3, 2)):  # 14 over 2, 4, 6 classes
        network.heads.add(setup.heads[task], 6)
        method.begin_task()
        pool = []
        for _ in range(4):
            batch = drawn(setup, task, 7)
            method.observe(batch)
            method.after_batch(batch)
            pool.append(batch)
        method.end_task()
        x, y = torch.cat([b.x for b in pool]), torch.cat([b.y for b in pool])
        with torch.no_grad():
            logits = network.model(x)
        chosen = {label: kept[:quota] for label, kept in chosen.items()}
        for label in sorted(set(y.tolist())):
            chosen[label] = x[y == label][herding(logits[y == label], quota)]
        kept = method.exemplars
        assert list(kept.rows) == list(chosen)
        for label, places in kept.rows.items():
            assert torch.equal(kept.batch.x[places.start : places.stop], chosen[label])
            assert set(kept.batch.y[places.start : places.stop].tolist()) == {label}
        with torch.no_grad():
            torch.testing.assert_close(kept.logits, network.model(kept.batch.x))
    sizes = method.memory_bytes()
    assert sizes["replay"] == sum(t.nbytes for t in (kept.batch.x, kept.batch.y, kept.batch.task))
    assert sizes["logits"] == kept.logits.nbytes
    assert sizes["bases"] == 0


def test_herding_and_stored_logits_use_eval_mode() -> None:
    learner, _ = learn_tasks("icarl", {"exemplars": 12})
    method: Any = learner._method
    with torch.no_grad(), learner.network.mode(training=False):
        x = learner.network.prepare_inputs(method.exemplars.batch.x)
        torch.testing.assert_close(method.exemplars.logits, learner.model(x))
    assert learner.model.training


def test_predicts_the_nearest_mean_within_the_head() -> None:
    learner, accuracies = learn_tasks("icarl", {"exemplars": 12})
    method: Any = learner._method
    exemplars = {
        label: method.exemplars.logits[places.start : places.stop] for label, places in method.exemplars.rows.items()
    }
    x = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
    with torch.no_grad(), learner.network.mode(training=False):
        z = learner.model(x / 255)
    for head in (range(0, 2), range(2, 4), range(4, 6)):
        assert learner.predict(x, head).tolist() == nearest_mean(z, exemplars, head)
    assert accuracies[-1] > 85


def test_class_without_exemplars_is_never_predicted() -> None:
    torch.manual_seed(0)
    learner = Learner(Normed(), ICaRL(exemplars=12))
    x = torch.randn(10, 1, 4, 4)
    assert learner.predict(x).shape == (10,)  # before any task
    learner.learn(Task((x, torch.full((10,), 1)), head=range(0, 3)))
    assert learner.predict(x, range(0, 3)).tolist() == [1] * 10
    assert learner._method is not None
    with torch.no_grad():
        scores = learner._method.scores(x)
    assert bool(torch.isneginf(scores[:, [0, 2, 3, 4, 5]]).all())
    assert bool(torch.isfinite(scores[:, 1]).all())


def test_saved_state_with_many_outputs(tmp_path: Path) -> None:
    """Only classes with exemplars have means: those of all 20,000 outputs would take gigabytes."""
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    learner = Learner(nn.Linear(4, 20_000), ICaRL(exemplars=4))
    learner.learn(Task((x, 19_990 + y), head=range(19_990, 19_992)))
    learner.save(tmp_path / "learner")
    loaded = steppe.load(tmp_path / "learner", nn.Linear(4, 20_000))
    method: Any = loaded._method
    assert method._means.shape == (2, 20_000)
    assert torch.equal(loaded.predict(x), learner.predict(x))
    assert set(learner.predict(x).tolist()) <= {19_990, 19_991}


@pytest.mark.parametrize(
    "places",
    [{4: range(0, 2)}, {-1: range(0, 2)}, {True: range(0, 2)}, {0: range(0, 99)}, {0: range(1, 1)}, {}],
    ids=str,
)
def test_inconsistent_exemplars_are_rejected(places: dict[int, range]) -> None:
    learner = Learner(nn.Linear(4, 4), ICaRL(exemplars=4))
    learner.learn(Task((torch.randn(12, 4), torch.arange(12) % 2), head=range(2)))
    assert learner._method is not None
    state = learner._method.state_dict()
    learner._method.load_state_dict(state)
    state["exemplars"][2] = places
    with pytest.raises(ValueError, match="do not match their logits"):
        learner._method.load_state_dict(state)


def test_single_head_is_rejected_before_learning() -> None:
    learner = Learner(Normed(), ICaRL())
    before = flattened(learner.network.trainable)
    with pytest.raises(UsageError, match=r"task 0: iCaRL .* each task needs its own classes"):
        learner.learn(image_tasks(1, heads=False)[0])
    assert torch.equal(flattened(learner.network.trainable), before)
    assert learner.network.heads.ranges == []


def test_permuted_mnist_is_rejected(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="shares the single head"):
        run(RunConfig.make("pmnist", "icarl", ["tasks=2", "samples=20"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shared_outputs_and_too_few_exemplars_are_rejected() -> None:
    learner = Learner(Normed(), ICaRL(exemplars=3))
    tasks = image_tasks(2)
    learner.learn(tasks[0])
    with pytest.raises(UsageError, match="overlaps an earlier task's"):
        learner.validate(
            Task((torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.tensor([1, 2, 1, 2])), head=range(1, 3))
        )
    with pytest.raises(UsageError, match="exemplars = 3 is too few for the 4 classes"):
        learner.learn(tasks[1])


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("icarl", {"exemplars": 12}) == {1}


def test_the_same_seed_gives_the_same_bits() -> None:
    assert same_bits("icarl", {"exemplars": 12})
