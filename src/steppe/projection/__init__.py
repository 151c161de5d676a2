"""The gradient memory: bases of the layers' inputs, and soft projectors onto them."""
