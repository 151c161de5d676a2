"""Saved learners: a loaded one continues exactly like the saved one, and damaged files are rejected."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from learner_states import same, weights
from pictures import Pictures
from safetensors import safe_open
from safetensors.torch import save_file
from small_runs import small
from torch import Tensor, nn

import steppe
from steppe import Learner, Task
from steppe.checkpoint.io import read_state, write_state
from steppe.errors import ModelError, RunError, UsageError
from steppe.learning import loop as training
from steppe.learning.events import Event, Progress
from steppe.network import heads
from steppe.registry import METHODS

SEQUENTIAL = [name for name, entry in METHODS.items() if entry.settings.schedule == "sequential"]  # type: ignore[attr-defined]
pytestmark = pytest.mark.usefixtures("pictures_known")
BENCHMARK = Pictures(samples=16)
HOW = {"epochs": 2, "batch_size": 8, "patience": 1}


def learner(method: str) -> Learner:
    settings = small("pictures", method).method_settings
    return Learner(BENCHMARK.model(0), settings, seed=3)


def tasks() -> list[Task]:
    return list(BENCHMARK.stream(0))


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_loaded_learner_continues_like_the_saved_one(method: str, tmp_path: Path) -> None:
    first, second, third = tasks()
    one = learner(method)
    one.learn(first, **HOW)
    one.learn(second, **HOW)
    one.save(tmp_path / "learner.safetensors")
    other = steppe.load(tmp_path / "learner.safetensors", BENCHMARK.model(99))
    assert one.evaluate([first, second]) == other.evaluate([first, second])
    one.learn(third, **HOW)
    other.learn(third, **HOW)
    assert same(one, other)


def test_input_transform_must_be_passed_again(tmp_path: Path) -> None:
    """Otherwise the model would silently get other inputs than those it was trained on."""
    first, *_ = tasks()
    plain, own = tmp_path / "plain.safetensors", tmp_path / "own.safetensors"
    learner("er").save(plain)
    one = Learner(
        BENCHMARK.model(0), small("pictures", "er").method_settings, input_transform=lambda x: x.float() - 100
    )
    one.learn(first, **HOW)
    one.save(own)
    with pytest.raises(UsageError, match="its own `input_transform`, which a file cannot hold; pass the same function"):
        steppe.load(own, BENCHMARK.model(1))
    with pytest.raises(UsageError, match="saved without `input_transform`; leave it out"):
        steppe.load(plain, BENCHMARK.model(1), input_transform=lambda x: x.float() - 100)
    other = steppe.load(own, BENCHMARK.model(1), input_transform=lambda x: x.float() - 100)
    assert one.evaluate([first]) == other.evaluate([first])


def test_older_file_without_input_transform_entry(tmp_path: Path) -> None:
    file = tmp_path / "learner.safetensors"
    one = Learner(BENCHMARK.model(0), small("pictures", "er").method_settings, input_transform=lambda x: x.float() / 2)
    state = one.state_dict()
    del state["prepared"]
    write_state(file, "learner", state)
    assert steppe.load(file, BENCHMARK.model(0), input_transform=lambda x: x.float() / 2).num_tasks == 0


def test_failed_load_does_not_change_the_model(tmp_path: Path) -> None:
    file, model = tmp_path / "learner.safetensors", BENCHMARK.model(5)
    one = learner("er")
    one.learn(tasks()[0], **HOW)
    write_state(
        file, "learner", {**one.state_dict(), "streams": {}}
    )  # the weights are read before the missing part is noticed
    before = weights(model)
    with pytest.raises(RunError, match="does not contain a resumable learner"):
        steppe.load(file, model)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())


class Counting(nn.Module):
    """Has state besides weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.LazyLinear(6))
        self.inner(torch.zeros(1, *tasks()[0].train.first()[0].shape[1:]))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def test_extra_state_is_rejected(tmp_path: Path) -> None:
    one = Learner(Counting(), small("pictures", "er").method_settings)
    assert not one.is_saveable
    with pytest.raises(ModelError, match=r"the model has extra state \(get_extra_state\) beside"):
        one.save(tmp_path / "learner.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["er", "fs-dgpm"])
def test_expanded_buffers_are_restored(method: str, tmp_path: Path) -> None:
    """Its elements share memory, so it cannot be written to, but some methods restore buffers."""

    def build_model() -> nn.Module:
        model = BENCHMARK.model(0)
        model.register_buffer("mean", torch.tensor([0.5]).expand(8))
        return model

    one = Learner(build_model(), small("pictures", method).method_settings)
    one.learn(tasks()[0], **HOW)
    one.save(tmp_path / "learner.safetensors")
    other = steppe.load(tmp_path / "learner.safetensors", build_model())
    assert same(one, other)


class Placed(nn.Module):
    """Adds to its input what its first forward stored in a buffer that was empty or missing before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = BENCHMARK.model(0), kind
        if kind != "not named":
            self.register_buffer("place", None, persistent=kind == "persistent")

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "place", None) is None:
            found = x[:1].detach().mean(0) if self.kind != "not named" else torch.linspace(0, 1, x.shape[-1])
            self.register_buffer("place", found, persistent=self.kind == "persistent")
        output: Tensor = self.inner(x + self.place)
        return output


@pytest.mark.parametrize("kind", ["passing", "persistent", "not named"])
@pytest.mark.parametrize("old", [False, True])
def test_lazy_buffers(kind: str, old: bool, tmp_path: Path) -> None:
    """A fresh model does not have them yet. Their content may come from the data, and is restored where possible."""
    first, second, _ = tasks()
    file = tmp_path / "learner.safetensors"
    one = Learner(Placed(kind), small("pictures", "fs-dgpm").method_settings)
    one.learn(first, **HOW)
    assert one.is_saveable
    state = one.state_dict()
    if old:
        del state["network"]["self_made"]
    write_state(file, "learner", state)
    if old and kind != "passing":  # not recorded as a lazy buffer
        with pytest.raises(ModelError, match=r"^'place' is in the saved state but not in the model; pass the model"):
            steppe.load(file, Placed(kind))
        return
    other = steppe.load(file, Placed(kind))
    other.save(file)
    again = steppe.load(file, Placed(kind))
    for each in (one, other, again):
        each.learn(second, **HOW)
    assert same(one, other)
    assert same(one, again)
    assert torch.equal(one.model.place, other.model.place)


def test_non_persistent_buffer_of_another_size_is_skipped(tmp_path: Path) -> None:
    def build_model(size: int, persistent: bool) -> nn.Module:
        model = BENCHMARK.model(0)
        model.register_buffer("mask", torch.ones(size), persistent=persistent)
        return model

    one = Learner(build_model(3, False), small("pictures", "er").method_settings)
    one.learn(tasks()[0], **HOW)
    one.save(tmp_path / "file")
    other = steppe.load(tmp_path / "file", build_model(5, False))
    assert same(one, other)
    assert other.model.mask.shape == (5,)
    with pytest.raises(ModelError, match=r"'mask' is .* pass the same model"):
        steppe.load(tmp_path / "file", build_model(5, True))


def test_failed_load_empties_lazy_buffers_again(tmp_path: Path) -> None:
    one = Learner(Placed("passing"), small("pictures", "er").method_settings)
    one.learn(tasks()[0], **HOW)
    write_state(tmp_path / "file", "learner", {**one.state_dict(), "streams": {}})
    model = Placed("passing")
    with pytest.raises(RunError, match="does not contain a resumable learner"):
        steppe.load(tmp_path / "file", model)
    assert model.place is None


def test_weights_are_restored_although_a_buffer_has_grown() -> None:
    """As with the best weights at the end of a task."""
    model = Placed("passing")
    network = Learner(model, small("pictures", "er").method_settings).network
    for later in (torch.zeros(3), torch.zeros(5), torch.zeros(5, dtype=torch.int64)):
        kept, before = network.snapshot(), weights(model)
        model.place = later
        with torch.no_grad():
            next(model.parameters()).add_(1)
        network.restore(kept)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
        assert model.place is later


def test_saved_within_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)
    first, second, third = tasks()
    one = learner("fs-dgpm")
    one.learn(first, **HOW)
    file = tmp_path / "learner.safetensors"

    def save_once(event: Event) -> None:
        if isinstance(event, Progress) and not file.exists():
            one.save(file)

    one.learn(second, **HOW, callback=save_once)
    other = steppe.load(file, BENCHMARK.model(99))
    assert other.has_pending_task
    with pytest.raises(UsageError, match="in the middle of 'pictures 2'"):
        other.learn(third, **HOW)
    with pytest.raises(UsageError, match="in the middle of 'pictures 2'"):
        other.learn(second, **{**HOW, "epochs": 9})
    other.learn(second, **HOW)
    assert same(one, other)


def test_global_generator_is_not_changed(tmp_path: Path) -> None:
    one = learner("er")
    one.learn(tasks()[0], **HOW)
    before = torch.get_rng_state()
    one.save(tmp_path / "file")
    steppe.load(tmp_path / "file", BENCHMARK.model(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_model_is_rejected(tmp_path: Path) -> None:
    one = learner("er")
    one.learn(tasks()[0], **HOW)
    one.save(tmp_path / "file")
    with pytest.raises(ModelError, match=r"'head\.bias' is .*\(4,\).*\(6,\)"):
        steppe.load(tmp_path / "file", Pictures(tasks=2).model(0))
    with pytest.raises(ModelError, match="not in the saved state"):
        steppe.load(tmp_path / "file", nn.Linear(3, 3))


def test_learner_loaded_in_inference_mode_can_learn_outside_it(tmp_path: Path) -> None:
    first, second, _ = tasks()
    one = learner("fs-dgpm")
    one.learn(first, **HOW)
    one.save(tmp_path / "file")
    model = BENCHMARK.model(1)
    with torch.inference_mode():
        other = steppe.load(tmp_path / "file", model)
    one.learn(second, **HOW)
    other.learn(second, **HOW)
    assert same(one, other)


@pytest.mark.parametrize("place", [".", "/", "folder"])
def test_saving_to_a_directory_is_an_error(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(RunError, match=f"cannot write {place}: Is a directory; .*choose another location"):
        learner("er").save(place)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_unknown_method_is_rejected(tmp_path: Path) -> None:
    one = learner("er")
    state = one.state_dict()
    state["settings"]["kind"] = "Mine"
    write_state(tmp_path / "file", "learner", state)
    with pytest.raises(UsageError, match=r"Mine.*register it first"):
        steppe.load(tmp_path / "file", BENCHMARK.model(0))


def test_method_without_state_attrs_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner("er")
    one.learn(tasks()[0], **HOW)
    monkeypatch.setattr(type(one.validate(tasks()[1])), "state_attrs", None)
    with pytest.raises(UsageError, match="`state_attrs`"):
        one.save(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_unversioned_weights_are_read(tmp_path: Path) -> None:
    kept = {"layer.weight": torch.randn(3, 2), "layer.bias": torch.randn(3)}
    save_file(kept, tmp_path / "old")
    found = read_state(tmp_path / "old", "weights")
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_weights_are_plain_safetensors_files(tmp_path: Path) -> None:
    kept = {"layer.weight": torch.randn(3, 2), "count": torch.tensor(3)}
    write_state(tmp_path / "file", "weights", kept)
    with safe_open(tmp_path / "file", framework="pt") as opened:
        assert set(opened.keys()) == kept.keys()
        assert torch.equal(opened.get_tensor("layer.weight"), kept["layer.weight"])


def test_number_of_heads_has_the_same_limit_as_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that use all outputs are not limited, since nothing is stored for them."""
    monkeypatch.setattr(heads, "_LARGEST_MASK", 12)
    x, y = torch.randn(12, 6), torch.arange(12) % 2
    for head, most in ((range(2), 3), (None, 5)):
        one = Learner(nn.Linear(6, 4), steppe.ER())
        asks = (partial(one.learn, Task((x, y), head=range(2))), partial(one.network.heads.add, range(2), 4))
        for _ in range(most):
            one.learn(Task((x, y), head=head))
        one.save(tmp_path / "learner")
        assert steppe.load(tmp_path / "learner", nn.Linear(6, 4)).num_tasks == most
        for ask in asks:
            with pytest.raises(UsageError, match=f"{most + 1} tasks.*at most 12"):
                ask()
            assert (one.num_tasks, one.network.heads.ranges) == (most, [head] * most)
