"""PyTorch Lightning: outputs of the first task stay while the second is learned in Lightning's own loop."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import steppe

pytest.importorskip("lightning", reason="needs lightning: pip install 'steppe[lightning]'")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from two_tasks import adamw, exact_memory, largest_change, loader, network, task

from steppe.integrations.lightning import GradientMemoryCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*isinstance.treespec",
    "ignore:the basis of",
)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)]


class Manual(Classifier):
    """Two optimizers, each for a part, and gradients accumulated by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [adamw(self.net[:3]), adamw(self.net[3:])]


class Flat(Classifier):
    """Sharpness flattened with Lightning's closure."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [exact_memory(self)]  # in a list: a memory is no part of the module

    def configure_optimizers(self) -> Any:
        return steppe.FlatSharpness(self.memory[0].wrap(adamw(self)), radius=0.05)


def trainer(callbacks: Any = (), **settings: Any) -> Trainer:
    quiet = {
        "max_epochs": 6,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(
            callbacks=list(callbacks), **{**quiet, "max_epochs": 6, "enable_checkpointing": False, **settings}
        )


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))


def outputs(model: Classifier, number: int) -> Tensor:
    x, _ = task(number, next(model.parameters()).dtype)
    with torch.no_grad():
        return model.eval()(x)


LOOPS: dict[str, tuple[type[Classifier], Any, float]] = {  # the module, settings of the trainer, and the tolerance
    "automatic": (Classifier, lambda: {"precision": "64-true"}, 1e-9),
    "automatic, accumulated": (Classifier, lambda: {"precision": "64-true", "accumulate_grad_batches": 2}, 1e-9),
    "automatic, clipped": (Classifier, lambda: {"precision": "64-true", "gradient_clip_val": 0.5}, 1e-9),
    "manual": (Manual, lambda: {"precision": "64-true"}, 1e-9),
    "single precision": (Classifier, dict, 1e-4),
    "bfloat16": (Classifier, lambda: {"precision": "bf16-mixed"}, 1e-4),
    "float16, scaled": (Classifier, lambda: {"plugins": [scaled()]}, 1e-4),
}


@pytest.mark.parametrize(("kind", "settings", "tolerance"), LOOPS.values(), ids=LOOPS)
def test_old_outputs_stay(kind: type[Classifier], settings: Any, tolerance: float) -> None:
    changes = {}
    for protect in (True, False):
        model = kind()
        callback = GradientMemoryCallback(exact_memory(model))
        for number in (1, 2):
            if number == 2:
                before = outputs(model, 1)
                model.losses.clear()
            trainer([callback] if protect else [], **settings()).fit(model, loader(number))
        assert callback.memory.num_updates == (2 if protect else 0)
        assert sum(model.losses[-3:]) < sum(model.losses[:3])
        changes[protect] = largest_change(before, outputs(model, 1))
    assert changes[True] < tolerance
    assert changes[False] > 0.1


def test_an_optimizer_that_is_wrapped_already_is_left_alone() -> None:
    model = Flat()
    callback = GradientMemoryCallback(model.memory[0])
    trainer([callback], precision="64-true").fit(model, loader(1))
    before = outputs(model, 1)
    second = trainer([callback], precision="64-true")
    second.fit(model, loader(2))
    assert isinstance(second.strategy.optimizers[0], steppe.FlatSharpness)
    assert largest_change(before, outputs(model, 1)) < 1e-9


class StopAfter(Callback):
    """Ends the training like a crash, after a checkpoint."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)
            raise RuntimeError("crash")


def test_a_task_is_resumed_with_its_memory(tmp_path: Path) -> None:
    model = Classifier()
    callback = GradientMemoryCallback(exact_memory(model))
    trainer([callback], precision="64-true").fit(model, loader(1))
    before = outputs(model, 1)
    file = tmp_path / "mid.ckpt"
    with pytest.raises(RuntimeError, match="crash"):
        trainer([callback, StopAfter(7, file)], precision="64-true").fit(model, loader(2))
    assert callback.memory.num_updates == 1
    again = Classifier()  # as in another process: nothing but the file is left
    resumed = GradientMemoryCallback(exact_memory(again))
    trainer([resumed], precision="64-true").fit(again, loader(2), ckpt_path=file)
    assert resumed.memory.num_updates == 2
    assert {projector.basis[0].dtype for projector in resumed.memory.projectors.values()} == {torch.float64}
    assert largest_change(before, outputs(again, 1)) < 1e-6  # Lightning has rounded the weights to single precision


def test_a_checkpoint_from_after_the_last_step_ends_the_task(tmp_path: Path) -> None:
    """The memory is updated once: by the resumed call if the first one did not come to it, else not again."""
    model, file = Classifier(), tmp_path / "end.ckpt"
    with pytest.raises(RuntimeError, match="crash"):
        trainer([GradientMemoryCallback(exact_memory(model)), StopAtEpoch(5, file)]).fit(model, loader(1))
    again = Classifier()
    resumed = GradientMemoryCallback(exact_memory(again))
    last = trainer([resumed])
    last.fit(again, loader(1), ckpt_path=file)
    assert resumed.memory.num_updates == 1
    assert largest_change(outputs(model, 1), outputs(again, 1)) == 0
    last.save_checkpoint(tmp_path / "after.ckpt")
    third = Classifier()
    other = GradientMemoryCallback(exact_memory(third))
    trainer([other]).fit(third, loader(1), ckpt_path=tmp_path / "after.ckpt")
    assert other.memory.num_updates == 1


class StopAtEpoch(StopAfter):
    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.step:
            trainer.save_checkpoint(self.file)
            raise RuntimeError("crash")

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_other_batches_and_calls() -> None:
    model = Classifier()
    seen: list[int] = []

    def forward(module: Any, batch: Any) -> Tensor:
        seen.append(len(batch))
        return module(batch)

    callback = GradientMemoryCallback(
        exact_memory(model), batches=lambda: iter([task(3)[0]] * 4), forward=forward, max_samples=20
    )
    trainer([callback], max_epochs=1).fit(model, loader(1))
    assert set(seen) == {12, 8}


def test_something_else_than_a_memory_is_rejected() -> None:
    with pytest.raises(steppe.UsageError, match="memory must be a steppe"):
        GradientMemoryCallback(network())
