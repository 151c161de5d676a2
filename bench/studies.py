"""How much longer five seeds take on two cores than one seed alone, by the clock; and where one run's time goes.

    python bench/studies.py

Runs the command line itself, `steppe run pmnist fs-dgpm`, once for one seed and once for five, as many at a time as
there are cores. `products_share` is what testing could not be less than: its matrix products at the machine's own rate.
Prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import gemm_rate, report

from steppe import PMNIST


def timed(*arguments: str) -> float:
    """Seconds by the clock."""
    started = time.monotonic()
    command = [sys.executable, "-m", "steppe", "run", "pmnist", "fs-dgpm", *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - started


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as directory:
        one = timed("--out", f"{directory}/one")
        result = json.loads((Path(directory) / "one" / "result.json").read_text(encoding="utf-8"))
        seconds = result["cpu_seconds"]
        five = timed("--seeds", "5", "--out", f"{directory}/five")
        one = (one + timed("--out", f"{directory}/again")) / 2  # before and after: the machine's speed changes
    total = sum(seconds.values())
    shares = {f"{kind}_share": spent / total for kind, spent in seconds.items()}
    torch.set_num_threads(1)
    tests = sum(value is not None for row in result["accuracy"] for value in row)
    tests += len(result["untrained"]) + len(result["ahead"])
    weights = sum(p.numel() for p in PMNIST().model(0).parameters())  # each used once for a sample, and no biases
    shares["products_share"] = 2e-9 * weights * tests * PMNIST().test_samples / gemm_rate() / total
    report(studies=[{"one_seed_s": one, "five_seeds_s": five, "ratio": five / one, **shares}])


if __name__ == "__main__":
    main()
