"""The Learner: training loop, validation, evaluation, metrics."""
