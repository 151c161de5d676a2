"""Save a learner, load it later, and learn the next task.

The file contains everything that learning depends on: weights, buffer, bases, random state. It contains no code, so you
provide the network's architecture again when loading. The result is the same as without the interruption, bit for bit.
"""

import tempfile
from pathlib import Path

import torch

import steppe

benchmark = steppe.PMNIST(tasks=3, samples=500, test_samples=1000)
tasks = benchmark.stream(seed=0)
train = {"epochs": 1, "batch_size": 10, "updates_per_batch": 2}


def new_learner():
    """Return a learner with the benchmark's initial weights."""
    config = steppe.FSDGPM()
    return steppe.Learner(benchmark.model(seed=0), config, seed=0, input_transform=benchmark.input_transform)


with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "learner.safetensors"

    # Monday: learn two tasks and save.
    learner = new_learner()
    for task in tasks[:2]:
        learner.learn(task, **train)
    learner.save(file)
    print(f"saved after {learner.num_tasks} tasks: {file.stat().st_size / 1e6:.1f} MB")

    # Tuesday, in another process: load and continue. The initial weights of the network do not matter.
    resumed = steppe.load(file, benchmark.model(seed=1), input_transform=benchmark.input_transform)

before = resumed.evaluate(tasks[:2])
resumed.learn(tasks[2], **train)
after = resumed.evaluate(tasks)
for task, old, new in zip(tasks, before, after, strict=False):
    print(f"{task.name}: {old:.1f} % before the new task, {new:.1f} % after")
print(f"{tasks[2].name}: {after[2]:.1f} %, the new task")

# The same without interruption.
uninterrupted = new_learner()
for task in tasks:
    uninterrupted.learn(task, **train)
weights, expected = resumed.model.state_dict(), uninterrupted.model.state_dict()
print("same weights as without interruption:", all(torch.equal(weights[name], expected[name]) for name in expected))
