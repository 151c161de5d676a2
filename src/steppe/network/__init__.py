"""The user's model as methods see it: parameters, gradients, heads."""
