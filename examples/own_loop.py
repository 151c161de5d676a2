"""Protect old tasks in your own training loop: any model, any loss, any optimizer.

Permuted MNIST in a plain PyTorch loop with AdamW and weight decay. The optimizer is wrapped, so that its steps stay
outside the directions that earlier tasks use; the rest of the loop is what it was.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import steppe

tasks = steppe.PMNIST(tasks=4, samples=1000, test_samples=1000).stream(seed=0)


def digits(samples):
    """Return all images of a task as numbers from 0 to 1, and their labels."""
    x, y = samples.first(1000)
    return x / 255, y


def train(protect):
    """Learn the tasks one after another; return the accuracy on each in the end, in percent."""
    torch.manual_seed(0)  # initial weights, and the order of samples
    model = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    memory = steppe.GradientProjectionMemory(model, threshold=0.95)
    if protect:
        optimizer = memory.wrap(optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    for task in tasks:
        x, y = digits(task.train)
        for _ in range(5):
            for batch in torch.randperm(len(x)).split(20):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            scheduler.step()
        memory.update([x], max_samples=300)  # at the end of the task

    if protect:
        print("directions held:", {name: f"{r['rank']} of {r['of']}" for name, r in memory.ranks().items()})
    with torch.no_grad():
        tests = [digits(task.test) for task in tasks]
        return [float((model(x).argmax(1) == y).float().mean()) * 100 for x, y in tests]


for name, protect in (("AdamW", False), ("AdamW with a gradient memory", True)):
    accuracies = train(protect)
    print(f"{name}: accuracy", " ".join(f"{value:.1f}" for value in accuracies))
