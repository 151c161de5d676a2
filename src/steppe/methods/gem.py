"""GEM (Lopez-Paz and Ranzato, 2017): to first order, no step may increase the loss on a past task's stored samples.

The rows of A are the past tasks' gradients g_τ. If ⟨g, g_τ⟩ < 0 for some τ, the gradient g is replaced by the closest
one without conflicts, found in the dual:

    v = argmin ½ vᵀ(AAᵀ + 10⁻³ I)v + (Ag)ᵀv  subject to  v ≥ strength,    g ← g + Aᵀv
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steppe.errors import DivergedError
from steppe.fast.factored import to_dense
from steppe.methods.base import Method
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.task_memory_method import TaskMemoryConfig, TaskMemoryMethod, require_uniform_weights
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import linear_range, setting
from steppe.tensors.batch import Batch

_RIDGE = 1e-3  # added to AAᵀ, so that the solution is unique even if the rows are linearly dependent


@dataclass(frozen=True)
class GEM(TaskMemoryConfig):
    """Settings of GEM."""

    strength: float = setting(
        0.0, "lower bound of the dual variables (γ); above 0 favors past tasks", at_least=0, search=linear_range(0, 1)
    )

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        require_uniform_weights(network)
        return _GEM(self, network)


class _GEM(TaskMemoryMethod[GEM]):
    def observe(self, batch: Batch) -> Tensor:
        loss, g = self.network.loss_and_grad(self.network.prepare(batch), factored=self.memory.past.linear)
        g = clip_by_norm(g, self.settings.clip)
        if len(self.memory.past):
            rows = self.memory.past.gradients(self.settings.clip)  # A
            products = rows.products(g)  # A g
            if bool((products < 0).any()):
                v = solve_dual(rows.gram(), products, self.settings.strength)
                correction = rows.combined(v)  # Aᵀv
                g = {name: correction[name].add_(to_dense(part)) for name, part in g.items()}
        self.descent.step(g)
        return loss


def solve_dual(gram: Tensor, products: Tensor, strength: float) -> Tensor:
    """Solve GEM's dual problem, in float64.

    With P = AAᵀ + 10⁻³ I = L Lᵀ and v = strength + u, it is the non-negative least-squares problem

        argmin ‖Lᵀu + L⁻¹(Ag + P·strength)‖²  subject to  u ≥ 0

    Args:
        gram: AAᵀ, (tasks, tasks).
        products: A g, (tasks).
        strength: The lower bound of v.

    Returns:
        v, with the type and device of `products`.

    Raises:
        DivergedError: If a gradient is not finite, or the solver fails.
    """
    from scipy.optimize import nnls  # imported late: it takes longer to load than the rest of the library

    a = gram.double().cpu().numpy()
    c = products.double().cpu().numpy()
    if not (np.isfinite(a).all() and np.isfinite(c).all()):
        raise DivergedError("a gradient on a past task's samples is not finite: lower the learning rate (lr).")
    p = (a + a.T) / 2 + _RIDGE * np.eye(len(a))
    try:
        lower = np.linalg.cholesky(p)
        u, _ = nnls(lower.T, -np.linalg.solve(lower, c + p.sum(1) * strength), maxiter=100 * len(a))
    except (np.linalg.LinAlgError, RuntimeError) as error:
        raise DivergedError(
            f"the conflict between past tasks' gradients could not be solved: {error}: lower the learning rate (lr)."
        ) from error
    return torch.from_numpy(u + strength).to(products)


_PRESETS = {
    "pmnist": {"lr": 0.01, "strength": 0.0, "memory": 200, "tasks": 20},
    "pmnist-60k": {"lr": 0.01, "strength": 0.0, "memory": 1000, "tasks": 10},
    "cifar100-split": {"lr": 0.01, "strength": 0.5, "memory": 1000, "tasks": 10},
    "cifar100-superclass": {"lr": 0.03, "strength": 0.5, "memory": 1000, "tasks": 20},
    "tiny-imagenet": {"lr": 0.03, "strength": 0.5, "memory": 400, "tasks": 40},
}
register_method(
    "gem", GEM, "Gradient episodic memory: no step may increase a past task's loss on stored samples.", presets=_PRESETS
)
