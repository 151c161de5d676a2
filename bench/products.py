"""What large products by oneDNN save where MKL leaves half of the processor unused: FS-DGPM updates with and without.

The two libraries are also timed at one product, (128, 2048) by (2048, 2048), as of AlexNet's second hidden layer, and
on testing the MLP of Permuted MNIST.

    python bench/products.py [--rounds N] > results/bench/products.json

Both ways are timed in turn, in CPU time of one thread, and the medians are compared. On other processors than those
which `steppe.fast.matmul` names, the two are the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import report
from update_cost import at_work, reached

from steppe.benchmarks.pmnist import PMNIST
from steppe.fast import matmul as products
from steppe.fast.chain_recognition import find_linear_chain
from steppe.fast.malloc import keep_freed_memory
from steppe.runtime.contexts import flush_denormals

NETS = ("lenet", "alexnet", "four-conv", "mlp")


def compared(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Milliseconds of the work as it is and by MKL alone, and their ratio."""
    ways = {"ms": products.onednn_is_quicker, "mkl_ms": lambda: False}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, rule in ways.items():
            products.onednn_is_quicker = rule  # type: ignore[assignment]
            started = time.process_time()
            work()
            if turn >= 2:  # the first two warm up
                spent[name].append(1e3 * (time.process_time() - started))
    products.onednn_is_quicker = ways["ms"]  # type: ignore[assignment]
    found = {name: statistics.median(times) for name, times in spent.items()}
    return {**found, "ratio": found["ms"] / found["mkl_ms"]}


def update(net: str, rounds: int) -> dict[str, Any]:
    """One update of FS-DGPM."""
    work = at_work(net, reached(net))
    with flush_denormals(), work.network.mode(training=True):
        return {"net": net, **compared(work.update, rounds)}


def one_product(rounds: int) -> dict[str, Any]:
    """A product alone."""
    a, b = torch.randn(128, 2048), torch.randn(2048, 2048)
    return {"work": "one product", **compared(lambda: products.product(a, b), rounds)}


def testing(rounds: int) -> dict[str, Any]:
    """Ten thousand digits of twenty tasks at once, as after the last of them."""
    chain = find_linear_chain(PMNIST().model(0))
    assert chain is not None
    first = chain.first_weights([torch.randperm(784) for _ in range(20)])
    x = torch.rand(1000, 784)
    return {"work": "testing", **compared(lambda: list(chain.outputs_for(x, first)), rounds)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="how often each is timed (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    alone = [one_product(options.rounds), testing(options.rounds)]
    report(updates=[update(net, options.rounds) for net in NETS], alone=alone)


if __name__ == "__main__":
    main()
