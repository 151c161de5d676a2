"""Steps of normalized weights: the change of the weight itself is projected, and nothing else is changed."""

from __future__ import annotations

import pytest
import torch
from reference import no_hooks, orthonormal
from torch import nn

import steppe
from steppe.fast.factored import to_dense
from steppe.methods.parts.sgd import MomentumSGD
from steppe.network.network import Network
from steppe.projection.importance import ImportanceRule, Ones, Spectral
from steppe.projection.layers import projected_weights
from steppe.projection.memory import GradientMemory
from steppe.projection.projector import SoftProjector
from steppe.projection.weight_norm import WeightNorm, find_weight_norms

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_limited_step_gives_the_projected_change(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim + 1)
    norm = WeightNorm("weight", "v", "g", dim)
    basis = orthonormal(5, 3, generator)
    projector = SoftProjector(basis[None], torch.rand(1, 3, dtype=torch.float64, generator=generator))
    v, step_v = (torch.randn(4, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    g, step_g = (torch.randn(norm.norm(v).shape, dtype=torch.float64, generator=generator) for _ in range(2))
    new_v, new_g = norm.limit((v, g), (v + step_v, g + step_g), projector)
    before, after = norm.compute(v, g), norm.compute(v + step_v, g + step_g)
    expected = before + (after - before) @ (torch.eye(5) - basis @ torch.diag(projector.importance[0]) @ basis.T)
    torch.testing.assert_close(norm.compute(new_v, new_g), expected, **CLOSE)
    torch.testing.assert_close(norm.norm(new_v), norm.norm(v + step_v), **CLOSE)
    free = SoftProjector(basis[None], torch.zeros(1, 3, dtype=torch.float64))  # nothing projected, nothing changed
    for one, other in zip(norm.limit((v, g), (v + step_v, g + step_g), free), (v + step_v, g + step_g), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_weight_that_becomes_zero_keeps_its_direction() -> None:
    norm = WeightNorm("weight", "v", "g", 0)
    v, g = torch.tensor([[3.0, 4.0], [0.6, 0.8]]), torch.tensor([[1.0], [2.0]])
    everything = SoftProjector(torch.eye(2)[None], torch.zeros(1, 2))
    new_v, new_g = norm.limit((v, g), (v, torch.tensor([[0.0], [1.0]])), everything)
    assert torch.equal(new_v[0], v[0])
    assert torch.equal(new_g, torch.tensor([[0.0], [1.0]]))


@pytest.mark.parametrize("rule", [Ones(), Spectral(2.0)], ids=repr)
def test_a_step_with_momentum_is_limited_in_one_call(rule: ImportanceRule) -> None:
    """Against a twin whose weight is a plain parameter that is set to the projected change of each free step."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3, bias=False, dtype=torch.float64))
    (norm,) = find_weight_norms(layer)
    network = Network(layer)
    memory = GradientMemory(rule, projected_weights(layer))
    assert memory.limit_step is None  # nothing is held yet
    memory.rebuild(network, torch.randn(4, 6, dtype=torch.float64), 1.0)
    assert no_hooks(layer)
    sgd = MomentumSGD(network, lr=0.1, momentum=0.5)
    (name,) = memory.projectors
    assert name == "parametrizations.weight.original1"
    velocity: dict[str, torch.Tensor] = {key: torch.zeros_like(p) for key, p in layer.named_parameters()}
    for _ in range(4):
        gradient = {key: torch.randn_like(p) for key, p in layer.named_parameters()}
        projected = memory.project_out(gradient)
        velocity = {key: 0.5 * velocity[key] + to_dense(g) for key, g in projected.items()}
        v, g = (layer.get_parameter(each).detach() for each in (norm.direction, norm.scale))
        weight = layer.weight.detach().clone()
        free = norm.compute(v - 0.1 * velocity[norm.direction], g - 0.1 * velocity[norm.scale])
        expected = weight + memory.projectors[name].project_out(free - weight)  # type: ignore[operator]
        sgd.step(gradient, outside=memory)
        torch.testing.assert_close(layer.weight.detach(), expected, **CLOSE)
        torch.testing.assert_close(sgd.state_dict()["velocity"], velocity)


def test_a_layer_without_norms_costs_nothing() -> None:
    layer = nn.Linear(4, 2)
    memory = GradientMemory(Ones(), projected_weights(layer))
    memory.rebuild(Network(layer), torch.randn(3, 4), 0.9)
    assert memory.limit_step is None


def test_a_scale_shared_by_two_layers_is_refused() -> None:
    first, second = (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2))
    second.parametrizations.weight.original1 = first.parametrizations.weight.original1
    with pytest.raises(steppe.ModelError, match="is shared with"):
        projected_weights(nn.Sequential(first, second))
