"""Search for good settings with Optuna, by accuracy on validation data."""
