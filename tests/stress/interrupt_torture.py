"""Interrupt learners at random instants, and check that each stays intact, saves and learns on.

    python tests/stress/interrupt_torture.py --interrupts 2000 --out results/reliability/interrupts.json

Each trial takes a method and a model and interrupts `learn`, `evaluate` or `predict`: with SIGINT (Ctrl-C), with
SIGALRM and a handler that raises, or with an exception raised by another thread. A learner counts as broken if

- its model is left in another mode, with hooks, or with weights that no whole update produces;
- a sample in its memory was never shown, or has another label;
- the process is left with other signal handlers, threads or random numbers;
- it cannot be saved, loaded and trained further, unless it refuses by name.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from recording import option_parser, record
from torch import Tensor, nn

import steppe
from steppe.registry import METHODS

KINDS = ("SIGINT", "SIGALRM", "from a thread")
HOW: dict[str, Any] = {"epochs": 2, "batch_size": 8, "patience": 1}
SMALLER = {"buffer": 20, "memory": 20, "exemplars": 20, "basis_samples": 10, "tasks": 4}


class StruckError(BaseException):
    """Raised from another thread."""


def main() -> int:
    """Interrupt, and print and write the counts; 1 if a learner was broken."""
    parser = option_parser(__doc__, "the instants and the cases")
    parser.add_argument("--interrupts", type=int, default=2000, metavar="N", help="how many (default: 2000)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as directory:
        figures = run_trials(options.interrupts, options.seed, Path(directory))
    record(options.out, figures=[figures])
    return 1 if figures["broken"] else 0


def run_trials(interrupts: int, seed: int, directory: Path) -> dict[str, int]:
    """Run trials until there were this many interrupts; return the counts."""
    choice, count = random.Random(seed), Counter[str]()
    made = [(method, model) for method in sorted(METHODS) for model in (convolutional, chain)]
    cases = [Case(method, model, directory) for method, model in made]
    with_adamw = [(method, model) for method, model in made if METHODS[method].settings.takes_any_optimizer]  # type: ignore[attr-defined]
    cases += [Case(method, model, directory, keep) for method, model in with_adamw for keep in (False, True)]
    while count["interrupts"] < interrupts:
        case = choice.choice(cases)
        kind, act = choice.choice(KINDS), choice.choice(("learn", "learn", "learn", "evaluate", "predict"))
        count["trials"] += 1
        try:
            case.trial(kind, act, choice, count)
        except Exception:
            count["broken"] += 1
            print(f"broken: {case.name}, {kind} in {act}\n{traceback.format_exc()}", file=sys.stderr)
        if count["trials"] % 200 == 0:
            print(f"{count['interrupts']} interrupts, {count['broken']} broken", file=sys.stderr)
    kinds = ("trials", "interrupts", *KINDS, "in learn", "in evaluate", "in predict", "refused by name", "broken")
    return {name: count[name] for name in kinds} | {"methods": len({case.method for case in cases})}


def convolutional() -> nn.Module:
    """With BatchNorm and dropout."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(96, 16),
        nn.ReLU(),
        nn.Linear(16, 8),
    )


def chain() -> nn.Module:
    """Uses the fast path."""
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the user's."""
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def task(number: int) -> steppe.Task:
    """The n-th task, with its own head."""
    generator = torch.Generator().manual_seed(number)
    y = torch.arange(24) % 2 + 2 * number
    x = torch.rand(24, 16, generator=generator) + 0.3 * y[:, None]
    return steppe.Task((x, y), (x[:10], y[:10]), val=(x[10:], y[10:]), head=range(2 * number, 2 * number + 2))


TASKS = [task(number) for number in range(3)]
LABELS = {tuple(x.tolist()): int(y) for task in TASKS for x, y in zip(task.train.x, task.train.y, strict=True)}


