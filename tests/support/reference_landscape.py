"""Slow references for landscapes: a network copied and moved for every point, and a loss that is exactly a parabola."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steppe.fast.factored import ParamDict
from steppe.network.network import Network
from steppe.tensors.batch import Batch


def moved(model: nn.Module, directions: Sequence[ParamDict], point: Sequence[float]) -> nn.Module:
    """A copy of the model in float64 and eval mode at w + Σ a_k d_k."""
    other = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for a, d in zip(point, directions, strict=True):
            for name, p in other.named_parameters():
                p += a * d[name].double()
    return other


def loss_at(
    model: nn.Module, x: Tensor, y: Tensor, directions: Sequence[ParamDict], point: Sequence[float], head: range | None
) -> float:
    """Mean cross-entropy there, on the head alone."""
    with torch.no_grad():
        output = moved(model, directions, point)(x.double() if x.is_floating_point() else x)
    if head is None:
        return float(cross_entropy(output, y))
    return float(cross_entropy(output[:, head.start : head.stop], y - head.start))


class Bowl(nn.Module):
    """Logits of two classes for which the cross-entropy of class 0 is q(w) = floor + ½ wᵀAw, whatever the input."""

    def __init__(self, matrix: Tensor, weight: Tensor, floor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.matrix, self.floor = matrix, floor

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.reshape(-1)
        q = self.floor + 0.5 * w @ self.matrix @ w
        return torch.stack([torch.zeros_like(q), torch.log(torch.expm1(q))]).expand(len(x), 2)


def bowl(generator: torch.Generator, rows: int = 3, columns: int = 4) -> tuple[Bowl, Tensor]:
    """A bowl with a random positive definite matrix A, and A."""
    size = rows * columns
    root = torch.randn(size, size, dtype=torch.float64, generator=generator)
    matrix = root @ root.T / size
    return Bowl(matrix, torch.randn(rows, columns, dtype=torch.float64, generator=generator)), matrix


def standing(model: nn.Module, x: Tensor, y: Tensor, head: range | None = None) -> tuple[Network, Batch]:
    """The model as a network that has learned one task, and the task's prepared samples."""
    network = Network(model.eval())
    with torch.no_grad():
        outputs = model(network.prepare_inputs(x[:1])).shape[1]
    network.heads.add(head, outputs)
    return network, network.prepare(Batch(x, y, torch.zeros_like(y)))
