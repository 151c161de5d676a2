"""The result of a run, `RunResult`: what result.json contains, validated where it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from steppe.errors import has_control_characters
from steppe.settings import TrainingConfig

Matrix = list[list[float | None]]
TimeMeasure = Literal["seconds", "cpu_seconds"]
"""Wall-clock time or CPU time; both are fields of `RunResult`."""

_SECTIONS = ("run", "benchmark", "training", "method")
_REPLAY_EVERYTHING = ("multitask", "oracle")  # results of older versions do not record the schedule
_REBUILT_BASES = ("fs-dgpm", "fs-gpm", "fs-sgpm", "dgpm", "la-dgpm")  # nor which memory can be rebuilt
_WORKING = ["bases", "importances"]


@dataclass(frozen=True)
class StageCost:
    """Time and memory of one stage: one task, or several tasks that were learned together.

    Attributes:
        seconds: Wall-clock seconds by kind (`train`, `evaluate`, `memory`).
        bytes: Memory besides the network after the stage, by kind.
        updates: Optimizer updates.
        cpu_seconds: CPU seconds by kind; None if they were not measured.
    """

    seconds: dict[str, float]
    bytes: dict[str, int]
    updates: int
    cpu_seconds: dict[str, float] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageCost:
        """Build from a validated entry of `per_task` in result.json."""
        return cls(data["seconds"], data["bytes"], data["updates"], data.get("cpu_seconds"))

    def as_dict(self) -> dict[str, Any]:
        """The entry of `per_task` in result.json."""
        cpu = {} if self.cpu_seconds is None else {"cpu_seconds": self.cpu_seconds}
        return {"seconds": self.seconds, "bytes": self.bytes, "updates": self.updates, **cpu}


@dataclass(frozen=True)
class RunResult:
    """The result of one finished run. Accuracies are percentages.

    Attributes:
        benchmark: Name of the benchmark.
        method: Name of the method.
        seed: Seed of the run.
        schedule: `sequential`, `joint` (all tasks at once) or `retrain` (from scratch on all tasks so far).
        acc: Mean accuracy over all tasks after the last one.
        bwt: Backward transfer; None where tasks were learned jointly, as are the next two.
        learning_acc: Mean accuracy on each task right after it was learned.
        forgetting: Mean drop from each earlier task's best accuracy.
        forward_transfer: None if it was not measured.
        accuracy: The square matrix R[i][j], accuracy on task j after task i; None where not measured.
        untrained: Accuracy of the untrained network on each task.
        ahead: Accuracy on each task but the first right before it was learned.
        updates: Optimizer updates in the whole run.
        seconds: Wall-clock seconds by kind (`train`, `evaluate`, `memory`).
        cpu_seconds: CPU seconds by kind; None if they were not measured.
        bytes: Memory besides the network at the end, by kind.
        working: The kinds of `bytes` that can be rebuilt from the others and the weights, so need not be kept.
        per_task: Cost of each stage.
        is_canonical: Whether tasks and training are the benchmark's own, so that published figures apply.
        remarks: What readers of the numbers must know.
        command: The command line that repeats the run.
        versions: Versions of steppe, torch and plugins.
        machine: Hardware and system; empty if not recorded.
        config: The run's configuration by section (`run`, `benchmark`, `method`, `training`).

    Example:
        >>> from steppe.experiments.config import RunConfig
        >>> from steppe.experiments.run import run
        >>> config = RunConfig.make("pmnist", "er", ["tasks=2", "samples=20", "test_samples=20"])
        >>> result = run(config)
        >>> result.method, result.num_tasks, result.is_canonical
        ('er', 2, False)
        >>> RunResult.from_dict(result.as_dict()) == result
        True
    """

    benchmark: str
    method: str
    seed: int
    schedule: str
    acc: float
    bwt: float | None
    learning_acc: float | None
    forgetting: float | None
    forward_transfer: float | None
    accuracy: Matrix
    untrained: list[float]
    ahead: list[float]
    updates: int
    seconds: dict[str, float]
    cpu_seconds: dict[str, float] | None
    bytes: dict[str, int]
    per_task: list[StageCost]
    is_canonical: bool
    command: str
    versions: dict[str, str]
    config: dict[str, dict[str, Any]]
    remarks: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    working: list[str] = field(default_factory=list)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.accuracy)

    @property
    def is_sequential(self) -> bool:
        """Whether each task was seen once, in turn.

        Multitask and Oracle see all earlier tasks again, but Oracle has a BWT.
        """
        return self.schedule == "sequential"

    @property
    def memory_bytes(self) -> int:
        """Memory besides the network at the end, of all kinds."""
        return sum(self.bytes.values())

    @property
    def working_bytes(self) -> int:
        """Memory at the end that can be rebuilt from the weights and what is kept."""
        return sum(size for kind, size in self.bytes.items() if kind in self.working)

    @property
    def kept_bytes(self) -> int:
        """Memory at the end that must be kept between tasks besides the network."""
        return self.memory_bytes - self.working_bytes

    @property
    def on_validation(self) -> bool:
        """Whether the accuracies are those on validation data, by which settings are chosen, and not on test data."""
        return self.config["run"].get("report") == "validation"

    @property
    def device(self) -> str:
        """The device the run computed on."""
        return str(self.config["run"].get("device", "cpu"))

    def time(self, measure: TimeMeasure) -> dict[str, float]:
        """The time spent on each kind of work.

        Args:
            measure: Wall-clock or CPU time.

        Returns:
            Seconds by kind.

        Raises:
            ValueError: CPU time was not measured.
        """
        seconds = self.cpu_seconds if measure == "cpu_seconds" else self.seconds
        if seconds is None:
            raise ValueError("CPU time was not measured in this run; use measure='seconds'.")
        return seconds

    @classmethod
    def from_dict(cls, data: Any) -> RunResult:
        """Validate the content of a result.json of this or an earlier version.

        Args:
            data: The parsed JSON.

        Returns:
            The result.

        Raises:
            ValueError: A field is missing or invalid; the message names it.
        """
        _validate(data)
        sequence = "joint" if data["method"] in _REPLAY_EVERYTHING else "sequential"
        config = {**data["config"], "training": TrainingConfig.rename_old_keys(data["config"]["training"])}
        return cls(
            benchmark=data["benchmark"],
            method=data["method"],
            seed=data["seed"],
            schedule=data.get("schedule", sequence),
            acc=data["acc"],
            bwt=data["bwt"],
            learning_acc=data["learning_acc"],
            forgetting=data["forgetting"],
            forward_transfer=data.get("forward_transfer"),
            accuracy=data["accuracy"],
            untrained=data.get("untrained", []),
            ahead=data.get("ahead", []),
            updates=data["updates"],
            seconds=data["seconds"],
            cpu_seconds=data.get("cpu_seconds"),
            bytes=data["bytes"],
            per_task=[StageCost.from_dict(stage) for stage in data.get("per_task", [])],
            is_canonical=data["full_length"],
            remarks=data.get("remarks", []),
            command=data["command"],
            versions=data["versions"],
            machine=data.get("machine", {}),
            config=config,
            working=data.get("working", _WORKING if data["method"] in _REBUILT_BASES else []),
        )

    def as_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "benchmark": self.benchmark,
            "method": self.method,
            "seed": self.seed,
            "schedule": self.schedule,
            "acc": self.acc,
            "bwt": self.bwt,
            "learning_acc": self.learning_acc,
            "forgetting": self.forgetting,
            "forward_transfer": self.forward_transfer,
            "accuracy": self.accuracy,
            "untrained": self.untrained,
            "ahead": self.ahead,
            "updates": self.updates,
            "seconds": self.seconds,
            **({} if self.cpu_seconds is None else {"cpu_seconds": self.cpu_seconds}),
            "bytes": self.bytes,
            "working": self.working,
            "per_task": [stage.as_dict() for stage in self.per_task],
            "full_length": self.is_canonical,
            "remarks": self.remarks,
            "command": self.command,
            "versions": self.versions,
            "machine": self.machine,
            "config": self.config,
        }


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a finite number; booleans are not."""
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def _is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not has_control_characters(value)


