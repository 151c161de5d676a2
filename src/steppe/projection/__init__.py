"""The gradient memory: layer inputs, their leading directions, and soft projectors onto them."""
