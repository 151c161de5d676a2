"""FS-DGPM and its family (Algorithm 1): flatten sharpness within the gradient memory, learn outside it.

With D the batch, N a sample of the replay buffer, M the bases and Λ their importances, one update is

    1. v = 0;   K times:   v ← v + η1 · ∇L_D(w + v) M Λ Mᵀ
    2. from the second task on:   Λ moves along ∇_Λ L_{D∪N}(w + v), by the importance rule
    3. w ← w − η3 · ∇L_{D∪N}(w + v) (I − M Λ Mᵀ)

after which D goes into the buffer (once per batch). After each task M is rebuilt from samples of the buffer.

| member    | perturbation                  | importances λ                   |
| --------- | ----------------------------- | ------------------------------- |
| fs-dgpm   | ascent                        | the paper's rule                |
| fs-gpm    | ascent                        | 1                               |
| fs-sgpm   | ascent                        | spectral, fixed per task        |
| fs-rgpm   | ascent, chunked               | ridge, fixed per task           |
| la-dgpm   | descent (look-ahead), chunked | the paper's rule, with the sign reversed |
| dgpm      | only to update λ              | the paper's rule                |
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe.checkpoint.tree import State, equal_trees
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.descent import Descent, make_descent
from steppe.methods.parts.loss_shares import LossShares
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd import clip_factor
from steppe.methods.parts.sharpness import PerturbedGradient, SharpnessAscent
from steppe.methods.parts.weight_average import WeightAverage
from steppe.network.eval_batches import eval_batch_size
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.projection.hooks import find_data_weights
from steppe.projection.importance import ImportanceRule, Ones, Ridge, Sigmoid, Spectral
from steppe.projection.input_gram import InputGram
from steppe.projection.layers import ProjectedWeight, require_covered
from steppe.projection.memory import GradientMemory
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import SearchRange, linear_range, log_range, setting, without
from steppe.tensors.batch import Batch
from steppe.tensors.nest import index_nest, nest_length


@dataclass(frozen=True)
class FSDGPM(MethodConfig):
    """Settings of the family; the defaults are the paper's FS-DGPM on Permuted MNIST.

    Example:
        >>> import steppe, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> learner = steppe.Learner(model, steppe.FSDGPM(importance="spectral"))
        >>> for _ in range(2):
        ...     _ = learner.learn(steppe.Task((torch.randn(20, 4), torch.arange(20) % 2)))
        >>> learner.num_tasks
        2
    """

    uses_projection = True
    working_memory = ("bases", "importances")

    lr: float = setting(0.01, "SGD learning rate (η3)", above=0, search=log_range(1e-3, 0.3))
    momentum: float = setting(0.9, "SGD momentum", at_least=0, below=1)
    clip: float = setting(2.0, "maximum gradient norm before projection; 0 disables clipping", at_least=0)
    ascent_steps: int = setting(2, "ascent steps of the perturbation (K)", at_least=1)
    ascent_lr: float = setting(0.05, "step size of an ascent step (η1)", above=0, search=log_range(1e-3, 0.3))
    ascent_clamp: float = setting(2.0, "each element of a projected ascent gradient is clamped to ± this", above=0)
    ascent_form: str = setting(
        "whole",
        "take each ascent step on the whole batch (paper) or on a chunk of it (released code)",
        choices=("whole", "chunked"),
    )
    second_order: bool = setting(False, "differentiate through the ascent steps")
    statistics: str = setting(
        "once",
        "update BatchNorm's running statistics once per update, or in every forward pass of it (released code)",
        choices=("once", "every-forward"),
    )
    perturbation: str = setting(
        "ascend",
        "perturb uphill (ascend), downhill (look-ahead), or only to update the importances (importance-only)",
        choices=("ascend", "look-ahead", "importance-only"),
    )
    importance: str = setting(
        "sigmoid",
        "rule for the importances λ of the basis directions; `ridge` keeps all directions, whatever the threshold",
        choices=("sigmoid", "ones", "spectral", "ridge"),
    )
    importance_lr: float = setting(
        0.01, "learning rate of the importances (η2), for `sigmoid`", at_least=0, search=log_range(1e-3, 10)
    )
    temperature: float = setting(10.0, "temperature of the sigmoid, for `sigmoid`", above=0)
    alpha: float = setting(
        25.0,
        "how slowly λ falls with the singular value (α), for `spectral`; larger keeps more directions near λ = 1",
        above=0,
        search=log_range(1, 200),
    )
    ridge: float = setting(
        0.0014,
        "share of the strongest direction's energy at which λ is about a half (a), for `ridge`; larger protects less",
        above=0,
        search=log_range(1e-4, 0.3),
    )
    ridge_first: float = setting(
        0.015, "the same for the first layer, whose inputs are the data", above=0, search=log_range(1e-4, 0.3)
    )
    first_inputs: str = setting(
        "buffer",
        "for `ridge`, take the first layer's inputs from the buffer, or from every training sample of all tasks",
        choices=("buffer", "all"),
    )
    gram_rank: int = setting(
        0,
        "with `first_inputs=all`, directions of the inputs' Gram matrix to keep between tasks; 0 keeps the whole",
        at_least=0,
    )
    current_weight: float = setting(
        0.5, "weight of the current samples' mean loss; 0.5 for both is the mean of all samples", at_least=0
    )
    replay_weight: float = setting(0.5, "weight of the replayed samples' mean loss", at_least=0)
    average: float = setting(
        0.0, "decay of the averaged weights that predict, after every update; 0 predicts without", at_least=0, below=1
    )
    buffer: int = setting(200, "replay buffer size in samples", at_least=1)
    basis_samples: int = setting(200, "samples drawn from the buffer to build the bases (n_s)", at_least=1)
    threshold: float = setting(
        0.99,
        "share of the inputs' energy that the bases hold after the first task (ε0)",
        above=0,
        at_most=1,
        search=linear_range(0.7, 0.999),
    )
    threshold_step: float = setting(
        0.0005, "increase of the threshold with each further task (Δε)", at_least=0, at_most=1
    )

    def search_space(self) -> dict[str, SearchRange]:
        """Without the settings of other importance rules."""
        own = {"sigmoid": ("importance_lr",), "spectral": ("alpha",), "ridge": ("ridge", "ridge_first"), "ones": ()}
        idle = [name for rule, names in own.items() for name in names if rule != self.importance]
        return without(super().search_space(), *idle, *(("threshold",) if self.importance == "ridge" else ()))

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        require_covered(covered)
        return _FSDGPM(self, network, covered, streams)

    def importance_rule(self) -> ImportanceRule:
        """The rule that initializes and updates λ."""
        if self.importance == "sigmoid":
            sign = -1 if self.perturbation == "look-ahead" else 1
            return Sigmoid(self.importance_lr, self.temperature, sign=sign)
        if self.importance == "ridge":
            return Ridge(self.ridge)
        return Spectral(self.alpha) if self.importance == "spectral" else Ones()

    def ascent(self) -> SharpnessAscent:
        """The ascent that finds v."""
        lr = -self.ascent_lr if self.perturbation == "look-ahead" else self.ascent_lr
        return SharpnessAscent(
            lr,
            self.ascent_steps,
            self.ascent_clamp,
            self.ascent_form == "chunked",
            self.second_order,
            self.statistics == "every-forward",
        )


class _FSDGPM(Method):
    descent: Descent
    state_attrs = ("descent", "replay", "memory", "tasks_done", "gram", "average", "built_from")
    built_from: State = None
    """What the bases were built from: slots of the buffer, and the number of threads, on which bits depend."""

    def __init__(
        self, settings: FSDGPM, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams
    ) -> None:
        self.settings, self.network = settings, network
        self.replay = Reservoir.from_streams(settings.buffer, streams)
        self.memory = GradientMemory(settings.importance_rule(), covered)
        self.ascent = settings.ascent()
        self.descent = make_descent(network, settings.lr, settings.momentum)
        self.tasks_done = 0
        whole = settings.importance == "ridge" and settings.first_inputs == "all"
        self.gram = InputGram(network, dict(covered), settings.gram_rank) if whole else None
        self.average = WeightAverage(network, settings.average) if settings.average > 0 else None
        self._shares = LossShares(settings.current_weight, settings.replay_weight, network)
        self._final_importances: dict[str, Any] = {}

    def begin_task(self) -> None:
        super().begin_task()
        if self.average is not None:
            self.average.begin()
        self.ascent, self.memory.rule = self.settings.ascent(), self.settings.importance_rule()
        # The ascent runs the model on D alone. DGPM ascends only to update Λ, so not while there is none to update.
        self.uses_bare_batch = self.settings.perturbation != "importance-only" or (
            bool(self.memory) and self.memory.rule.dynamic
        )

    def decay_lr(self, divisor: float) -> float:
        self.ascent, self.memory.rule = self.ascent.decay_lr(divisor), self.memory.rule.decay_lr(divisor)
        return super().decay_lr(divisor)

    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self.replay.sample(len(batch))))  # D ∪ N
        current = union[: len(batch)]  # D
        union = self._shares.of(union, len(batch))

        # 1. Sharpness evaluation: v, in K steps within the memory; then L_{D∪N}(w + v) and its gradients.
        perturbed = self._evaluate_sharpness(current, union)
        with torch.inference_mode():  # nothing is differentiated from here on
            # 2. Dynamic gradient projection memory: update Λ, from the second task on.
            self.memory.update_importances(perturbed.importance_gradient)
            # 3. Weight update: w ← w − η3 · gradient (I − M Λ Mᵀ), clipped before the projection.
            clip = clip_factor(perturbed.gradient, self.settings.clip)
            self.descent.step(perturbed.gradient, clip, outside=self.memory, coordinates=perturbed.coordinates)
            if self.average is not None:
                self.average.step()
        return perturbed.loss

    def _evaluate_sharpness(self, current: Batch, union: Batch) -> PerturbedGradient:
        if self.settings.perturbation != "importance-only":
            return self.ascent(self.network, self.memory, current, union)
        # DGPM: v serves Λ only; the step uses the gradient at w.
        importance_gradient: Tensor | None = None
        if self.memory and self.memory.rule.dynamic:
            perturbed = self.ascent(self.network, self.memory, current, union, statistics=False)
            importance_gradient = perturbed.importance_gradient
        loss, gradient = self.network.loss_and_grad(union, factored=self.memory.linear)
        return PerturbedGradient(loss, gradient, importance_gradient)

    def after_batch(self, batch: Batch) -> None:
        if self.gram is not None:
            self.gram.add(batch)
        self.replay.add(batch)

    def end_task(self) -> list[str]:
        """UpdateGPM: replace the bases by those of the layers' inputs on samples of the buffer."""
        self._final_importances = self.memory.importance_distributions()
        requested, available = self.settings.basis_samples, len(self.replay)
        if self.gram is not None:
            self.gram.pack()  # first, so that the bases follow from what is kept
        slots = self.replay.sample_places(requested)
        memory, built_from = copy.copy(self.memory), {"slots": slots, "threads": torch.get_num_threads()}
        remarks = [] if slots is None else self._rebuild(memory, slots, self.tasks_done)
        if requested > available:
            remarks.append(f"basis_samples = {requested} exceeds the buffer's {available} samples: all were used.")
        # In one statement, so that an interrupt is safe.
        self.memory, self.built_from, self.tasks_done = memory, built_from, self.tasks_done + 1
        if self.average is not None:
            self.average.end()
        return remarks

    def _rebuild(self, memory: GradientMemory, slots: Sequence[int], number: int) -> list[str]:
        """Make a task's bases from stored samples, and from the Gram matrix if there is one."""
        settings, network, x = self.settings, self.network, self.replay.at(slots).x
        if settings.importance != "ridge":
            return memory.rebuild(network, x, settings.threshold + number * settings.threshold_step)
        grams = {} if self.gram is None else self.gram.grams()
        few = index_nest(x, slice(0, eval_batch_size(network.model, nest_length(x), 2)))
        first = list(grams) or find_data_weights(network, memory.covered, few)
        rules = dict.fromkeys(first, Ridge(settings.ridge_first))
        return memory.rebuild(network, x, None, rules=rules, grams=grams)

    def prediction_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.in_model()

    def grow_head(self, head: GrowingHead) -> None:
        super().grow_head(head)
        if self.average is not None:
            self.average.grow_head(head)

    def weights_restored(self) -> None:
        if self.average is not None:
            self.average.restart()

    def memory_bytes(self) -> dict[str, int]:
        held = {"replay": self.replay.memory_bytes(), **self.memory.memory_bytes()}
        if self.gram is not None:
            held["gram"] = self.gram.memory_bytes()
        if self.average is not None:
            held["weights"] = self.average.memory_bytes()
        return held

    def state_dict(self) -> State:
        return {name: value for name, value in super().state_dict().items() if value is not None}

    def load_state_dict(self, state: State) -> None:
        unused = {name: None for name in ("gram", "average") if getattr(self, name) is None}
        built_from = state.get("built_from")  # older states have none
        if built_from is not None:
            slots, threads = built_from["slots"], built_from["threads"]
            if type(threads) is not int or threads < 1 or any(type(slot) is not int for slot in slots or ()):
                raise ValueError(f"bases cannot be built from the slots {slots} with {threads} threads")
        left_out: dict[str, State] = {} if built_from is None else {"memory": {}}
        super().load_state_dict({**left_out, **state, "built_from": built_from, **unused})

    def reduced_state_dict(self) -> State | None:
        if self.built_from is None:
            return None
        memory = copy.copy(self.memory)
        self._rebuild_last(memory)
        if not equal_trees(memory.state_dict(), self.memory.state_dict()):  # the user has changed the weights
            return None
        return {name: value for name, value in self.state_dict().items() if name != "memory"}

    @property
    def rebuild_threads(self) -> int | None:
        return None if self.built_from is None else int(self.built_from["threads"])

    def rebuild_working_memory(self) -> None:
        if self.built_from is not None and not self.memory:
            memory = copy.copy(self.memory)
            self._rebuild_last(memory)
            self.memory = memory

    def _rebuild_last(self, memory: GradientMemory) -> None:
        """Build the last task's bases again."""
        assert self.built_from is not None
        with nullcontext() if self.average is None else self.average.weights_in_model():
            if self.built_from["slots"] is not None:
                self._rebuild(memory, self.built_from["slots"], self.tasks_done - 1)

    def diagnostics(self) -> dict[str, Any]:
        """The final importances of the bases used during the task, and the ranks of the bases built after it."""
        return {"importances": self._final_importances, "ranks": self.memory.ranks()}