def _is_setting(value: object) -> bool:
    return value == "" or isinstance(value, bool) or is_number(value) or _is_text(value)


def _is_matrix(value: object) -> bool:
    """A row for each task, in which the tasks learned by then are either all measured or all missing."""
    if not isinstance(value, list):
        return False
    for place, row in enumerate(value):
        if not isinstance(row, list) or len(row) != len(value) or not all(map(_is_number_or_none, row)):
            return False
        if len({entry is None for entry in row[: place + 1]}) != 1:
            return False
    return True


Check = Callable[[object], bool]


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: Check, *required: str) -> Check:
    """A dictionary with such values, in which the required keys are present."""
    return lambda value: isinstance(value, dict) and value.keys() >= set(required) and all(map(check, value.values()))


def _is_stage(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() >= {"seconds", "bytes", "updates"}
        and _dict_of(is_number)(value["seconds"])
        and _dict_of(_is_int)(value["bytes"])
        and _is_int(value["updates"])
        and _dict_of(is_number)(value.get("cpu_seconds", {}))
    )


_FIELDS: dict[str, Check] = {
    "benchmark": _is_text,
    "method": _is_text,
    "seed": _is_int,
    "acc": is_number,
    "bwt": _is_number_or_none,
    "learning_acc": _is_number_or_none,
    "forgetting": _is_number_or_none,
    "accuracy": _is_matrix,
    "updates": _is_int,
    "seconds": _dict_of(is_number, "train", "evaluate", "memory"),
    "bytes": _dict_of(_is_int),
    "full_length": lambda value: isinstance(value, bool),
    "command": _is_text,
    "versions": _dict_of(_is_text),
    "config": _dict_of(_dict_of(lambda value: isinstance(value, list) or _is_setting(value)), *_SECTIONS),
}
_LATER_FIELDS: dict[str, Check] = {  # absent from results of older versions
    "schedule": _is_text,
    "forward_transfer": _is_number_or_none,
    "cpu_seconds": _dict_of(is_number, "train", "evaluate", "memory"),
    "untrained": _list_of(is_number),
    "ahead": _list_of(is_number),
    "per_task": _list_of(_is_stage),
    "remarks": _list_of(_is_text),
    "working": _list_of(_is_text),
    "machine": _dict_of(lambda value: is_number(value) or _is_text(value)),
}


def _validate(data: Any) -> None:
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    if missing := [name for name in _FIELDS if name not in data]:
        raise ValueError(f"it has no field {missing[0]!r}")
    for name, check in {**_FIELDS, **_LATER_FIELDS}.items():
        if name in data and not check(data[name]):
            raise ValueError(f"its field {name!r} is invalid")
