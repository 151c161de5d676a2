"""A run's whole landscape, from its directory to landscape.json and back; and the command that measures it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_landscape import loss_at
from safetensors.torch import load_file, save_file

from steppe.cli.main import main
from steppe.errors import RunError, UsageError
from steppe.experiments import run_directory as runs
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.landscape import measure as module
from steppe.landscape.directions import random_direction
from steppe.landscape.files import read_landscape
from steppe.landscape.measure import MeasureProgress, Request, measure
from steppe.landscape.settings import LandscapeSettings
from steppe.network.network import Network
from steppe.registry import BENCHMARKS

QUICK = LandscapeSettings(samples=30, directions=2, points=5, radius=0.5)
OPTIONS = ["--samples", "30", "--directions", "2", "--points", "5", "--radius", "0.5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three tasks, each with its own head."""
    out = tmp_path_factory.mktemp("runs") / "one"
    run(RunConfig.make("split-mnist", "er", ["tasks=3", "samples=60"], seed=3), out)
    return out


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_every_learned_task_is_measured_after_every_task(finished: Path, tmp_path: Path) -> None:
    """On all training samples, against copies of the network moved one by one."""
    settings = QUICK.replace(samples=10**6)
    found = measure(finished, tmp_path / "a.json", settings)
    assert sorted(found.pairs) == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
    config = RunConfig.load(finished / "config.toml")
    tasks, model = config.benchmark_settings.stream(3), config.benchmark_settings.model(0)
    for after, task in found.pairs:
        model.load_state_dict(load_file(finished / "checkpoints" / f"task-{after:03d}.safetensors"))
        x, y = tasks[task - 1].train.take(torch.arange(len(tasks[task - 1].train)))
        for number in range(2):
            d = random_direction(Network(model), 0, number)
            expected = [
                loss_at(model, x.double() / 255, y, [d], [alpha], tasks[task - 1].head) for alpha in settings.alphas
            ]
            assert found.pairs[after, task].losses[number] == pytest.approx(expected, rel=1e-5)
    assert found.pairs[3, 1].flatness.loss == pytest.approx(found.pairs[3, 1].losses[0][2])
    assert found.pairs[3, 1].noisy.loss == pytest.approx(found.pairs[3, 1].flatness.loss)


def test_the_bound_takes_its_terms_from_the_pairs(finished: Path, tmp_path: Path) -> None:
    found = measure(finished, tmp_path / "a.json", QUICK)
    assert sorted(found.bounds) == [2, 3]
    bound = found.bounds[3]
    assert bound.error.stability == pytest.approx(
        sum(found.pairs[3, task].noisy.noisy_error.mean for task in (1, 2)) / 2
    )
    assert bound.loss.sensitivity == found.pairs[3, 3].noisy.loss
    weights = [runs.read_weights(finished, place) for place in (1, 2)]
    squares = sum(float(tensor.double().square().sum()) for tensor in weights[1].values())
    apart = sum(float((weights[1][name] - weights[0][name]).double().square().sum()) for name in weights[1])
    assert bound.kl == pytest.approx(squares / (2 * 0.01**2), rel=1e-5)
    assert bound.kl_previous == pytest.approx(apart / (2 * 0.01**2), rel=1e-5)
    trained = 60  # n is the number of samples the task was learned from, not the 30 that the landscape is measured on
    for kl, complexity in ((bound.kl, bound.complexity), (bound.kl_previous, bound.complexity_previous)):
        assert complexity == pytest.approx(
            4 * math.sqrt((kl + math.log(2 * trained / QUICK.delta)) / trained), rel=1e-5
        )


