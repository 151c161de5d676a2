"""The paper's networks, with plain forwards."""
