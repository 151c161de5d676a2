"""What a learner is made of, how it is kept, and how it becomes again what was kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from steppe.checkpoint.tree import State, as_names, clone_tree, parse_dtype
from steppe.errors import UsageError
from steppe.learning.checks import (
    check_described,
    check_given,
    check_idle,
    check_state_matches,
    check_trainable,
    has_extra_state,
    validate_exclude,
)
from steppe.learning.input_kind import Kind
from steppe.learning.loop import TrainingLoop
from steppe.learning.workload import Workload, checked_threads
from steppe.methods.base import Method, MethodConfig
from steppe.network.linear_hooks import is_plain
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight, projected_weights
from steppe.runtime.locks import FairLock
from steppe.runtime.rng import Streams
from steppe.runtime.session import Session

_Result = TypeVar("_Result")


class LearnerState:
    """Everything that a learner keeps; `learner.Learner` says what it does with it."""

    def __init__(
        self,
        model: nn.Module,
        method: MethodConfig,
        *,
        seed: int = 0,
        device: str | torch.device | None = None,
        input_transform: Callable[[Tensor], Tensor] | None = None,
        exclude: Sequence[str] = (),
        threads: int | None = None,
    ) -> None:
        check_given(model, method, seed, device, input_transform, exclude)
        chosen = checked_threads(threads)
        self.model = model if device is None else model.to(device)
        self.settings = method
        self.streams = Streams(seed)
        self.network = Network(self.model, input_transform)
        self.num_tasks = 0
        self._exclude = validate_exclude(exclude, model)
        self._has_input_transform = input_transform is not None
        self._turn = FairLock()  # of the threads that use it
        self._workload = Workload(self.network, chosen)
        self._method: Method | None = None
        self._multi_head: bool | None = None  # what the method was made for, while it has not learnt
        self._covered: dict[str, bool] = {}  # the covered weights, and whether their gradients come as factors
        self._fitting: TrainingLoop | None = None  # while a task is being learnt
        self._interrupted: State = None  # where one broke off, until it is gone on with
        self._broken_off: tuple[str, Mapping[str, Tensor], int] | None = None  # to be ended: best weights, threads
        self._at_rest: list[str] | None = None  # frozen layers in eval mode when a task was last begun
        self._loaded = False  # and not gone on with since
        self._lost = ""  # why its memory is no longer what it should be
        self._outputs = 0
        self._kind: Kind | None = None  # of the inputs

    def _alone(self, work: Callable[[Session], _Result]) -> _Result:
        """Some work, while no other thread uses the learner."""
        session = Session(self.model, self._turn)
        return session.run(lambda: work(session))

    @property
    def has_pending_task(self) -> bool:
        """Whether it was saved in the middle of a task, which has to be gone on with first."""
        return self._interrupted is not None

    @property
    def is_saveable(self) -> bool:
        """Whether a file can hold all of it: the method says what has to be kept of it, and the model has nothing
        beside weights and buffers.
        """
        return (self._method is None or self._method.state_attrs is not None) and not has_extra_state(self.model)

    def _whole_state(self, *, bare: bool = False) -> State:
        """The state; with `bare`, without what the first task decides: the method, and the kind of inputs."""
        kind, method = (None, None) if bare else (self._kind, self._method)
        return {
            "settings": {"kind": type(self.settings).__name__, "values": self.settings.as_dict()},
            "seed": self.streams.seed,
            "exclude": list(self._exclude),
            "prepared": self._has_input_transform,
            "threads": self._workload.chosen,
            "tasks_learnt": self.num_tasks,
            "outputs": self._outputs,
            "inputs": None if kind is None else [list(kind[0]), str(kind[1]).removeprefix("torch.")],
            "trainable": list(self.network.trainable),
            "at_rest": self._at_rest,
            "covered": {} if bare else self._covered,
            "network": self.network.state_dict(),
            "method": None if method is None else method.state_dict(),
            "streams": self.streams.state_dict(),
            "fitting": self._interrupted if self._fitting is None else self._fitting.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Become the learner whose state it is: one with the same settings, seed and model."""
        check_idle(self._fitting)
        check_state_matches(state, self.settings, self.streams.seed, self._exclude, prepared=self._has_input_transform)
        self.network.load_state_dict(state["network"], state["outputs"])
        check_trainable(as_names(state.get("trainable")), self.model)  # nor do older states say this
        self._become(state)

    def _become(self, state: State) -> None:
        """All that is not the network's own."""
        num_tasks, outputs, fitting, covered = (
            state[name] for name in ("tasks_learnt", "outputs", "fitting", "covered")
        )
        check_described(fitting)
        kind: Kind | None = None
        if state["inputs"] is not None:
            shape, dtype = state["inputs"]
            kind = tuple(shape), parse_dtype(dtype)
        method: Method | None = None
        if state["method"] is not None:
            method = self.settings.start(self.network, self._covered_again(covered), self.streams)
            validation = fitting and fitting["validation"]
            for _ in range(validation["cuts"] if validation else 0):
                method.decay_lr(fitting["training"]["lr_divisor"])
            method.load_state_dict(state["method"])
        self.streams.load_state_dict(state["streams"])  # at last: making the method may have drawn
        self._at_rest, self._loaded, self._lost = as_names(state.get("at_rest")), True, ""
        self._broken_off = None
        self.num_tasks, self._outputs, self._interrupted = num_tasks, outputs, fitting
        self._kind, self._covered, self._method = kind, covered, method

    def _before(self) -> State:
        """All that a task takes for itself, to be given back should it fail: everything but the weights. None where
        that cannot be: in the middle of a task, or with a method that does not say what has to be kept of it.
        """
        first = self.num_tasks == 0  # a method that has not learnt anything is made anew
        if self._interrupted or not (first or self._method is None or self._method.state_attrs is not None):
            return None
        state = self._whole_state(bare=first)
        state["network"]["weights"] = {}
        return clone_tree({**state, "loaded": self._loaded}, "cpu")  # a device may have no room to spare

    def _give_back(self, before: State) -> None:
        device = self.network.device
        state = before if device.type == "cpu" else clone_tree(before, device)
        state["network"]["weights"] = self.network.state_dict()["weights"]
        self.network.load_state_dict(state["network"], state["outputs"])
        self._become(state)
        self._loaded = state["loaded"]

    def _covered_again(self, covered: Mapping[str, bool]) -> dict[str, ProjectedWeight]:
        """The covered weights that were found when the method was first made."""
        found = projected_weights(self.model, self._exclude) if covered else {}
        return {
            # Older versions took the gradients of any linear layer as factors.
            name: replace(found[name], factorable=factorable and all(map(is_plain, found[name].layers)))
            for name, factorable in covered.items()
        }

    def _check_whole(self) -> None:
        if self._lost:
            raise UsageError(f"{self._lost}: load a saved learner, or make a new one.")
