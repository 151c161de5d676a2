"""With threshold 1 and λ = 1, outputs on the inputs in the memory stay, whatever the optimizer does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import LAYERS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import steppe


class SmallTransformer(nn.Module):
    """Attention with its own projections, so that its layers have rules; residuals, normalization, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.norms = nn.ModuleList([nn.LayerNorm(12), nn.LayerNorm(12)])
        self.up, self.down, self.head = nn.Linear(12, 40), nn.Linear(40, 12), nn.Linear(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        h = self.norms[0](x)
        attended = torch.softmax(self.q(h) @ self.k(h).mT / 12**0.5, -1) @ self.v(h)
        x = x + self.out(attended)
        x = x + self.down(torch.relu(self.up(self.norms[1](x))))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """Layers with several weights: an encoder layer of torch's own, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(12, 2, 40, dropout=0.0, batch_first=True)
        self.gru, self.head = nn.GRU(12, 20, batch_first=True), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.encoder(x))[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 2 * 2, 3),
    )


def weight_normed() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(30, 24)), nn.ReLU(), norm(nn.Linear(24, 24)), nn.ReLU(), nn.Linear(24, 3))


def images(count: int) -> Tensor:
    return torch.randn(count, 2, 6, 6, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]] = {
    "mlp": (mlp, lambda count: torch.randn(count, 30, dtype=torch.float64), 12),
    "weight norm": (weight_normed, lambda count: torch.randn(count, 30, dtype=torch.float64), 12),
    "convnet": (convnet, images, 1),
    "transformer": (SmallTransformer, lambda count: torch.randint(11, (count, 3)), 2),
    "torch's transformer, gru": (Recurrent, lambda count: torch.randn(count, 4, 12, dtype=torch.float64), 2),
}


class Orthogonalized(Optimizer):
    """Like Muon: momentum, of matrices the nearest orthogonal one, and weight decay."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            update = momentum
            if p.ndim > 1:
                u, _, v = torch.linalg.svd(momentum.flatten(1), full_matrices=False)
                update = (u @ v).view_as(p)
            p.mul_(0.99).sub_(update, alpha=0.02)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "like muon": Orthogonalized,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.003, momentum=0.5),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.02, max_iter=4),
    "lbfgs with line search": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
}


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, steps: int) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        losses.append(optimizer.step(closure) if isinstance(inner(optimizer), torch.optim.LBFGS) else closure())
        if not isinstance(inner(optimizer), torch.optim.LBFGS):
            optimizer.step()
    return [float(loss.detach()) for loss in losses]


def inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, steppe.ProjectedOptimizer) else optimizer


@pytest.mark.filterwarnings("ignore:the basis of")
@pytest.mark.parametrize("project", ["step", "both"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("make_model", "draw", "remembered"), MODELS.values(), ids=MODELS)
def test_old_outputs_stay(
    make_model: Callable[[], nn.Module],
    draw: Callable[[int], Tensor],
    remembered: int,
    make_optimizer: Callable[[Any], Optimizer],
    project: str,
) -> None:
    model = make_model().double()
    memory = steppe.GradientProjectionMemory(model, threshold=1.0, freeze_uncovered=True)
    optimizer = memory.wrap(make_optimizer(model.parameters()), project=project)
    train(model, optimizer, draw(16), torch.randint(3, (16,)), 5)  # momentum from before the update must not leak
    old = draw(remembered)
    memory.update([old])
    if isinstance(inner(optimizer), torch.optim.LBFGS):  # which would take the new loss for the old one
        optimizer.state.clear()
    with torch.no_grad():
        before, weights = model(old), [p.clone() for p in model.parameters()]
    losses = train(model, optimizer, draw(16), torch.randint(3, (16,)), 15)
    with torch.no_grad():
        assert float((model(old) - before).abs().max()) < 1e-9
    assert losses[-1] < losses[0]
    moved = {
        name: float((p - w).detach().abs().max())
        for (name, p), w in zip(model.named_parameters(), weights, strict=True)
    }
    assert all(moved[name] == 0 for name in memory.frozen())
    free = [name for name in memory.ranks() if name not in memory.saturated()]
    assert len(free) >= 2
    assert all(moved[name] > 1e-4 for name in free)


@pytest.mark.filterwarnings("ignore:the basis of")
@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_every_kind_of_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer)
    memory = steppe.GradientProjectionMemory(layer, threshold=1.0, freeze_uncovered=True)
    optimizer = memory.wrap(torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1))
    old = torch.randn(shape, dtype=torch.float64)
    memory.update([old])
    with torch.no_grad():
        before = layer(old)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(shape, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert float((layer(old) - before).abs().max()) < 1e-10
