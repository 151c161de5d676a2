"""Accelerate and Fabric need no adapter: their `prepare` and `setup` take the wrapped optimizer. Shown here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from two_tasks import adamw, exact_memory, largest_change, loader, network, task

import steppe

pytestmark = pytest.mark.filterwarnings("ignore:the basis of")


class Accelerated:
    """A loop with Accelerate: gradient accumulation, a scheduler, a wrapped optimizer."""

    def __init__(self, dtype: torch.dtype, folder: Path, precision: str) -> None:
        accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'steppe[accelerate]'")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision={"32": "no", "bf16": "bf16"}[precision]
        )
        self.dtype, self.folder = dtype, folder
        self.model = self.accelerator.prepare(network().to(dtype))
        self.memory = exact_memory(self.model)
        self.optimizer: Any = None

    def prepare(self, *, protect: bool) -> None:
        optimizer = adamw(self.model)
        optimizer = self.memory.wrap(optimizer) if protect else optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
        self.optimizer, self.scheduler = self.accelerator.prepare(optimizer, scheduler)
        self.accelerator.register_for_checkpointing(self.memory)

    def learn(self, number: int) -> list[float]:
        losses = []
        for _ in range(12):
            for x, y in self.accelerator.prepare(loader(number, self.dtype)):
                with self.accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(x), y)
                    losses.append(float(loss.detach()))
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return losses

    def save(self) -> None:
        self.accelerator.save_state(self.folder)

    def load(self) -> None:
        self.accelerator.load_state(self.folder)


class Fabricated:
    """A loop with Fabric."""

    def __init__(self, dtype: torch.dtype, folder: Path, precision: str) -> None:
        fabric = pytest.importorskip("lightning.fabric", reason="needs lightning: pip install 'steppe[lightning]'")
        names = {"32": "64-true" if dtype == torch.float64 else "32-true", "bf16": "bf16-mixed"}
        self.fabric = fabric.Fabric(accelerator="cpu", devices=1, precision=names[precision])
        self.dtype, self.file = dtype, folder / "fabric.ckpt"
        self.module = network().to(dtype)
        self.memory = exact_memory(self.module)
        self.model: nn.Module = self.module
        self.optimizer: Any = None

    def prepare(self, *, protect: bool) -> None:
        optimizer = adamw(self.module)
        self.model, self.optimizer = self.fabric.setup(
            self.module, self.memory.wrap(optimizer) if protect else optimizer
        )

    def learn(self, number: int) -> list[float]:
        losses = []
        batches = self.fabric.setup_dataloaders(loader(number, self.dtype))
        for _ in range(12):
            for x, y in batches:
                self.optimizer.zero_grad()
                loss = cross_entropy(self.model(x), y)
                losses.append(float(loss.detach()))
                self.fabric.backward(loss)
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                self.optimizer.step()
        return losses

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "memory": self.memory}

    def save(self) -> None:
        self.fabric.save(self.file, self.state)

    def load(self) -> None:
        self.fabric.load(self.file, self.state)


LOOPS: dict[str, Callable[..., Any]] = {"accelerate": Accelerated, "fabric": Fabricated}
CASES: dict[str, tuple[Callable[..., Any], torch.dtype, str, float]] = {
    "accelerate": (Accelerated, torch.float64, "32", 1e-9),
    # Its model computes under autocast always, so the memory holds inputs that are rounded to eight bits.
    "accelerate, bfloat16": (Accelerated, torch.float32, "bf16", 0.02),
    "fabric": (Fabricated, torch.float64, "32", 1e-9),
    "fabric, bfloat16": (Fabricated, torch.float32, "bf16", 1e-4),
}


def outputs(loop: Any, number: int) -> Tensor:
    model = loop.memory.model  # itself, without autocast
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return nn.Sequential.forward(model.eval(), task(number, loop.dtype)[0])


@pytest.mark.parametrize(("make", "dtype", "precision", "tolerance"), CASES.values(), ids=CASES)
def test_old_outputs_stay(
    make: Callable[..., Any], dtype: torch.dtype, precision: str, tolerance: float, tmp_path: Path
) -> None:
    changes = {}
    for protect in (True, False):
        loop = make(dtype, tmp_path, precision)
        loop.prepare(protect=protect)
        loop.learn(1)
        loop.memory.update([task(1, dtype)[0]])
        before = outputs(loop, 1)
        losses = loop.learn(2)
        assert sum(losses[-3:]) < sum(losses[:3])
        changes[protect] = largest_change(before, outputs(loop, 1))
    assert changes[True] < tolerance
    assert changes[False] > 0.1


@pytest.mark.parametrize("make", LOOPS.values(), ids=LOOPS)
def test_checkpoints_hold_the_memory(make: Callable[..., Any], tmp_path: Path) -> None:
    loop = make(torch.float64, tmp_path, "32")
    loop.prepare(protect=True)
    loop.learn(1)
    loop.memory.update(loader(1, torch.float64))
    before = outputs(loop, 1)
    loop.save()
    again = make(torch.float64, tmp_path, "32")  # as in another process
    again.prepare(protect=True)
    assert largest_change(before, outputs(again, 1)) > 1e-3
    again.load()
    assert again.memory.num_updates == 1
    assert again.memory.ranks() == loop.memory.ranks()
    again.learn(2)
    assert largest_change(before, outputs(again, 1)) < 1e-9


def test_scaled_gradients_through_accelerate() -> None:
    """Accelerate hands its loss scaling the optimizer it was given."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'steppe[accelerate]'")
    from accelerate.optimizer import AcceleratedOptimizer

    model = network()
    memory = exact_memory(model)
    memory.update(task(1)[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = AcceleratedOptimizer(memory.wrap(adamw(model)), device_placement=False, scaler=scaler)
    x, _ = task(1)
    before = model(x).detach()
    for _ in range(10):
        other, labels = task(2)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(other), labels)).backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
    assert isinstance(optimizer.optimizer, steppe.ProjectedOptimizer)
    assert largest_change(before, model(x)) < 1e-4
