"""Recipes for the paper's tables and figures: the studies each one needs, and the figures drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steppe.errors import unknown_name
from steppe.experiments.config import RunConfig
from steppe.experiments.study import Job


@dataclass(frozen=True)
class Part:
    """One study of a recipe."""

    name: str
    benchmark: str
    methods: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def jobs(self, out: Path, seeds: Iterable[int], changes: Sequence[str] = ()) -> list[Job]:
        """Return the runs, with directories under the recipe's."""
        return [
            Job(
                RunConfig.make(self.benchmark, method, [*self.changes, *changes], seed=seed),
                out / self.name / method / f"seed-{seed}",
            )
            for method in self.methods
            for seed in seeds
        ]

    def command(self, seeds: str, changes: Sequence[str] = ()) -> str:
        """Return the equivalent `steppe study` command; `seeds` is in the format of --seeds."""
        first = RunConfig.make(self.benchmark, self.methods[0], [*self.changes, *changes])
        return first.command_line(["study", self.benchmark, *self.methods, "--seeds", seeds], [*self.changes, *changes])


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper.

    Attributes:
        text: One line for `steppe reproduce --list`.
        parts: The studies.
        seeds: The default number of seeds.
        figures: Figures drawn from the runs.
        landscapes: Whether to measure loss landscapes.
    """

    text: str
    parts: tuple[Part, ...]
    seeds: int = 5
    figures: tuple[str, ...] = ()
    landscapes: bool = False

    def only(self, methods: Sequence[str]) -> Recipe:
        """Return the recipe restricted to these methods; an unknown one raises a UsageError."""
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
_FS_ER_STEPS = ("lr=0.001", "ascent_steps=1", "ascent_lr=0.01")  # as in the released script
_RELEASED = (
    Part("released-fs-er", "pmnist-60k", ("fs-er",), (*_FS_ER_STEPS, "training.patience=0")),
    # FS-ER's step size in that script is a fifth of ER's; ER with the same small step is the control.
    Part("lr-0.001", "pmnist-60k", ("er",), ("lr=0.001", "training.patience=0")),
)
_STOP_AT_FIRST = (
    "training.patience=1",
    "training.lr_divisor=10",
    "training.lr_min=0.01",
)  # stops at the first bad epoch

RECIPES = {
    "pmnist-table": Recipe(
        "Table 1, Permuted MNIST: every method, 20 tasks.",
        (Part("pmnist", "pmnist", (*_COMPARED, *_FAMILY, *_MORE)),),
        figures=("comparison", "matrix"),
    ),
    "ablation": Recipe(
        "The FS-DGPM family next to GPM and ER on Permuted MNIST.",
        (Part("pmnist", "pmnist", (*_FAMILY, "gpm", "er", "fs-er")),),
        figures=("ablation", "importances"),
    ),
    "pmnist-controls": Recipe(
        "Controls for gains on Permuted MNIST: importances, ascent form and size, a buffer of equal bytes.",
        (
            # The presets of fs-sgpm and fs-gpm differ in importances, ascent form and ascent size.
            Part("ones-chunked", "pmnist", ("fs-gpm",), ("ascent_form=chunked", "ascent_lr=0.075")),
            Part("spectral-whole", "pmnist", ("fs-sgpm",), ("ascent_form=whole", "ascent_lr=0.05")),
            Part("large-ascent", "pmnist", ("fs-er",), ("ascent_steps=2", "ascent_lr=0.05")),  # FS-DGPM's
            Part("buffer-1000", "pmnist", ("der++",), ("buffer=1000",)),
        ),
    ),
    "k-study": Recipe(
        "FS-DGPM with K = 1, 2 and 3 ascent steps on Permuted MNIST.",
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
        "FS-ER vs. ER: 10 tasks of 60,000 digits.",
        (Part("pmnist-60k", "pmnist-60k", ("er", "fs-er")),),
        seeds=3,
        figures=("case-study",),
        landscapes=True,
    ),
    "case-study-released": Recipe(
        "FS-ER with the released script's step sizes, ER with both: 10 tasks of 60,000 digits.",
        (*_RELEASED, Part("no-early-stopping", "pmnist-60k", ("er",), ("training.patience=0",))),
        seeds=3,
    ),
    "fs-er-ablation": Recipe(
        "What FS-ER vs. ER depends on: early stopping, ascent size, momentum, the released step sizes.",
        (
            Part("no-early-stopping", "pmnist-60k", ("er", "fs-er"), ("training.patience=0",)),
            Part("ascent-lr-0.1", "pmnist-60k", ("fs-er",), ("ascent_lr=0.1",)),
            Part("ascent-lr-0.2", "pmnist-60k", ("fs-er",), ("ascent_lr=0.2",)),
            Part("no-momentum", "pmnist-60k", ("er", "fs-er"), ("momentum=0",)),
            *_RELEASED,
            # Early stopping, which the script implements but does not enable.
            Part("stop-at-first", "pmnist-60k", ("er",), _STOP_AT_FIRST),
            Part("released-fs-er-stop-at-first", "pmnist-60k", ("fs-er",), (*_FS_ER_STEPS, *_STOP_AT_FIRST)),
        ),
        seeds=1,
    ),
    "landscape-study": Recipe(
        "Do flatter minima forget less? Seven methods, 10 tasks of 60,000 digits.",
        (Part("pmnist-60k", "pmnist-60k", _LANDSCAPE),),
        seeds=1,
        figures=("stability", "landscapes", "landscape-grid", "case-study"),
        landscapes=True,
    ),
    "superclass-table": Recipe(
        "Table 1, CIFAR-100 Superclass, correctly decoded images: 20 tasks of up to 50 epochs.",
        (Part("cifar100-superclass", "cifar100-superclass", _ON_IMAGES),),
        seeds=1,
        figures=("comparison", "matrix"),
    ),
    "superclass-scrambled": Recipe(
        "CIFAR-100 Superclass as decoded by the paper's released code.",
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
        "Table 1, TinyImageNet: one task per 5 classes on disk, 10 epochs.",
        (Part("tiny-imagenet", "tiny-imagenet", ("fs-dgpm", "gpm", "er")),),
        seeds=1,
        figures=("comparison", "matrix"),
    ),
}
