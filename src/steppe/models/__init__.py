"""The networks of the paper and of GPM's code."""
