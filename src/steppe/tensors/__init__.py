"""Batches, nests of tensors, and calls of a model with them."""
