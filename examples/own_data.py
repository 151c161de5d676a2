"""Learn from your own data: NumPy arrays, a `Dataset`, validation data, augmentation.

The data is synthetic: three classes of noisy 2-D points whose positions rotate from task to task, like a sensor whose
signal drifts. All tasks share one head.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import steppe


def measurements(angle, samples, seed):
    """Return points around three centers, rotated by an angle in degrees, and their classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    phase = np.deg2rad(angle + 120 * y)
    x = np.stack([np.cos(phase), np.sin(phase)], axis=1) + rng.normal(0, 0.2, (samples, 2))
    return x.astype(np.float32), y


def jitter(x, generator):
    """Add noise to a training batch; random numbers must come from the given CPU generator."""
    return x + 0.05 * torch.randn(x.shape, generator=generator).to(x.device)


# A task takes pairs (inputs, labels) of arrays or tensors ...
arrays = steppe.Task(measurements(0, 300, seed=0), measurements(0, 300, seed=1), name="arrays")

# ... or any Dataset or DataLoader ...
x, y = measurements(30, 300, seed=2)
dataset = steppe.Task(
    TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), measurements(30, 300, seed=3), name="dataset"
)

# ... and optionally validation data, for early stopping, and an augmentation.
validated = steppe.Task(
    measurements(60, 300, seed=4),
    measurements(60, 300, seed=5),
    val=measurements(60, 100, seed=6),
    augment=jitter,
    name="with validation",
)

torch.manual_seed(0)  # initial weights
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
learner = steppe.Learner(model, steppe.ER(buffer=60, lr=0.05), seed=0)
learner.learn(arrays, epochs=5, batch_size=20)
learner.learn(dataset, epochs=5, batch_size=20)
learner.learn(validated, epochs=20, batch_size=20, patience=2)  # ends early when the validation loss stops falling

tasks = [arrays, dataset, validated]
for task, accuracy in zip(tasks, learner.evaluate(tasks), strict=True):
    print(f"{task.name:15}  test accuracy {accuracy:.1f} %")

x, y = measurements(30, 5, seed=7)
print("predicted classes", learner.predict(torch.from_numpy(x)).tolist(), "true classes", y.tolist())
