"""Train your own network on a sequence of tasks.

Any `nn.Module` works. Here a small convolutional network learns Split MNIST: the digits 0 and 1, then 2 and 3, and so
on. Each task has its own head, a range of columns of the logits.
"""

import torch
from torch import nn

import steppe

torch.manual_seed(0)  # initial weights
model = nn.Sequential(
    nn.Unflatten(1, (1, 28, 28)),  # the benchmark's images are rows of 784 pixels
    nn.Conv2d(1, 16, 5, stride=2),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 5 * 5, 64),
    nn.ReLU(),
    nn.Linear(64, 10),  # two logits for each of the five tasks
)

benchmark = steppe.SplitMNIST(samples=1000)  # 1,000 training images per task
tasks = benchmark.stream(seed=0)

# GPM keeps weight updates orthogonal to the inputs of earlier tasks in every convolutional and linear layer.
learner = steppe.Learner(model, steppe.GPM(), seed=0, input_transform=benchmark.input_transform)
for number, task in enumerate(tasks, start=1):
    result = learner.learn(task, epochs=1, batch_size=10)
    accuracies = learner.evaluate(tasks[:number])  # percent, on each task so far
    print(f"after {task.name}: {result.updates} updates, accuracy", " ".join(f"{value:.1f}" for value in accuracies))

# The model was trained in place.
parameters = sum(p.numel() for p in model.parameters())
print(f"{parameters:,} parameters; GPM keeps {sum(result.bytes.values()) / 1000:.0f} kB")
