"""The paper's tables and figures as recipes: which studies each of them takes, and what is drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steppe.errors import unknown_name
from steppe.experiments.config import RunConfig, command_line
from steppe.experiments.study import Job


@dataclass(frozen=True)
class Part:
    """One study of a recipe."""

    name: str
    benchmark: str
    methods: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def jobs(self, out: Path, seeds: Iterable[int], changes: Sequence[str] = ()) -> list[Job]:
        """Its runs, in the recipe's directory."""
        return [
            Job(
                RunConfig.make(self.benchmark, method, [*self.changes, *changes], seed=seed),
                out / self.name / method / f"seed-{seed}",
            )
            for method in self.methods
            for seed in seeds
        ]

    def command(self, seeds: str, changes: Sequence[str] = ()) -> str:
        """The same as a command of its own; `seeds` as --seeds has them."""
        first = RunConfig.make(self.benchmark, self.methods[0], [*self.changes, *changes])
        return command_line("study", first, [*self.methods, "--seeds", seeds], [*self.changes, *changes])


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper: its studies, how many seeds by default, and what comes after them."""

    text: str
    parts: tuple[Part, ...]
    seeds: int = 5
    figures: tuple[str, ...] = ()
    landscapes: bool = False

    def only(self, methods: Sequence[str]) -> Recipe:
        """The same for some of its methods."""
        known = list(dict.fromkeys(method for part in self.parts for method in part.methods))
        for method in methods:
            if method not in known:
                raise unknown_name("method of this reproduction", method, known)
        parts = [replace(part, methods=tuple(m for m in part.methods if m in methods)) for part in self.parts]
        return replace(self, parts=tuple(part for part in parts if part.methods))


_FAMILY = ("fs-dgpm", "fs-gpm", "fs-sgpm", "dgpm", "la-dgpm")
_COMPARED = ("finetune", "ewc", "gem", "a-gem", "er", "la-maml", "gpm")
_MORE = ("fs-er", "sgp", "der++", "sam-er", "multitask")
_ON_IMAGES = ("fs-dgpm", "fs-sgpm", "er", "gpm")
_LANDSCAPE = ("er", "fs-er", "gpm", "fs-dgpm", "finetune", "oracle", "la-maml")
_FS_ER_STEPS = ("lr=0.001", "ascent_steps=1", "ascent_lr=0.01")  # the released script's
_RELEASED = (
    Part("released-fs-er", "pmnist-60k", ("fs-er",), (*_FS_ER_STEPS, "training.patience=0")),
    # That script's FS-ER descends by a fifth of what its ER does; ER by as little is the control.
    Part("lr-0.001", "pmnist-60k", ("er",), ("lr=0.001", "training.patience=0")),
)
_STOP_AT_FIRST = ("training.patience=1", "training.lr_divisor=10", "training.lr_min=0.01")  # at the first bad epoch

RECIPES = {
    "pmnist-table": Recipe(
        "Table 1, Permuted MNIST: every method, 20 tasks.",
        (Part("pmnist", "pmnist", (*_COMPARED, *_FAMILY, *_MORE)),),
        figures=("comparison", "matrix"),
    ),
    "ablation": Recipe(
        "The family's members beside GPM and ER on Permuted MNIST.",
        (Part("pmnist", "pmnist", (*_FAMILY, "gpm", "er", "fs-er")),),
        figures=("ablation", "importances"),
    ),
    "pmnist-controls": Recipe(
        "What gains on Permuted MNIST are made of: importances or form, the ascent, a buffer of as many bytes.",
        (
            # fs-sgpm's preset differs from fs-gpm's in the importances, the form and the size of the ascent.
            Part("ones-chunked", "pmnist", ("fs-gpm",), ("ascent_form=chunked", "ascent_lr=0.075")),
            Part("spectral-whole", "pmnist", ("fs-sgpm",), ("ascent_form=whole", "ascent_lr=0.05")),
            Part("large-ascent", "pmnist", ("fs-er",), ("ascent_steps=2", "ascent_lr=0.05")),  # FS-DGPM's
            Part("buffer-1000", "pmnist", ("der++",), ("buffer=1000",)),
        ),
    ),
    "k-study": Recipe(
        "FS-DGPM with K = 1, 2 and 3 steps of ascent on Permuted MNIST.",
        tuple(Part(f"ascent-steps-{k}", "pmnist", ("fs-dgpm",), (f"ascent_steps={k}",)) for k in (1, 2, 3)),
        figures=("ascent-steps",),
    ),
    "memory-study": Recipe(
        "FS-DGPM and ER with buffers of 50 to 1,000 samples on Permuted MNIST.",
        tuple(
            Part(f"buffer-{size}", "pmnist", ("fs-dgpm", "er"), (f"buffer={size}",))
            for size in (50, 100, 200, 500, 1000)
        ),
        figures=("memory-size",),
    ),
    "case-study": Recipe(
        "FS-ER against ER: 10 tasks of 60,000 digits.",
        (Part("pmnist-60k", "pmnist-60k", ("er", "fs-er")),),
        seeds=3,
        figures=("case-study",),
        landscapes=True,
    ),
    "case-study-released": Recipe(
        "FS-ER with the released script's step sizes, ER with its own and with these: 10 tasks of 60,000 digits.",
        (*_RELEASED, Part("no-early-stopping", "pmnist-60k", ("er",), ("training.patience=0",))),
        seeds=3,
    ),
    "fs-er-ablation": Recipe(
        "What FS-ER against ER depends on: stopping, the size of the ascent, momentum, the released step sizes.",
        (
            Part("no-early-stopping", "pmnist-60k", ("er", "fs-er"), ("training.patience=0",)),
            Part("ascent-lr-0.1", "pmnist-60k", ("fs-er",), ("ascent_lr=0.1",)),
            Part("ascent-lr-0.2", "pmnist-60k", ("fs-er",), ("ascent_lr=0.2",)),
            Part("no-momentum", "pmnist-60k", ("er", "fs-er"), ("momentum=0",)),
            *_RELEASED,
            # The script's options for early stopping, which it gives but does not turn on.
            Part("stop-at-first", "pmnist-60k", ("er",), _STOP_AT_FIRST),
            Part("released-fs-er-stop-at-first", "pmnist-60k", ("fs-er",), (*_FS_ER_STEPS, *_STOP_AT_FIRST)),
        ),
        seeds=1,
    ),
    "landscape-study": Recipe(
        "Is the flatter landscape the better learner? Seven methods, 10 tasks of 60,000 digits.",
        (Part("pmnist-60k", "pmnist-60k", _LANDSCAPE),),
        seeds=1,
        figures=("stability", "landscapes", "landscape-grid", "case-study"),
        landscapes=True,
    ),
    "superclass-table": Recipe(
        "Table 1, CIFAR-100 Superclass, true images: 20 tasks of up to 50 epochs.",
        (Part("cifar100-superclass", "cifar100-superclass", _ON_IMAGES),),
        seeds=1,
        figures=("comparison", "matrix"),
    ),
    "superclass-scrambled": Recipe(
        "CIFAR-100 Superclass as the paper's released code reads it.",
        (Part("cifar100-superclass", "cifar100-superclass", ("fs-dgpm",), ("reading=scrambled",)),),
        seeds=1,
        figures=("matrix",),
    ),
    "split-table": Recipe(
        "Table 1, CIFAR-100 Split: 10 tasks of up to 50 epochs.",
        (Part("cifar100-split", "cifar100-split", _ON_IMAGES),),
        seeds=1,
        figures=("comparison", "matrix"),
    ),
    "tiny-imagenet-table": Recipe(
        "Table 1, TinyImageNet: as many tasks as there are classes on disk, 10 epochs.",
        (Part("tiny-imagenet", "tiny-imagenet", ("fs-dgpm", "gpm", "er")),),
        seeds=1,
        figures=("comparison", "matrix"),
    ),
}
