"""Kill runs at random instants, damage their checkpoints, fill their disk, resume them, and compare the results.

    python tests/stress/torture.py --kills 300 --out results/reliability/torture.json

Each trial takes a benchmark and a method and resumes the same run until it is finished, however often it is killed. It
counts as lost if it cannot be finished, and as different if its result (times aside), weights or log are not those of
an uninterrupted run, bit for bit. Runs are forked from a process that has loaded torch, so most kills hit the run and
not its start; some go through the command line.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from recording import option_parser, record

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import pictures
import torch
from small_runs import CASES, SMALL, assert_same_run, small

from steppe.errors import RunError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.learning import loop as training
from steppe.results.file_names import CHECKPOINTS, RESULT

MORE = ("split-mnist", "rotated-mnist")
SMALL.update(dict.fromkeys(MORE, ("benchmark.tasks=2", "benchmark.samples=60")))
KILLED, FAILED = (-signal.SIGKILL, -signal.SIGXFSZ), 1
PLUGIN = Path(pictures.__file__).resolve().with_name("pictures_plugin.py")


def main() -> int:
    """Torture, and print and write the counts; 1 if a run was lost or different."""
    parser = option_parser(__doc__, "the instants, the cases and the damage")
    parser.add_argument("--kills", type=int, default=300, metavar="N", help="how often to kill at least (default: 300)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = run_trials(options.kills, options.seed, Path(directory))
    record(options.out, figures=[figures])
    return 1 if figures["lost"] or figures["different"] else 0


def run_trials(kills: int, seed: int, directory: Path) -> dict[str, int]:
    """Run trials until there were this many kills; return the counts."""
    torch.set_num_threads(1)
    pictures.register()
    choice, count = random.Random(seed), Counter[str]()
    cases = [*CASES, *((name, method) for name in MORE for method in ("fs-dgpm", "gem", "la-maml", "oracle"))]
    seen: set[tuple[str, str]] = set()
    while count["kills"] < kills or count["full disks"] < 2:
        case = choice.choice(cases)
        seen.add(case)
        trial = Trial(small(*case), directory, choice, count)
        kind = Trial.on_a_full_disk if count["full disks"] < 2 else Trial.killed_and_damaged
        kind(trial)
        count["trials"] += 1
        if sys.stderr.isatty() or count["trials"] % 20 == 0:
            print(f"{count['kills']} kills, {count['lost']} lost, {count['different']} different", file=sys.stderr)
    kinds = ("trials", "kills", "kills inside a write", "damaged checkpoints", "both checkpoints damaged", "full disks")
    figures = {name: count[name] for name in (*kinds, "through the command line", "lost", "different")}
    return figures | {"methods": len({method for _, method in seen}), "benchmarks": len({name for name, _ in seen})}


class Trial:
    """One run, however often it is killed."""

    def __init__(self, config: RunConfig, directory: Path, choice: random.Random, count: Counter[str]) -> None:
        self.config, self.choice, self.count = config, choice, count
        self.whole = directory / f"{config.benchmark} {config.method}"
        if not self.whole.exists():
            assert self._ended(self._started(self.whole)) == 0
        self.out = Path(tempfile.mkdtemp(dir=directory)) / "run"

    def killed_and_damaged(self) -> None:
        """Kill it up to five times, sometimes damage its checkpoints, and finish it."""
        for _ in range(self.choice.randint(1, 5)):
            if self._killed_once() == 0:
                break
            self._damage()
        self._finish()
        shutil.rmtree(self.out.parent)

    def on_a_full_disk(self) -> None:
        """Run on a disk that is too small, then free some space."""
        size = self.choice.randint(16, 1000) * 4096
        with small_disk(self.out.parent / "disk", size) as made:
            self.out = self.out.parent / "disk" / "run"
            limited = (lambda: None) if made else (lambda: limit_files(size // 8, deadly=False))
            code = self._ended(self._started(self.out, before=limited))
            assert code in (0, FAILED), f"a full disk ended the run with {code}"
            self.count["full disks"] += code == FAILED
            if made:
                assert mount("-o", "remount,size=256m", str(self.out.parent))
            self._finish()

    def _killed_once(self) -> int:
        how, number = self.choice.random(), self.choice.randint(1, 60)
        if how < 0.25:
            code = self._ended(self._started(self.out, before=lambda: kill_at_step(number)))
        elif how < 0.45:
            size = self.choice.randint(1, 600_000)
            code = self._ended(self._started(self.out, before=lambda: limit_files(size, deadly=True)))
        else:
            by_command = how > 0.97
            process = self._commanded() if by_command else self._started(self.out)
            time.sleep(self.choice.uniform(0, 5.0 if by_command else 0.8))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            code = self._ended(process)
            self.count["through the command line"] += by_command
        self.count["kills inside a write"] += how < 0.45 and code in KILLED
        self.count["kills"] += code in KILLED
        return code

    def _damage(self) -> None:
        """Truncate a checkpoint or flip a bit in it; sometimes in both."""
        states = sorted((self.out / CHECKPOINTS).glob("state-*"))
        if not states or self.choice.random() > 0.4:
            return
        chosen = states if self.choice.random() < 0.3 else states[-1:]
        for file in chosen:
            content = bytearray(file.read_bytes())
            if self.choice.random() < 0.5:
                del content[self.choice.randrange(len(content)) :]
            else:
                content[self.choice.randrange(len(content))] ^= 1 << self.choice.randrange(8)
            file.write_bytes(content)
        self.count["damaged checkpoints"] += len(chosen)
        self.count["both checkpoints damaged"] += len(chosen) > 1

    def _finish(self) -> None:
        """Finish the run, and compare."""
        if self._ended(self._started(self.out)) != 0 or not (self.out / RESULT).exists():
            self.count["lost"] += 1
            return
        try:
            assert_same_run(self.whole, self.out)
        except (AssertionError, RunError) as error:
            print(f"different: {self.config.benchmark} {self.config.method}: {error}", file=sys.stderr)
            self.count["different"] += 1

    def _started(self, out: Path, before: Callable[[], None] = lambda: None) -> int:
        """The run, started or resumed in its own process, with checkpoints as often as possible."""
        process = os.fork()
        if process:
            return process
        code = 2
        try:
            training._REPORT_EVERY = 0.0
            before()
            run(self.config, out, resume=True, checkpoint_every=0)
            code = 0
        except RunError:
            code = FAILED
        finally:
            os._exit(code)

    def _commanded(self) -> int:
        """The same, through the command line."""
        words = [self.config.benchmark, self.config.method, "--out", str(self.out), "--resume", "--plugin", str(PLUGIN)]
        changes = [part for key, value in self.config.changes().items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "steppe", "run", *words, *changes, "--checkpoint-every", "0"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid

    @staticmethod
    def _ended(process: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at_step(number: int) -> None:
    """Kill this process at its n-th step of writing a file: before and after it is flushed and renamed, and when an old
    one is removed."""
    left = iter(range(number))

    def stepping(found: Callable[..., object]) -> Callable[..., object]:
        def stepped(*args: object, **kwargs: object) -> object:
            for act in (None, lambda: found(*args, **kwargs)):
                result = act() if act else None
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        return stepped

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, stepping(getattr(os, name)))


def limit_files(size: int, *, deadly: bool) -> None:
    """Limit the size of this process's files: exceeding it kills the process, or is an error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """Mount a disk of this size, if that is allowed; return whether it is."""
    place.mkdir(parents=True)
    if not mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)):
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", str(place)], check=True)


def mount(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
