"""TensorBoard, MLflow and W&B hold every point once, however often a run was interrupted, and fail without harm."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import steppe
from steppe.cli.main import main
from steppe.cli.trackers import RunTrackers
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.integrations import requirements
from steppe.integrations.mlflow import MLflowLogger
from steppe.integrations.tensorboard import TensorBoardLogger
from steppe.integrations.wandb import WandbLogger
from steppe.learning.events import EpochEnded, Event, MemoryUpdated, Progress

Curves = dict[str, list[tuple[int, float]]]
SETS = ["benchmark.tasks=3", "benchmark.samples=60", "test_samples=50", "training.epochs=2"]
CURVES = {
    "train/epoch_loss": [6, 12, 18, 24, 30, 36],
    "train/lr": [6, 12, 18, 24, 30, 36],
    "task": [0, 12, 24],
    "ACC": [12, 24, 36],
    "BWT": [12, 24, 36],
    "accuracy/task-1": [12, 24, 36],
    "accuracy/task-3": [36],
    "rank/first.weight": [12, 24, 36],
}


def read_tensorboard(out: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: sorted((e.step, e.value) for e in events.Scalars(name)) for name in events.Tags()["scalars"]}


def read_mlflow(out: Path) -> Curves:
    from mlflow import MlflowClient

    client, run_id = MlflowClient(), json.loads((out / "trackers.json").read_text())["mlflow"]["run"]
    names = client.get_run(run_id).data.metrics
    return {name: [(e.step, e.value) for e in client.get_metric_history(run_id, name)] for name in names}


def read_wandb(out: Path) -> Curves:
    """From the files of all offline runs, as `wandb sync` reads them."""
    from wandb.proto import wandb_internal_pb2

    curves: Curves = defaultdict(list)
    files = sorted((out / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len({file.stem for file in files}) == 1  # all of them have the same id
    for file in files:
        records: list[Any] = []
        end = time.monotonic() + 30
        while not (records and records[-1].HasField("exit")):  # another process writes it
            assert time.monotonic() < end
            records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
        for record in records:
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                if not name.startswith("_"):
                    curves[name].append((record.history.step.num, float(json.loads(item.value_json))))
    return curves


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which is a log in the format of LevelDB after a header of seven bytes."""
    place, record, full = 7, b"", 32768
    while place + 7 <= len(data):
        if full - place % full < 7:
            place += full - place % full
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