_PMNIST = {"ascent_lr": 0.05, "buffer": 200, "basis_samples": 200, "threshold": 0.99, "threshold_step": 0.0005}


def _on_images(*values: float) -> dict[str, float]:
    names = ("ascent_lr", "buffer", "basis_samples", "threshold", "threshold_step")
    return dict(zip(names, values, strict=True))


_PRESETS = {
    "pmnist": _PMNIST,
    "pmnist-60k": {**_PMNIST, "buffer": 1000},
    "cifar100-split": _on_images(0.001, 1000, 125, 0.97, 0.003),
    "cifar100-superclass": _on_images(0.01, 1000, 125, 0.98, 0.001),
    "tiny-imagenet": _on_images(0.001, 400, 200, 0.90, 0.0025),
}
register_method(
    "fs-dgpm",
    FSDGPM,
    "Flattened sharpness with a dynamic gradient projection memory: the paper's method.",
    presets=_PRESETS,
)
register_method(
    "fs-gpm", FSDGPM, "FS-DGPM with hard projection (λ = 1).", variant={"importance": "ones"}, presets=_PRESETS
)
register_method(
    "fs-sgpm",
    FSDGPM,
    "FS-DGPM with importances from singular values.",
    variant={"importance": "spectral"},
    presets={
        **_PRESETS,
        "pmnist": {**_PRESETS["pmnist"], "ascent_form": "chunked", "ascent_lr": 0.075, "alpha": 25.0},
    },
)
_RIDGE_ON_DIGITS = {"ascent_form": "chunked", "ascent_lr": 0.075, "first_inputs": "all", "ridge_first": 0.01}
register_method(
    "fs-rgpm",
    FSDGPM,
    "FS-DGPM with the soft projection of ridge regression; the strongest on Permuted MNIST.",
    variant={"importance": "ridge", "replay_weight": 1.0},
    presets={
        **{name: {**preset, "ridge": 0.01, "ridge_first": 0.01} for name, preset in _PRESETS.items()},
        "pmnist": {**_PRESETS["pmnist"], **_RIDGE_ON_DIGITS},
        "pmnist-60k": {**_PRESETS["pmnist-60k"], **_RIDGE_ON_DIGITS},
    },
)
register_method(
    "dgpm",
    FSDGPM,
    "FS-DGPM that perturbs only to update the importances.",
    variant={"perturbation": "importance-only"},
    presets=_PRESETS,
)
register_method(
    "la-dgpm",
    FSDGPM,
    "FS-DGPM with a downhill look-ahead instead of an uphill perturbation.",
    variant={"perturbation": "look-ahead", "ascent_form": "chunked"},
    presets=_PRESETS,
)