def test_write_and_read_round_trip(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    written = measure(finished, out, QUICK, Request(hessian=True, surface=True, after=[1, 3], tasks=[1, 2]))
    found = read_landscape(out)
    assert found.run == {"benchmark": "split-mnist", "method": "er", "seed": 3, "config": written.run["config"]}
    assert (found.settings, found.weights, found.versions) == (QUICK, written.weights, written.versions)
    assert (found.pairs, found.bounds) == (written.pairs, written.bounds)
    assert len(found.pairs) == 3
    for pair in found.pairs.values():
        assert pair.eigenvalue is not None
        assert pair.surface is not None
        assert [row[2] for row in pair.surface] == pytest.approx(pair.losses[0], rel=1e-4)
        assert pair.surface[2] == pytest.approx(pair.losses[1], rel=1e-4)
        assert all(value == float(f"{value:.6g}") for row in pair.losses for value in row)
    assert found.as_dict() == json.loads(out.read_text(encoding="utf-8"))
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["profiles"]["3"]["2"] == found.pairs[3, 2].losses
    assert data["alphas"] == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_only_the_request_is_measured(finished: Path, tmp_path: Path) -> None:
    found = measure(finished, tmp_path / "a.json", QUICK, Request(after=[3, 2], tasks=[2]))
    assert sorted(found.pairs) == [(2, 2), (3, 2)]
    assert found.bounds == {}
    assert all(pair.surface is None and pair.eigenvalue is None for pair in found.pairs.values())


def test_landscape_depends_on_the_seed(finished: Path, tmp_path: Path) -> None:
    wanted = Request(after=[2])
    first, again, other = (
        measure(finished, tmp_path / f"{name}.json", QUICK.replace(seed=seed), wanted)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.pairs == again.pairs
    assert first.pairs[2, 1].losses != other.pairs[2, 1].losses
    assert first.pairs[2, 1].flatness.loss != other.pairs[2, 1].flatness.loss  # other samples


def test_requested_number_of_distinct_samples(finished: Path) -> None:
    config = RunConfig.load(finished / "config.toml")
    measurement = module._Measurement(finished, config, QUICK, Request(), "cpu")
    train = measurement.tasks[1].train
    x, y = train.take(torch.arange(len(train)))
    batch = measurement._samples(1)
    assert len(batch) == 30
    assert batch.task.tolist() == [1] * 30
    places = [[place for place in range(len(x)) if torch.equal(x[place] / 255, sample)] for sample in batch.x]
    assert len({found[0] for found in places}) == 30
    assert y[[found[0] for found in places]].tolist() == batch.y.tolist()


def interrupt_at(after: int, task: int) -> Callable[[MeasureProgress], None]:
    """A callback that interrupts the measurement once it has measured a task's landscape."""

    def interrupt(step: MeasureProgress) -> None:
        if (step.after, step.task) == (after, task):
            raise KeyboardInterrupt

    return interrupt


def test_resumed_equals_uninterrupted(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "top_eigenvalue", lambda network, batch, seed: network.loss(batch).item())  # faster
    whole = measure(finished, tmp_path / "whole.json", QUICK, Request(hessian=True, surface=True))
    out = tmp_path / "parts.json"

    with pytest.raises(KeyboardInterrupt):
        measure(finished, out, QUICK, callback=interrupt_at(3, 2))
    assert sorted(read_landscape(out).pairs) == [(1, 1), (2, 1), (2, 2)]
    measure(finished, out, QUICK, resume=True)
    measured: list[object] = []
    monkeypatch.setattr(module, "loss_profile", lambda *given: measured.append(given))
    measure(finished, out, QUICK, Request(hessian=True, surface=True), resume=True)
    assert measured == []  # only the missing part was added
    assert read_landscape(out).as_dict() == whole.as_dict()


def test_file_is_written_within_a_long_column(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITE_EVERY", 0.0)
    out = tmp_path / "a.json"

    with pytest.raises(KeyboardInterrupt):
        measure(finished, out, QUICK, callback=interrupt_at(3, 3))
    assert (3, 2) in read_landscape(out).pairs


def test_progress_ends_at_its_total(finished: Path, tmp_path: Path) -> None:
    for resume in (False, True):
        steps: list[MeasureProgress] = []
        measure(finished, tmp_path / "a.json", QUICK, Request(surface=True), resume=resume, callback=steps.append)
        assert steps[-1].done == steps[-1].total
        assert [step.done for step in steps] == sorted(step.done for step in steps)


def test_repeated_run_is_measured_again(own: Path) -> None:
    out = own / "landscape.json"
    before = measure(own, out, QUICK)
    file = own / "checkpoints" / "task-002.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    after = measure(own, out, QUICK, resume=True)
    assert after.pairs[2, 1] != before.pairs[2, 1]
    assert after.bounds[2] != before.bounds[2]
    assert after.as_dict()["profiles"]["3"] == before.as_dict()["profiles"]["3"]


def test_existing_files_are_not_overwritten(own: Path) -> None:
    out = own / "landscape.json"
    measure(own, out, QUICK)
    with pytest.raises(UsageError, match="--resume"):
        measure(own, out, QUICK)
    with pytest.raises(UsageError, match="samples = 30, not 20"):
        measure(own, out, QUICK.replace(samples=20), resume=True)
    config = (own / "config.toml").read_text(encoding="utf-8")
    (own / "config.toml").write_text(config.replace("seed = 3", "seed = 4"), encoding="utf-8")
    with pytest.raises(UsageError, match="another run"):
        measure(own, out, QUICK, resume=True)


def test_unfinished_runs_can_be_measured(own: Path) -> None:
    (own / "result.json").unlink()
    (own / "checkpoints" / "task-003.safetensors").unlink()
    (own / "checkpoints" / "task-001.safetensors").unlink()
    found = measure(own, own / "landscape.json", QUICK)
    assert sorted(found.pairs) == [(2, 1), (2, 2)]
    assert found.bounds[2].kl_previous is None


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (Request(after=[4]), "3 tasks"),
        (Request(after=[1], tasks=[2]), "leave nothing"),
        (Request(tasks=[0]), "--task: tasks are numbered from 1"),
        (Request(after=[-1]), "--after: tasks are numbered from 1"),
    ],
)
def test_unknown_tasks_are_rejected(finished: Path, tmp_path: Path, wanted: Request, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        measure(finished, tmp_path / "a.json", QUICK, wanted)
    assert not list(tmp_path.iterdir())


def test_missing_or_damaged_weights(own: Path) -> None:
    file = own / "checkpoints" / "task-002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(RunError, match=r"task-002\.safetensors cannot be read"):
        runs.read_weights(own, 1)
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(RunError, match="after task 2 do not fit the network"):
        measure(own, own / "a.json", QUICK)
    file.unlink()
    assert runs.weight_checkpoints(own) == [0, 2]
    with pytest.raises(UsageError, match=r"task-002\.safetensors does not exist: no weights"):
        runs.read_weights(own, 1)
    with pytest.raises(UsageError, match=r"task-002\.safetensors does not exist"):
        measure(own, own / "b.json", QUICK, Request(after=[2]))


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def spoilt(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return spoilt


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        spoil(lambda data: data.update(format=2)),
        spoil(lambda data: data.pop("profiles")),
        spoil(lambda data: data["run"].pop("config")),
        spoil(lambda data: data["settings"].update(points=7)),
        spoil(lambda data: data["settings"].update(colour="red")),
        spoil(lambda data: data["profiles"]["2"]["1"].pop()),
        spoil(lambda data: data["profiles"]["2"]["1"][0].pop()),
        spoil(lambda data: data["profiles"]["2"].update({"1": 3})),
        spoil(lambda data: data["profiles"]["2"]["1"][0].__setitem__(0, "high")),
        spoil(lambda data: data["profiles"]["2"]["1"][0].__setitem__(0, float("nan"))),
        spoil(lambda data: data["profiles"].update({"two": {}, "x": {"1": []}})),
        spoil(lambda data: data["flatness"]["2"].pop("1")),
        spoil(lambda data: data["flatness"]["2"]["1"].update(loss=None)),
        spoil(lambda data: data["noise"]["2"]["1"].pop("error")),
        spoil(lambda data: data["bound"]["2"].update(kl=True)),
    ],
)
def test_invalid_landscape_files_are_rejected(finished: Path, tmp_path: Path, change: Callable[[str], str]) -> None:
    out = tmp_path / "a.json"
    measure(finished, out, QUICK, Request(after=[2]))
    assert read_landscape(out).pairs
    out.write_text(change(out.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(RunError, match=r"a\.json cannot be read as a landscape: "):
        read_landscape(out)


def test_a_missing_landscape_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"landscape\.json does not exist; steppe landscape"):
        read_landscape(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "tiny"
    sets = ["--set", "samples=50", "--set", "test_samples=100"]
    assert main(["run", "pmnist", "finetune", "--tasks", "2", *sets, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["landscape", str(tmp_path / "runs"), "--hessian", *OPTIONS]) == 0
    printed = capsys.readouterr().out
    found = read_landscape(out)
    assert "pmnist, finetune, seed 0, after task 2" in printed
    pair = found.pairs[2, 1]
    assert f"1     {pair.flatness.loss:.4g}" in printed
    assert f"{pair.flatness.sharpness.mean:.4g} ± {pair.flatness.sharpness.error:.2g}" in printed
    assert f"{pair.eigenvalue:.4g}" in printed
    assert f"(KL {found.bounds[2].kl:.4g})" in printed
    assert found.command == "steppe landscape RUN --samples 30 --directions 2 --points 5 --radius 0.5 --hessian"
    assert main(["landscape", str(out), *OPTIONS]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["landscape", str(out), *OPTIONS, "--resume", "--surface", "--after", "2", "--task", "1"]) == 0
    again = read_landscape(out)
    assert again.pairs[2, 1].surface is not None
    assert again.pairs[2, 2] == found.pairs[2, 2]
    one = ["--directions", "1", "--points", "3", "--radius", "1", "--samples", "5"]
    assert main(["landscape", str(out), *one, "-o", str(tmp_path / "one.json")]) == 0
    assert read_landscape(tmp_path / "one.json").pairs[1, 1].flatness.sharpness.std is None


def test_benchmark_of_a_plugin(tmp_path: Path) -> None:
    """The run's config names the plugin, and so does the user."""
    plugin = tmp_path / "plain.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "import torch, steppe\n"
        "from torch import nn\n"
        "@steppe.register_benchmark('plain', 'Plain.')\n"
        "@dataclass(frozen=True)\n"
        "class Plain(steppe.Benchmark):\n"
        "    training = steppe.TrainingConfig()\n"
        "    def stream(self, seed):\n"
        "        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(seed))\n"
        "        y = (x[:, 0] > 0).long()\n"
        "        return [steppe.Task((x, y), (x, y)), steppe.Task((-x, y), (x, y))]\n"
        "    def network(self):\n"
        "        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))\n",
        encoding="utf-8",
    )
    out = tmp_path / "run"
    try:
        assert main(["run", "plain", "er", "--plugin", str(plugin), "--out", str(out)]) == 0
        assert main(["landscape", str(out), "--plugin", str(plugin), *OPTIONS]) == 0
    finally:
        BENCHMARKS.pop("plain", None)
    assert len(read_landscape(out).pairs) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("missing", "missing' is not a directory"),
        (".", "no run"),
        ("bare", "no run with saved weights"),
        ("bare --points 50", "odd"),
        ("bare --samples few", "whole number"),
        ("bare --radius 2", "radius"),
        ("bare --after one", "1,5,10"),
        ("bare --threads 0", "at least 1"),
        ("bare --device cuda", "--device cpu"),
        ("two -o a.json", "2 runs"),
        ("two/a --surface --directions 1", "needs at least 2"),
    ],
)
def test_invalid_commands_are_rejected(
    arguments: str,
    named: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments.startswith("bare"):
        shutil.copytree(finished, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    if arguments.startswith("two"):
        for name in "ab":
            shutil.copytree(finished, f"two/{name}")
    assert main(["landscape", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert {file.name for file in tmp_path.rglob("*.json")} <= {"result.json"}
