"""Hugging Face Trainer: outputs of the first task stay while the second is learned in the Trainer's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import steppe

pytest.importorskip("transformers", reason="needs transformers: pip install 'steppe[transformers]'")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from two_tasks import exact_memory, largest_change

from steppe.integrations.transformers import MEMORY_FILE, GradientMemoryCallback

pytestmark = pytest.mark.filterwarnings("ignore:the basis of", "ignore:these weights")

CONFIG = BertConfig(
    vocab_size=20,
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=40,
    max_position_embeddings=6,
    num_labels=3,
)


def bert(dtype: torch.dtype = torch.float64) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(CONFIG).to(dtype)


def texts(number: int, count: int = 12) -> list[dict[str, Any]]:
    """A task of few tokens, so that a basis of all of them leaves room to learn."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(10 * (number - 1), 10 * number, (count, 2), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 3} for row in ids]


def remembered(number: int) -> list[dict[str, Any]]:
    return texts(number)[:3]


def trainer(model: Any, folder: Path, number: int, callbacks: Any = (), **settings: Any) -> Trainer:
    optimizers = settings.pop("optimizers", (None, None))
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 10,
            "learning_rate": 0.003,
            "weight_decay": 0.1,
            "save_strategy": "no",
            "logging_steps": 3,
            **settings,
        }
    )
    return Trainer(
        model=model, args=arguments, train_dataset=texts(number), callbacks=list(callbacks), optimizers=optimizers
    )


def memorize(memory: steppe.GradientProjectionMemory) -> GradientMemoryCallback:
    return GradientMemoryCallback(memory, batches=lambda: [stacked(remembered(1))])


def stacked(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.stack([sample["input_ids"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=stacked(remembered(1))["input_ids"]).logits


def losses(done: Trainer) -> list[float]:
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({}, 1e-9), ({"gradient_accumulation_steps": 2}, 1e-9), ({"dtype": torch.float32}, 1e-4), ({"bf16": True}, 0.05)],
    ids=["automatic", "accumulated", "single precision", "bfloat16"],
)
def test_old_outputs_stay(settings: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    settings = dict(settings)
    dtype = settings.pop("dtype", torch.float32 if "bf16" in settings else torch.float64)
    changes = {}
    for protect in (True, False):
        model = bert(dtype)
        callback = memorize(exact_memory(model))
        for number in (1, 2):
            before = outputs(model)
            done = trainer(model, tmp_path, number, [callback] if protect else [], **settings)
            done.train()
        assert callback.memory.num_updates == (2 if protect else 0)
        if protect:
            assert isinstance(done.optimizer.optimizer, steppe.ProjectedOptimizer)
        assert losses(done)[-1] < losses(done)[0]
        changes[protect] = largest_change(before, outputs(model))
    assert changes[True] < tolerance
    assert changes[False] > 0.2


def test_an_optimizer_that_is_wrapped_already_is_left_alone(tmp_path: Path) -> None:
    model = bert()
    callback = memorize(exact_memory(model))
    optimizer = callback.memory.wrap(torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1))
    for number in (1, 2):
        before = outputs(model)
        done = trainer(model, tmp_path, number, [callback], optimizers=(optimizer, None))
        done.train()
    assert done.optimizer.optimizer is optimizer
    assert largest_change(before, outputs(model)) < 1e-9


class CrashAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("crash")


def test_a_task_is_resumed_with_its_memory(tmp_path: Path) -> None:
    model = bert()
    callback = memorize(exact_memory(model))
    trainer(model, tmp_path / "one", 1, [callback]).train()
    before = outputs(model)
    saving = {"save_strategy": "steps", "save_steps": 10}
    with pytest.raises(RuntimeError, match="crash"):
        trainer(model, tmp_path / "two", 2, [callback, CrashAfter(14)], **saving).train()
    assert callback.memory.num_updates == 1
    again = bert()  # as in another process: nothing but the files is left
    resumed = memorize(exact_memory(again))
    trainer(again, tmp_path / "two", 2, [resumed], **saving).train(resume_from_checkpoint=True)
    assert resumed.memory.num_updates == 2
    assert largest_change(before, outputs(again)) < 1e-9


def test_a_checkpoint_elsewhere_is_named(tmp_path: Path) -> None:
    model = bert()
    callback = memorize(exact_memory(model))
    trainer(model, tmp_path / "here", 1, [callback], save_strategy="steps", save_steps=10).train()
    place = tmp_path / "here" / "checkpoint-10"
    moved = place.rename(tmp_path / "moved")
    fresh = memorize(exact_memory(bert()))
    with pytest.raises(steppe.UsageError, match=r"checkpoint-10/gradient_memory.safetensors does not exist"):
        trainer(fresh.memory.model, tmp_path / "there", 1, [fresh]).train(resume_from_checkpoint=str(moved))
    fresh.load(moved)
    trainer(fresh.memory.model, tmp_path / "there", 1, [fresh]).train(resume_from_checkpoint=str(moved))
    assert fresh.memory.num_updates == 1
    fresh.save(tmp_path)
    last = memorize(exact_memory(bert()))
    last.load(tmp_path)
    assert (tmp_path / MEMORY_FILE).exists()
    assert last.memory.ranks() == fresh.memory.ranks() != {}


def test_samples_of_the_trainer_by_default(tmp_path: Path) -> None:
    model = bert()
    callback = GradientMemoryCallback(exact_memory(model), max_samples=5)
    trainer(model, tmp_path, 1, [callback], max_steps=2).train()
    assert callback.memory.num_updates == 1
    assert callback.memory.ranks()["classifier.weight"]["rank"] == 5
    with pytest.raises(steppe.UsageError, match="memory must be a steppe"):
        GradientMemoryCallback(model)
