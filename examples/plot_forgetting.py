"""Plot how the accuracy on each task changes as further tasks are learned, for plain SGD and FS-DGPM.

Usage: python examples/plot_forgetting.py [FILE], which writes forgetting.png by default. Needs matplotlib.
"""

import sys

import matplotlib

matplotlib.use("Agg")  # draw to a file; no display needed
import matplotlib.pyplot as plt

import steppe

file = sys.argv[1] if len(sys.argv) > 1 else "forgetting.png"
benchmark = steppe.PMNIST(tasks=5, test_samples=1000)
tasks = benchmark.stream(seed=0)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
for axis, (name, config) in zip(axes, {"Finetune": steppe.Finetune(), "FS-DGPM": steppe.FSDGPM()}.items(), strict=True):
    learner = steppe.Learner(benchmark.model(seed=0), config, seed=0, input_transform=benchmark.input_transform)
    rows = []  # rows[i][j]: accuracy on task j after task i
    for number, task in enumerate(tasks, start=1):
        learner.learn(task, **benchmark.training.as_dict())  # the paper's epochs and batches
        rows.append(learner.evaluate(tasks[:number]))
    for j in range(len(tasks)):
        axis.plot(range(j + 1, len(tasks) + 1), [row[j] for row in rows[j:]], marker="o", label=f"task {j + 1}")
    axis.set(title=name, xlabel="tasks learned", xticks=range(1, len(tasks) + 1))
    lost = rows[0][0] - rows[-1][0]
    print(f"{name}: accuracy on task 1 falls by {lost:.1f} points, from {rows[0][0]:.1f} to {rows[-1][0]:.1f}")
axes[0].set_ylabel("test accuracy (%)")
axes[0].legend()
figure.savefig(file, dpi=150)
print(f"Wrote {file}.")
