"""Parts for your own training loop: a gradient memory, optimizers around optimizers, a replay buffer."""
