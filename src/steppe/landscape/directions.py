"""Random directions in weight space.

For a profile, d ~ N(0, 1) in every weight; then each filter (the weights of one output: a row of the weight's (out, in)
view) is scaled to the norm of the same filter of w. Biases and the parameters of norm layers do not move. For the
bound, v ~ N(0, 1) in every parameter, unscaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from steppe.fast.factored import ParamDict
from steppe.network.network import Network
from steppe.network.weights import NORMS
from steppe.runtime.rng import Streams

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def random_direction(network: Network, seed: int, number: int) -> ParamDict:
    """Draw a filter-normalized direction.

    The draw depends on seed and number alone, so that different networks are compared along the same draws; the scale
    depends on the weights.

    Args:
        network: The network.
        seed: Seed of the landscape.
        number: Number of the direction.

    Returns:
        The direction, by parameter name.
    """
    holders = {name: network.model.get_submodule(name.rpartition(".")[0]) for name in network.trainable}
    return filter_normalized_noise(network.trainable, _generator(seed, f"landscape direction {number}"), holders)


@torch.no_grad()
def filter_normalized_noise(
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    holders: Mapping[str, nn.Module] = MappingProxyType({}),
) -> ParamDict:
    """Draw noise with the filter norms of the weights: d_lj ← d_lj / ‖d_lj‖ · ‖w_lj‖ for filter j of layer l.

    Args:
        weights: The weights by name.
        generator: The generator to draw from.
        holders: The layers of the weights, which determine what a filter is; by default a row.

    Returns:
        The noise by name; 0 for biases and norm layers.
    """
    found = {}
    for name, weight in weights.items():
        holder = holders.get(name)
        if weight.ndim < 2 or isinstance(holder, NORMS):  # the weight of a norm layer may have several dimensions
            found[name] = torch.zeros_like(weight)
            continue
        drawn, within = _filters(_normal(weight, generator), holder)
        norms = torch.linalg.vector_norm(_filters(weight, holder)[0], dim=within, keepdim=True)
        lengths = torch.linalg.vector_norm(drawn, dim=within, keepdim=True)
        found[name] = drawn.mul_(norms / lengths.clamp_(min=torch.finfo(drawn.dtype).tiny)).view_as(weight)
    return found


def _filters(weight: Tensor, holder: nn.Module | None) -> tuple[Tensor, tuple[int, ...]]:
    """A view of the weight, and the dimensions along which the elements of one filter lie."""
    if isinstance(holder, _TRANSPOSED) and weight.shape == holder.weight.shape:
        # (in, out / groups, taps...) -> (groups, in / groups, out / groups, taps)
        return weight.reshape(holder.groups, -1, *weight.shape[1:]).flatten(3), (1, 3)
    return weight.flatten(1), (1,)


def gaussian_noise(weights: Mapping[str, Tensor], seed: int, number: int) -> ParamDict:
    """Draw a standard normal in every parameter.

    Args:
        weights: The parameters by name.
        seed: Seed of the landscape.
        number: Number of the draw.

    Returns:
        The noise by name.
    """
    generator = _generator(seed, f"landscape noise {number}")
    return {name: _normal(weight, generator) for name, weight in weights.items()}


def _normal(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that all devices get the same values."""
    return torch.randn(weight.shape, dtype=weight.dtype, generator=generator, device="cpu").to(weight.device)


def _generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(Streams(seed).derive_seed(purpose))
