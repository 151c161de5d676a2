"""Feed corrupt files to every reader of files that come from elsewhere: IDX, CIFAR-100, checkpoints and learners.

    python tests/stress/fuzz_readers.py --inputs 100000 --out results/reliability/fuzz.json

Each input is a valid file with a few changes that depend on the seed: flipped bits, cuts, splices, extreme lengths; in
checkpoints also changed headers and trees with a corrected hash, so that the code behind the hash check is reached.
Each must be read, or rejected with a SteppeError, within 2 seconds of CPU time, and the process must not grow by more
than 300 MB. Prints JSON; exits with 1 otherwise.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recording import option_parser, record

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from hostile import closed, opened, rehashed
from own_models import bright, mlp
from safetensors.torch import save
from small_cifar100 import binary, small_set

import steppe
from steppe.checkpoint import io as saving
from steppe.checkpoint.io import parse_state
from steppe.checkpoint.tree import flatten_tree, unflatten_tree
from steppe.data import cifar100, idx
from steppe.errors import SteppeError

SLOWEST, GROWTH = 2.0, 300.0  # seconds, megabytes
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
ODD: tuple[Any, ...] = (None, True, -1, 0, 10**15, 2**70, -0.5, math.inf, "", "x", [], {}, range(10**6), range(10**12))


def place(chance: random.Random, length: int) -> int:
    """A random index, more often near the ends, where lengths and headers are."""
    near = min(length, 200)
    return chance.choice([chance.randrange(length), chance.randrange(near), length - 1 - chance.randrange(near)])


def changed(raw: bytes, chance: random.Random) -> bytes:
    """A file with a few changes."""
    data = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if not data:
            break
        at, kind = place(chance, len(data)), chance.randrange(7)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at] = chance.randrange(256)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + chance.randint(1, 16)]
        elif kind == 4:  # a splice from elsewhere in the file
            start = place(chance, len(data))
            data[at:at] = data[start : start + chance.randint(1, 64)]
        elif kind == 5:
            data += chance.randbytes(chance.randint(1, 64))
        else:
            width = chance.choice([1, 2, 4, 8])
            number = chance.choice(EXTREMES) % 256**width
            data[at : at + width] = number.to_bytes(width, chance.choice(["big", "little"]))
    return bytes(data)


def changed_header(raw: bytes, chance: random.Random) -> bytes:
    """A state whose header is changed in one place."""
    header, numbers = opened(raw)
    name = chance.choice(list(header))
    entry = header[name]
    if name == "__metadata__":
        key = chance.choice(list(entry))
        entry[key] = changed(entry[key].encode(), chance).decode("utf-8", "replace")
    else:
        key = chance.choice(["shape", "data_offsets", "dtype"])
        if key == "dtype":
            entry[key] = chance.choice(["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E5M2", "C64", "x", 5])
        else:
            entry[key] = [*entry[key], *[chance.choice(EXTREMES)] * chance.randrange(2)]
            if entry[key]:
                entry[key][chance.randrange(len(entry[key]))] = chance.choice([*EXTREMES, -1, 0.5, "x"])
    return closed(header, numbers)


def changed_tree(tree: Any, chance: random.Random) -> Any:
    """A tree with a part replaced, removed or duplicated."""
    if isinstance(tree, (dict, list)) and tree and chance.random() < 0.8:
        copy = dict(tree) if isinstance(tree, dict) else list(tree)
        key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        if chance.random() < 0.1:
            del copy[key]
        elif chance.random() < 0.05:
            copy = {**copy, "more": copy[key]} if isinstance(copy, dict) else [*copy, copy[key]]
        else:
            copy[key] = changed_tree(copy[key], chance)
        return copy
    if isinstance(tree, torch.Tensor) and tree.ndim and chance.random() < 0.5:
        others = tree[:0], tree.flatten(), tree[None], tree.double(), tree.to(torch.uint8), -tree.double()
        return chance.choice(others)
    return chance.choice(ODD)


class Readers:
    """The readers by name; each makes its own inputs and reads them."""

    def __init__(self, folder: Path) -> None:
        self.images, self.labels = small_set(100, 0)
        self.binary = binary(self.images, self.labels)
        self.digits = bytes((0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 6)) + bytes(range(120))
        self.file = folder / "learner.safetensors"
        methods = steppe.FSDGPM(buffer=9), steppe.EWC(), steppe.GEM(tasks=2)
        self.learners = [state for method in methods for state in self._states(method)]
        tree = {"a": {"b": torch.arange(6.0).reshape(2, 3)}, "c": [1, 0.5, "x", range(3), None]}
        self.state = self._written("run", tree)
        self.by_name: dict[str, Callable[[random.Random], object]] = {
            "idx": lambda chance: idx.parse_idx(changed(self.digits, chance), "digits"),
            "cifar-100": self._cifar100,
            "state": self._state,
            "learner": self._changed_learner,
        }

    @staticmethod
    def _states(method: steppe.MethodConfig) -> list[Any]:
        """A learner's states: within a task, with validation, and after it."""
        learner, states = steppe.Learner(mlp(), method), []

        def callback(event: object) -> None:
            states.append(unflatten_tree(*flatten_tree(learner.state_dict())))

        task = steppe.Task(bright(8)(24, 0), val=bright(8)(8, 0), head=range(4))
        learner.learn(task, epochs=2, patience=1, callback=callback)
        return [states[0], learner.state_dict()]

    @staticmethod
    def _written(kind: str, tree: Any) -> bytes:
        content, tensors = flatten_tree(tree)
        own = {name: saving._cpu_copy(tensor) for name, tensor in tensors.items()}
        said = {"format": saving.FORMAT, "kind": kind, "version": str(saving.VERSION), "content": json.dumps(content)}
        return save(own, metadata={**said, "sha256": saving._digest(said, own)})

    def _cifar100(self, chance: random.Random) -> object:
        return cifar100._canonical_order(cifar100._parse(changed(self.binary, chance), "file"), "test", "file")

    def _state(self, chance: random.Random) -> object:
        change = chance.choice([changed, changed_header])
        raw = change(self.state, chance)
        return parse_state(rehashed(raw) if chance.random() < 0.8 else raw, "run", "file")

    def _changed_learner(self, chance: random.Random) -> object:
        self.file.write_bytes(self._written("learner", changed_tree(chance.choice(self.learners), chance)))
        return steppe.load(self.file, mlp())


