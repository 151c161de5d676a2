"""Kill workers of studies at random instants, and check that every study ends and names the killed runs.

    python tests/stress/torture_workers.py --kills 200 --out results/reliability/workers.json

Workers are killed by SIGKILL, as the system does when memory runs out, while they start, learn or report. Most reports
are longer than a pipe holds, so many die in the middle of one. Now and then the fork server is killed as well. A study
counts as hung if it takes longer than five minutes, a run as unnamed if it has neither a result nor a failure that says
how its process ended. Each study is then resumed and compared with an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from recording import option_parser, record

from steppe.experiments.config import RunConfig
from steppe.experiments.study import Job, run_all

PLUGIN = Path(__file__).resolve().parents[1] / "support" / "dying_plugin.py"
SEEDS = [seed for seed in range(96) if seed % 4]  # seeds for which the plugin does not die by itself
LONGEST = 300.0  # seconds


def main() -> int:
    """Torture, and print and write the counts; 1 if a study hung, or a run was unnamed or different."""
    parser = option_parser(__doc__, "the instants and of the workers to kill")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="how often to kill at least (default: 200)")
    parser.add_argument("--study", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.study is not None:
        return study(options.study)
    with tempfile.TemporaryDirectory() as directory:
        figures = run_studies(options.kills, options.seed, Path(directory))
    record(options.out, figures=[figures])
    return 1 if figures["hung"] or figures["unnamed"] or figures["different"] else 0


def study(out: Path) -> int:
    """Run or resume a study in this process, and print the outcome of each run."""
    changes = ["benchmark.samples=40", "benchmark.test_samples=20", "benchmark.tasks=3", "told=1000000"]
    jobs = [
        Job(RunConfig.make("pmnist", "dying", changes, seed=seed, plugins=[str(PLUGIN)]), out / str(seed))
        for seed in SEEDS
    ]
    outcome = run_all(jobs, 4, lambda number, message: None, resume=True, checkpoint_every=0)
    results = {SEEDS[number]: result.accuracy for number, result in outcome.results.items()}
    failures = {SEEDS[number]: failure.reason for number, failure in outcome.failures.items()}
    print(json.dumps({"results": results, "failures": failures}))
    return 0


def run_studies(kills: int, seed: int, directory: Path) -> dict[str, int]:
    """Run studies until there were this many kills; return the counts."""
    choice, count = random.Random(seed), Counter[str]()
    whole = told_by(started(directory / "whole"), choice, count, kill=False)
    assert whole is not None, "the study that nothing happens to does not end"
    assert not whole["failures"], whole["failures"]
    while count["workers killed"] < kills:
        count["studies"] += 1
        out = directory / str(count["studies"])
        for _ in range(3):  # killed runs are resumed, and killed again
            found = told_by(started(out), choice, count, kill=True)
            if found is None:
                continue
            named = {seed for seed, reason in found["failures"].items() if "process" in reason}
            count["runs named"] += len(named)
            count["unnamed"] += len(SEEDS) - len(found["results"].keys() | named)
        for _ in range(3):  # a worker that outlived its server may still use its directory
            resumed = told_by(started(out), choice, count, kill=False)
            if resumed is None or not resumed["failures"]:
                break
        count["different"] += resumed is not None and resumed != whole
        print(f"{dict(count)}", file=sys.stderr)
    names = ("studies", "workers killed", "servers killed", "runs named", "unnamed", "hung", "different")
    return {name: count[name] for name in names}


def started(out: Path) -> subprocess.Popen[str]:
    """A study in its own process."""
    command = [sys.executable, __file__, "--study", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def told_by(
    process: subprocess.Popen[str], choice: random.Random, count: Counter[str], *, kill: bool
) -> dict[str, dict[str, object]] | None:
    """What a study prints at its end; None if it does not finish."""
    end = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < end:
        time.sleep(choice.uniform(0, 0.3))
        servers = children([process.pid], "forkserver")
        workers = children(servers)
        if kill and workers and choice.random() < 0.01:
            count["servers killed"] += killed(choice.choice(servers))
        elif kill and workers:
            count["workers killed"] += killed(choice.choice(workers))
    if process.poll() is None:
        count["hung"] += 1
        servers = children([process.pid], "forkserver")
        for pid in [process.pid, *servers, *children(servers)]:
            killed(pid)
    text, _ = process.communicate()
    return json.loads(text) if process.returncode == 0 else None


def killed(pid: int) -> bool:
    """Kill a process; return whether it existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def children(parents: Sequence[int], word: str = "") -> list[int]:
    """The child processes of these, with this word in their command line; exited ones do not count."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            continue
        if parent in parents and command and word in command:
            found.append(int(entry.name))
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main())
