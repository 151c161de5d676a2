"""Compare methods on the same tasks, from the same initial weights.

The tasks are a short version of Permuted MNIST. ACC is the mean test accuracy over all tasks at the end; BWT is the
mean change on earlier tasks since they were learned, so negative means forgetting.

For full runs over several seeds, with tables and reports, use the command line:

    steppe study pmnist finetune er gpm fs-dgpm --seeds 5
"""

import steppe

METHODS = {
    "Finetune": steppe.Finetune(),  # plain SGD: the lower bound
    "ER": steppe.ER(),  # replay of stored samples
    "GPM": steppe.GPM(),  # gradient projection
    "FS-DGPM": steppe.FSDGPM(),  # replay, projection and sharpness-aware steps
}

benchmark = steppe.PMNIST(tasks=5, test_samples=1000)
tasks = benchmark.stream(seed=0)

print(f"{'method':10}  {'ACC':>6}  {'BWT':>6}  {'kB kept':>8}")
for name, config in METHODS.items():
    model = benchmark.model(seed=0)
    learner = steppe.Learner(model, config, seed=0, input_transform=benchmark.input_transform)
    matrix = steppe.AccuracyMatrix()
    for number, task in enumerate(tasks, start=1):
        result = learner.learn(task, **benchmark.training.as_dict())  # the paper's epochs and batches
        matrix.append(learner.evaluate(tasks[:number]))
    kilobytes = sum(result.bytes.values()) / 1000  # what the method keeps besides the network
    print(f"{name:10}  {matrix.acc:6.1f}  {matrix.bwt:6.1f}  {kilobytes:8.0f}")