SHARES = {"idx": 30, "cifar-100": 15, "state": 40, "learner": 15}


@contextmanager
def small_cifar(readers: Readers) -> Iterator[None]:
    """Let a hundred random images be CIFAR-100's test images."""
    pairs = zip(readers.images, readers.labels.tolist(), strict=True)
    keys = sorted(bytes((label,)) + hashlib.sha256(image).digest() for image, label in pairs)
    found = cifar100.IMAGES["test"], cifar100.FINGERPRINTS["test"]
    cifar100.IMAGES["test"], cifar100.FINGERPRINTS["test"] = 100, hashlib.sha256(b"".join(keys)).hexdigest()
    try:
        yield
    finally:
        cifar100.IMAGES["test"], cifar100.FINGERPRINTS["test"] = found


def megabytes() -> float:
    """The process's peak memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fuzz(inputs: int, seed: int) -> dict[str, Any]:
    """Feed this many inputs to the readers, and return what happened."""
    with tempfile.TemporaryDirectory() as folder:
        readers = Readers(Path(folder))
        before = megabytes()
        with small_cifar(readers):
            found = {
                name: _fuzz(name, read, inputs * SHARES[name] // 100, seed) for name, read in readers.by_name.items()
            }
    growth = megabytes() - before
    faults = [fault for one in found.values() for fault in one.pop("faults")]
    if growth > GROWTH:
        faults.append(f"the process grew by {growth:.0f} MB")
    return {
        "seed": seed,
        **{key: sum(one[key] for one in found.values()) for key in ("inputs", "refused", "accepted")},
        "slowest_seconds": max(one["slowest_seconds"] for one in found.values()),
        "peak_growth_mb": round(growth, 1),
        "readers": found,
        "faults": faults,
    }


def _fuzz(name: str, read: Callable[[random.Random], object], inputs: int, seed: int) -> dict[str, Any]:
    refused, accepted, slowest, faults = 0, 0, 0.0, []
    for number in range(inputs):
        started = time.process_time()
        try:
            read(random.Random(f"{seed}/{name}/{number}"))
            accepted += 1
        except SteppeError:
            refused += 1
        except Exception as error:
            faults.append(f"{name} {number}: {type(error).__name__}: {error}")
        spent = time.process_time() - started
        slowest = max(slowest, spent)
        if spent > SLOWEST:
            faults.append(f"{name} {number}: {spent:.1f} s")
    return {
        "inputs": inputs,
        "refused": refused,
        "accepted": accepted,
        "slowest_seconds": round(slowest, 4),
        "faults": faults,
    }


def main() -> int:
    """Fuzz, and write the results."""
    parser = option_parser(__doc__, "the changes")
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="inputs in all (default: 100000)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    found = fuzz(options.inputs, options.seed)
    record(options.out, cpu_seconds=round(time.process_time() - started, 1), **found)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