class Case:
    """A method with a model: a learner that has learned one task, saved in a file, and the weights that the next task
    passes through."""

    def __init__(
        self, method: str, model: Callable[[], nn.Module], directory: Path, keep_state: bool | None = None
    ) -> None:
        self.method, self.model, self.name = method, model, f"{method} on {model.__name__}"
        self.optimizer: dict[str, Any] = {}
        if keep_state is not None:
            self.name += f" with AdamW, {'kept' if keep_state else 'anew'}"
            self.optimizer = {"optimizer": adamw, "keep_optimizer_state": keep_state}
        self.file, self.again = directory / f"{self.name}", directory / "again"
        entry = METHODS[method]
        known = {key: value for key, value in SMALLER.items() if key in entry.settings.__dataclass_fields__}
        settings = entry.settings(**{**entry.variant, **known})
        self.apart = settings.schedule != "sequential"
        torch.manual_seed(0)
        learner = steppe.Learner(model(), settings, seed=1, threads=1, **self.optimizer)
        if not self.apart:
            learner.learn(TASKS[0], **HOW)
        learner.save(self.file)
        self.boundaries, self.seconds = self._walked()

    def loaded(self) -> steppe.Learner:
        return steppe.load(self.file, self.model(), **self.optimizer)

    def learn(self, learner: steppe.Learner) -> None:
        learner.learn(TASKS[:2] if self.apart else TASKS[1], **HOW)

    def _walked(self) -> tuple[set[bytes], dict[str, float]]:
        """The weights after each update, and how long each action takes."""
        learner = self.loaded()
        method = learner.validate(TASKS[:2] if self.apart else TASKS[1])
        found, observe = {weights(learner)}, method.observe

        def observed(batch: steppe.Batch) -> Tensor:
            loss = observe(batch)
            found.add(weights(learner))
            return loss

        method.observe = observed  # type: ignore[method-assign]
        seconds = {}
        for name, act in self.acts(learner).items():
            started = time.perf_counter()
            act()
            seconds[name] = time.perf_counter() - started
        return found, seconds

    def acts(self, learner: steppe.Learner) -> dict[str, Callable[[], object]]:
        return {
            "learn": lambda: self.learn(learner),
            "evaluate": lambda: [learner.evaluate(TASKS) for _ in range(5)],
            "predict": lambda: [learner.predict(TASKS[0].train.x) for _ in range(5)],
        }

    def trial(self, kind: str, act: str, choice: random.Random, count: Counter[str]) -> None:
        """Interrupt one learner once."""
        learner = self.loaded()
        learner.model.eval()
        learner.model[-1].train()  # a mode that the user has set
        before, torch_before = state_of(learner.model), state_of_process()
        if not interrupted(kind, self.acts(learner)[act], choice.uniform(0, 1.1 * self.seconds[act])):
            return
        count["interrupts"] += 1
        count[kind] += 1
        count[f"in {act}"] += 1
        assert state_of(learner.model) == before, "the model's modes or hooks"
        assert state_of_process() == torch_before, f"the process: {state_of_process()} instead of {torch_before}"[:400]
        assert weights(learner) in self.boundaries, "the weights are those of no update"
        learner.model.train()
        try:
            learner.evaluate(TASKS[0])
        except steppe.UsageError as error:
            if "load a saved learner" not in str(error):
                raise
            count["refused by name"] += 1
            return
        check_memory(learner)
        learner.save(self.again)
        twin = steppe.load(self.again, self.model(), **self.optimizer)
        for each in (learner, twin):
            if not self.apart:
                each.learn(TASKS[2], **HOW)
            elif each.num_tasks == 0:
                self.learn(each)
            each.evaluate(TASKS[0])
            check_memory(each)
        assert weights(learner) == weights(twin), "a loaded one learns something else"
        assert nn.Linear(2, 2)(torch.ones(1, 2)).isfinite().all()


def interrupted(kind: str, act: Callable[[], object], delay: float) -> bool:
    """Whether an action was interrupted after this many seconds, before it finished."""
    main, over, struck = threading.get_ident(), threading.Event(), threading.Event()

    def strike() -> None:
        time.sleep(delay)
        if over.is_set():
            return
        struck.set()
        if kind == "from a thread":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(StruckError))
        else:
            os.kill(os.getpid(), getattr(signal, kind))

    def raised(number: int, frame: object) -> None:
        raise StruckError

    signal.signal(signal.SIGALRM, raised)
    striker = threading.Thread(target=strike)
    hit = False
    try:
        striker.start()
        act()
        over.set()
    except (StruckError, KeyboardInterrupt):
        hit = True
    for _ in range(3):  # an exception that is too late for the action arrives here
        with suppress(StruckError, KeyboardInterrupt):
            over.set()
            striker.join()
            time.sleep(0.0005)
    return hit


def weights(learner: steppe.Learner) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in learner.model.parameters())


def state_of(model: nn.Module) -> list[Any]:
    return [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
        for module in model.modules()
    ]


def state_of_process() -> list[Any]:
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64)
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("cpu"),
        bool(smallest / 2),
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        signal.getsignal(signal.SIGINT),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
    ]


def check_memory(learner: steppe.Learner) -> None:
    """Every stored sample was shown with its label, and every number is finite."""
    assert all(bool(p.isfinite().all()) for p in learner.model.parameters()), "weights"
    for batch in batches(learner.state_dict()["method"]):
        for x, y in zip(batch.x, batch.y, strict=True):
            assert LABELS.get(tuple(x.tolist())) == int(y), "a sample that nobody gave"


def batches(tree: Any) -> Iterator[steppe.Batch]:
    if isinstance(tree, steppe.Batch):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from batches(part)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from batches(part)


if __name__ == "__main__":
    sys.exit(main())
