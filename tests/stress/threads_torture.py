"""Learn in two threads, predict from a copy in a third, run a plain model in a fourth, and compare with calls alone.

    python tests/stress/threads_torture.py --calls 10000 --out results/reliability/threads.json

Each call (a `learn`, a `predict`, a forward) counts as an error if it raises, and as different if it gives anything
but the bits that the same call gives alone.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable

import torch
from recording import option_parser, record
from torch import Tensor, nn

from steppe import ER, FSDGPM, GPM, Learner, MethodConfig, Task
from steppe.models.mlp import MLP

Model = Callable[[], nn.Module]


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def attentive() -> nn.Module:
    """Without dropout: random numbers drawn in threads are tested elsewhere."""
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, 4)), encoder, nn.Flatten(), nn.Linear(16, 3))


LEARNERS: tuple[tuple[Model, MethodConfig], ...] = (
    (lambda: MLP(16, 12, 3), FSDGPM(buffer=8, basis_samples=8)),
    (lambda: nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)), ER(buffer=8)),
    (convolutional, GPM(basis_samples=8)),
    (attentive, FSDGPM(buffer=8, basis_samples=8)),
)


def main() -> int:
    """Torture, and print and write the counts; 1 if a call failed or gave a different result."""
    parser = option_parser(__doc__)
    parser.add_argument("--calls", type=int, default=10_000, metavar="N", help="how many at least (default: 10000)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = run_threads(options.calls)
    record(options.out, figures=[figures])
    return 1 if figures["errors"] or figures["different"] else 0


def run_threads(calls: int) -> dict[str, int | str]:
    """Run four threads until there were this many calls, a tenth of them `learn`; return the counts."""
    learnt = [weights_learnt(place) for place in range(len(LEARNERS))]
    original = learner(0, tasks=1)
    served = copy.deepcopy(original)
    plain, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.rand(2, 3, 8)
    with torch.no_grad():
        expected = plain(x)
    answers = served.predict(inputs())

    count, locked = Counter[str](), threading.Lock()
    done, failed = threading.Event(), ""

    def repeatedly(kind: str, same: Callable[[int], bool]) -> None:
        nonlocal failed
        torch.set_num_threads(
            1
        )  # otherwise a thread's first product may be split among threads, and rounded differently
        place = 0
        while not done.is_set():
            found = Counter({kind: 1})
            try:
                if not same(place):
                    found["different"] += 1
                    failed = failed or f"{kind}: call {place} gave something else"
            except Exception as error:
                found["errors"] += 1
                failed = failed or f"{kind}: {type(error).__name__}: {error}"
            place += 1
            with locked:
                count.update(found)
                learns = count["learn calls"]
                total = learns + count["predict calls"] + count["plain calls"]
            if total >= calls and 10 * learns >= calls:
                done.set()

    def learns(first: int) -> Callable[[int], bool]:
        def learn(place: int) -> bool:
            if first == 0 and place % 5 == 4:  # the original of the copy continues to learn
                original.learn(Task((inputs(), torch.arange(12) % 3)), batch_size=4)
                return True
            mine = (first + place) % len(LEARNERS)
            return torch.equal(weights_learnt(mine), learnt[mine])

        return learn

    def answers_alike(place: int) -> bool:
        return torch.equal(served.predict(inputs()), answers)

    @torch.no_grad()
    def runs_alike(place: int) -> bool:
        return torch.equal(plain(x), expected)

    work = [("learn calls", learns(0)), ("learn calls", learns(2))]
    work += [("predict calls", answers_alike), ("plain calls", runs_alike)]
    threads = [threading.Thread(target=repeatedly, args=each, daemon=True) for each in work]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads switch in the middle of everything
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    kinds = ("learn calls", "predict calls", "plain calls", "errors", "different")
    figures: dict[str, int | str] = {kind: count[kind] for kind in kinds}
    return figures | ({"first": failed} if failed else {})


def inputs() -> Tensor:
    """The same every time, without using a shared generator."""
    return (torch.arange(12 * 16) * 0.7).sin().reshape(12, 16)


def learner(place: int, tasks: int) -> Learner:
    """One of the learners, after this many tasks."""
    build, settings = LEARNERS[place]
    model = build()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_((torch.arange(p.numel()) * 0.9 + number).sin().reshape(p.shape) / 2)
    made = Learner(model, settings, seed=place)
    for task in range(tasks):
        made.learn(Task((inputs() + task, torch.arange(12) % 3), name=f"task {task}"), batch_size=4)
    return made


def weights_learnt(place: int) -> Tensor:
    """The weights of one of the learners after two tasks."""
    with torch.no_grad():
        return torch.cat([p.detach().flatten() for p in learner(place, tasks=2).model.parameters()])


if __name__ == "__main__":
    sys.exit(main())