READERS: dict[str, Callable[[Path], Curves]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


@pytest.fixture(params=READERS)
def tracker(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    pytest.importorskip(name, reason=f"needs {name}: pip install 'steppe[{name}]'")
    return name


def config() -> RunConfig:
    return RunConfig.make("pmnist", "gpm", SETS)


class StopAt:
    """Raises at an event, like a killed process: without a checkpoint."""

    def __init__(self, trackers: RunTrackers, task: int, epoch: int) -> None:
        self._trackers, self._place = trackers, (task, epoch)

    def __call__(self, event: Event) -> None:
        self._trackers(event)
        if isinstance(event, EpochEnded) and (event.task, event.epoch) == self._place:
            raise RuntimeError("killed")


def followed(name: str, out: Path, stops: list[tuple[int, int]]) -> Curves:
    for number, stop in enumerate([*stops, (-1, -1)]):
        with RunTrackers([name], config(), out) as trackers:
            if stop[0] >= 0:
                with pytest.raises(RuntimeError, match="killed"):
                    run(config(), out, StopAt(trackers, *stop), resume=number > 0)
            else:
                run(config(), out, trackers, resume=number > 0)
    return READERS[name](out)


def test_a_run_is_logged(tracker: str, tmp_path: Path) -> None:
    curves = followed(tracker, tmp_path / "out", [])
    for name, steps in CURVES.items():
        assert [step for step, _ in curves[name]] == steps, name
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert curves["ACC"][-1][1] == pytest.approx(result["acc"], rel=1e-6)
    assert curves["BWT"][-1][1] == pytest.approx(result["bwt"], rel=1e-6)
    last = [curves[f"accuracy/task-{number}"][-1][1] for number in (1, 2, 3)]
    assert last == pytest.approx(result["accuracy"][-1], rel=1e-6)
    rates = [value for _, value in curves["train/lr"]]
    assert rates == pytest.approx([config().method_settings.lr] * 6)


def test_an_interrupted_run_is_logged_once(tracker: str, tmp_path: Path) -> None:
    whole = followed(tracker, tmp_path / "whole", [])
    parts = followed(tracker, tmp_path / "parts", [(1, 0), (1, 1), (2, 0)])
    for curves in (whole, parts):
        curves.pop("train/loss", None)  # reported every so many seconds
    assert parts == whole


def test_trackers_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tensorboard", "mlflow"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'steppe[{name}]'")
    sets = [word for value in SETS for word in ("--set", value)]
    command = ["run", "pmnist", "gpm", *sets, "--out", "out", "--log", "tensorboard", "--log", "mlflow"]
    assert main(command) == 0
    for name in ("tensorboard", "mlflow"):
        curves = READERS[name](tmp_path / "out")
        assert [step for step, _ in curves["ACC"]] == [12, 24, 36]
    assert main(command) == 2
    assert "already contains a run" in capsys.readouterr().err


def test_a_resumed_study_keeps_its_trackers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'steppe[tensorboard]'")
    sets = [word for value in SETS for word in ("--set", value)]
    command = ["study", "pmnist", "gpm", "finetune", "--seeds", "1", "--jobs", "1", *sets, "--out", "out"]
    assert main([*command, "--log", "tensorboard"]) == 0
    assert json.loads((tmp_path / "out" / "trackers.json").read_text()) == {"tensorboard": {}}
    for method in ("gpm", "finetune"):
        place = tmp_path / "out" / method / "seed-0"
        assert [step for step, _ in read_tensorboard(place)["ACC"]] == [12, 24, 36]
    shutil.rmtree(place)  # as if it had not started yet
    assert main(["resume", "out", "--jobs", "1"]) == 0
    assert [step for step, _ in read_tensorboard(place)["ACC"]] == [12, 24, 36]


@pytest.mark.parametrize("command", ["run", "study"])
def test_a_missing_library_is_named_before_work_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    for name in READERS:
        assert main([command, "pmnist", "er", "--out", "out", "--log", name]) == 2
        needs = f"steppe: --log {name} needs {name}: pip install 'steppe[{name}]'.\n"
        assert capsys.readouterr().err == needs
    assert not (tmp_path / "out").exists()
    for make in (lambda: TensorBoardLogger("x"), MLflowLogger, WandbLogger):
        with pytest.raises(steppe.UsageError, match=r"pip install 'steppe\["):
            make()


def test_a_tracker_that_cannot_start_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: pip install 'steppe[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unknown://server")
    assert main(["run", "pmnist", "er", "--out", "out", "--set", "benchmark.tasks=2", "--log", "mlflow"]) == 1
    assert "--log mlflow cannot start" in capsys.readouterr().err


def make_learner() -> tuple[steppe.Learner, list[steppe.Task]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    x = torch.rand(40, 8)
    tasks = [steppe.Task(data, data) for data in ((x, torch.arange(40) % 2), (x.flip(1), torch.arange(40) % 2))]
    return steppe.Learner(model, steppe.GPM(thresholds="0.95")), tasks


def test_a_learner_is_logged_and_continued(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'steppe[tensorboard]'")
    learner, tasks = make_learner()
    matrix = steppe.AccuracyMatrix()
    for number, task in enumerate(tasks):
        with TensorBoardLogger(tmp_path / "tensorboard", lr=0.01) as logger:  # a new one, as in another process
            result = learner.learn(task, epochs=2, callback=logger)
            matrix.append(learner.evaluate(tasks[: number + 1]))
            logger.log_task(matrix, result)
    curves = read_tensorboard(tmp_path)
    assert [step for step, _ in curves["train/epoch_loss"]] == [4, 8, 12, 16]
    assert curves["task"] == [(0, 1.0), (8, 2.0)]
    assert [step for step, _ in curves["ACC"]] == [8, 16]
    assert curves["BWT"][-1][1] == pytest.approx(matrix.bwt)
    assert [step for step, _ in curves["rank/0.weight"]] == [8, 16]


def test_a_task_resumed_by_another_process_counts_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'steppe[tensorboard]'")
    learner, tasks = make_learner()
    with TensorBoardLogger(tmp_path / "tensorboard") as logger:
        learner.learn(tasks[0], epochs=2, callback=logger)

        def stop(event: Any) -> None:
            logger(event)
            if isinstance(event, EpochEnded):
                learner.save(tmp_path / "learner")
                raise RuntimeError("stopped")

        with pytest.raises(RuntimeError, match="stopped"):
            learner.learn(tasks[1], epochs=2, callback=stop)
    other = make_learner()[0]
    learner = steppe.load(tmp_path / "learner", other.model)
    with TensorBoardLogger(tmp_path / "tensorboard") as logger:
        learner.learn(tasks[1], epochs=2, callback=logger)
    assert [step for step, _ in read_tensorboard(tmp_path)["train/epoch_loss"]] == [4, 8, 12, 16]


def test_epochs_of_a_stream_and_streams_without_tasks(tmp_path: Path) -> None:
    """Epochs whose length is known at their end only, and differs."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'steppe[tensorboard]'")
    ranks = {"ranks": {"weight": {"rank": 3, "of": 8}}}
    with TensorBoardLogger(tmp_path / "tensorboard") as logger:
        for epoch, length in enumerate([5, 3]):
            logger(Progress(0, epoch, 2, 2, None, 1.0))
            logger(EpochEnded(0, "stream", epoch, length, 1.0, 0, 0.0))
        logger(Progress(1, 0, 2, 1, None, 1.0))
    for segment in range(2):
        with TensorBoardLogger(tmp_path / "tensorboard") as logger:
            logger(MemoryUpdated(segment, 40, diagnostics=ranks))
    curves = read_tensorboard(tmp_path)
    assert [step for step, _ in curves["train/loss"]] == [2, 7, 9]
    assert [step for step, _ in curves["train/epoch_loss"]] == [5, 8]
    assert curves["rank/weight"] == [(40, 3.0), (80, 3.0)]


def test_a_tracker_that_fails_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'steppe[tensorboard]'")
    learner, tasks = make_learner()
    logger = TensorBoardLogger(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(logger, "_write", fail)
    with pytest.warns(UserWarning, match="TensorBoard failed and logs nothing more; training continues.*no space left"):
        result = learner.learn(tasks[0], epochs=2, callback=logger)
    assert result.updates == 8
