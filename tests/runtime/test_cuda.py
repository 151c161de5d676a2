"""CUDA code, as far as it can be tested without a GPU. torch's fake tensors have a device and a shape, but no values;
code that asks for the GPU itself is told that there is one."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import steppe
from steppe import Learner, Task, UsageError
from steppe.cli import landscape, study
from steppe.cli.main import main
from steppe.data.samples import TensorSamples
from steppe.errors import ModelError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run, validate_configs
from steppe.experiments.run_directory import RunDirectory
from steppe.experiments.study import Job, Outcome
from steppe.landscape.measure import Request
from steppe.landscape.settings import LandscapeSettings
from steppe.learning.checks import check_unchanged
from steppe.methods.a_gem import remove_conflict
from steppe.methods.base import MethodConfig
from steppe.projection import coverage
from steppe.projection.basis import running_sums
from steppe.runtime.contexts import without_fused_rnn
from steppe.runtime.devices import check_device, make_deterministic, to_device
from steppe.runtime.environment import format_machine, machine_info
from steppe.runtime.rng import preserve_global_rng

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Recorded(TorchDispatchMode):
    """Records every call of torch inside: its name, the devices of its tensors, and its options."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[str], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = [each.device.type for each in args if isinstance(each, Tensor)]
        self.calls.append((func.overloadpacket.__name__, devices, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> list[tuple[str, str, bool]]:
        """The copies: source, target, and whether they do not wait."""
        found = [(devices[0], options) for name, devices, options in self.calls if name == "_to_copy"]
        return [(source, options["device"].type, bool(options.get("non_blocking"))) for source, options in found]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the machine has one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Model 7")


@pytest.fixture
def flags_kept() -> Iterator[None]:
    """Restores cuDNN's flags after the test."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    yield
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = before


@pytest.mark.parametrize(("source", "target", "unwaited"), [(CPU, CUDA, True), (CUDA, CPU, False)])
def test_only_a_copy_to_the_cpu_is_waited_for(source: torch.device, target: torch.device, unwaited: bool) -> None:
    with FakeTensorMode(), Recorded() as recorded:
        moved = to_device(torch.empty(3, device=source), target)
    assert moved.device == target
    assert recorded.copies == [(source.type, target.type, unwaited)]


class Held:
    """Stands for a tensor on a device that only the device could index: returns the indices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __getitem__(self, places: Tensor) -> Tensor:
        return places


@pytest.mark.parametrize(("where", "labels"), [(CUDA, CUDA), (CUDA, CPU), (CPU, CUDA)])
def test_samples_on_the_gpu_are_indexed_without_waiting(where: torch.device, labels: torch.device) -> None:
    samples: Any = TensorSamples(torch.rand(6, 2), torch.arange(6))
    samples.x, samples.y = Held(where), Held(labels)
    with FakeTensorMode(), Recorded() as recorded:
        x, y = samples.take(torch.empty(3, dtype=torch.int64, device="cpu"))
    assert (x.device, y.device) == (where, labels)
    assert recorded.copies
    assert all(copy == ("cpu", "cuda", True) for copy in recorded.copies)


def test_cumulative_sums_are_computed_on_the_cpu() -> None:
    with FakeTensorMode(), Recorded() as recorded:
        found = running_sums(torch.empty(2, 5, device=CUDA))
    assert found.device == CUDA
    assert [devices for name, devices, _ in recorded.calls if name == "cumsum"] == [["cpu"]]


def test_a_gem_reads_nothing_from_the_gpu() -> None:
    with FakeTensorMode():  # raises if a value is read
        g = {"weight": torch.empty(2, 3, device=CUDA)}
        assert remove_conflict(g, {"weight": torch.empty(2, 3, device=CUDA)})["weight"].device == CUDA


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("device", "message"), [("cuda:1", "has 1 CUDA device"), ("mps", "not supported")])
def test_unsupported_devices_are_rejected(device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Learner(nn.Linear(2, 2), steppe.ER(), device=device)
    check_device("cuda:0")


def test_model_on_an_unsupported_device_is_rejected() -> None:
    with pytest.raises(UsageError, match="device meta"):
        Learner(nn.Linear(2, 2), steppe.ER(), device="meta")


def test_model_moved_after_creating_its_learner_is_an_error() -> None:
    model = nn.Linear(2, 2)
    parameters = dict(model.named_parameters())
    check_unchanged(model, parameters, CPU)
    with pytest.raises(ModelError, match=r"moved from .* to cpu after the learner was created"):
        check_unchanged(model, parameters, CUDA)


@pytest.mark.usefixtures("flags_kept")
def test_runs_on_cuda_are_deterministic() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.allow_tf32
    make_deterministic("cpu")
    assert (cudnn.deterministic, cudnn.allow_tf32) == before
    cudnn.benchmark = True
    make_deterministic("cuda")
    assert (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == (True, False, False)


class Recurrent(nn.Module):
    """A linear, a recurrent and a linear layer; records whether cuDNN is enabled in its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.cell, self.head = nn.Linear(3, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)
        self.fused: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.fused.append(torch.backends.cudnn.enabled)
        states, _ = self.cell(self.lift(x))
        last: Tensor = self.head(states[:, -1])
        return last


SEQUENCES = Task((torch.rand(8, 5, 3), torch.arange(8) % 2))


def test_recurrent_layers_are_not_fused_inside() -> None:
    with without_fused_rnn(Recurrent()):
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled
    with without_fused_rnn(nn.Linear(1, 1)):
        assert torch.backends.cudnn.enabled


@pytest.mark.filterwarnings("ignore:these weights belong to layers")  # the recurrent one
def test_gradients_in_eval_mode_go_through_unfused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's recurrent layers do not support it."""
    seen = []
    whole = coverage.find_factorable

    def watched(*given: Any) -> list[str]:
        seen.append(torch.backends.cudnn.enabled)
        return whole(*given)

    monkeypatch.setattr(coverage, "find_factorable", watched)
    Learner(Recurrent(), steppe.FSDGPM()).learn(SEQUENCES, batch_size=4)
    assert seen == [False]
    assert torch.backends.cudnn.enabled


@pytest.mark.filterwarnings("ignore:these weights belong to layers")  # the recurrent one
@pytest.mark.parametrize(
    ("method", "whole"),
    [
        (steppe.FSDGPM(second_order=True), False),
        (steppe.FSDGPM(), True),
        (steppe.LaMAML(second_order=True), False),
        (steppe.LaMAML(second_order=False), True),
    ],
)
def test_second_order_goes_through_unfused_layers(method: MethodConfig, whole: bool) -> None:
    learner = Learner(Recurrent(), method)
    learner.validate(SEQUENCES)
    model: Any = learner.model
    model.fused.clear()
    learner.learn(SEQUENCES, batch_size=8, epochs=1)
    assert all(model.fused) == whole


@pytest.mark.usefixtures("one_gpu")
def test_a_study_on_the_gpu_takes_one_run_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[tuple[int, bool]] = []

    def noted(jobs: Sequence[Any], workers: int, *given: Any, oversubscribe_tail: bool, **options: Any) -> Outcome:
        taken.append((workers, oversubscribe_tail))
        return Outcome()

    monkeypatch.setattr("steppe.experiments.study.run_all", noted)
    monkeypatch.setattr("steppe.runtime.environment.usable_cores", lambda: 16)
    made = RunConfig.make("pmnist", "finetune", ["tasks=2"], seed=0)
    for device, jobs in (("cpu", None), ("cuda", None), ("cuda", 3)):
        options = argparse.Namespace(jobs=jobs, checkpoint_every=5.0, debug=False)
        planned = [Job(replace(made, device=device), tmp_path / str(seed)) for seed in range(4)]
        study.do_study(options, tmp_path, planned, "steppe study", resume=False)
    assert taken == [(4, True), (1, False), (3, False)]


@pytest.mark.usefixtures("one_gpu")
def test_methods_are_validated_without_the_gpu() -> None:
    """There is none, so moving a model to it would fail."""
    validate_configs([RunConfig.make("pmnist", "fs-dgpm", ["tasks=2"], seed=0, device="cuda")])


def test_run_started_on_a_gpu_cannot_resume_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    RunDirectory.create(tmp_path, RunConfig.make("pmnist", "finetune", ["tasks=2"], seed=0, device="cuda"))
    assert main(["resume", str(tmp_path)]) == 2
    assert "was started on CUDA" in capsys.readouterr().err


@pytest.mark.usefixtures("one_gpu")
def test_the_gpu_is_named() -> None:
    assert "gpu" not in machine_info()
    assert machine_info("cuda")["gpu"] == "Model 7"
    assert "Model 7" in format_machine(machine_info("cuda"))
    machine_info.cache_clear()


def test_the_devices_generators_are_restored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator()  # stands for the GPU's
    monkeypatch.setattr("steppe.runtime.rng._global_generators", lambda device: [torch.default_generator, own])
    before = copy.deepcopy([torch.get_rng_state(), own.get_state()])
    with preserve_global_rng(CUDA):
        torch.rand(3)
        torch.rand(3, generator=own)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])


@pytest.mark.usefixtures("one_gpu")
def test_runs_and_landscapes_are_deterministic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seen by the devices that they request deterministic computation for."""
    asked: list[str] = []

    def noted(device: str) -> None:
        asked.append(device)
        raise KeyboardInterrupt  # before anything is moved there

    monkeypatch.setattr("steppe.experiments.run.make_deterministic", noted)
    monkeypatch.setattr("steppe.runtime.devices.make_deterministic", noted)
    with pytest.raises(KeyboardInterrupt):
        run(RunConfig.make("pmnist", "er", ["tasks=2"], seed=0, device="cuda"), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        landscape.measure(
            tmp_path / "run",
            None,
            LandscapeSettings(),
            Request(),
            device="cuda",
            resume=False,
            command="steppe landscape",
        )
    assert asked == ["cuda", "cuda"]


@pytest.mark.parametrize(("device", "message"), [("cpu", ""), ("cuda", " --device cuda")])
def test_landscape_records_its_device(device: str, message: str) -> None:
    options = argparse.Namespace(after=None, task=None, surface=False, hessian=False)
    assert landscape._command(options, LandscapeSettings(), device) == f"steppe landscape RUN{message}"


def test_predictions_are_on_the_inputs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(nn.Linear(2, 2), steppe.ER())
    learner.learn(Task((torch.rand(4, 2), torch.arange(4) % 2)))
    moved: list[torch.device] = []
    whole = torch.cat

    class Answered(Tensor):
        def to(self, *given: Any, **options: Any) -> Any:
            moved.append(given[0])
            return super().to(*given, **options)

    monkeypatch.setattr("steppe.learning.evaluation.torch.cat", lambda found: whole(found).as_subclass(Answered))
    x = torch.rand(3, 2)
    learner.predict(x)
    assert moved == [x.device]
