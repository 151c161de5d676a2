"""Batches, factored gradients and fast matrix products."""
