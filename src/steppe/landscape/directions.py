"""Random directions in weight space.

For a profile, d ~ N(0, 1) in every weight, then each filter (what one output is made with: a row of the weight's
(out, in) view) is scaled to the norm of the same filter of w; biases, and scales and shifts of norm layers, stay where
they are. For the bound, v ~ N(0, 1) in every parameter, unscaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from steppe.network.network import NORMS, Network
from steppe.runtime.rng import Streams
from steppe.tensors.factored import ParamDict

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def direction(network: Network, seed: int, number: int) -> ParamDict:
    """The filter-normalised direction of this number.

    What is drawn depends on the seed and the number alone, what it is scaled to on the weights: the networks of one
    run, and of runs to be compared, are looked at along the same draws.
    """
    holders = {name: network.model.get_submodule(name.rpartition(".")[0]) for name in network.trainable}
    return filter_normalised(network.trainable, _generator(seed, f"landscape direction {number}"), holders)


@torch.no_grad()
def filter_normalised(
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    holders: Mapping[str, nn.Module] = MappingProxyType({}),
) -> ParamDict:
    """d_lj ← d_lj / ‖d_lj‖ · ‖w_lj‖ for every filter j of every layer l.

    The layers that hold the weights say what a filter is; without them, a row.
    """
    found = {}
    for name, weight in weights.items():
        holder = holders.get(name)
        if weight.ndim < 2 or isinstance(holder, NORMS):  # a norm over several dimensions scales by as many
            found[name] = torch.zeros_like(weight)
            continue
        drawn, within = _filters(_normal(weight, generator), holder)
        norms = torch.linalg.vector_norm(_filters(weight, holder)[0], dim=within, keepdim=True)
        lengths = torch.linalg.vector_norm(drawn, dim=within, keepdim=True)
        found[name] = drawn.mul_(norms / lengths.clamp_(min=torch.finfo(drawn.dtype).tiny)).view_as(weight)
    return found


def _filters(weight: Tensor, holder: nn.Module | None) -> tuple[Tensor, tuple[int, ...]]:
    """The weight laid out so that a filter's elements lie along the dimensions named."""
    if isinstance(holder, _TRANSPOSED) and weight.shape == holder.weight.shape:
        # (in, out / groups, taps...) -> (groups, in / groups, out / groups, taps)
        return weight.reshape(holder.groups, -1, *weight.shape[1:]).flatten(3), (1, 3)
    return weight.flatten(1), (1,)


def noise(weights: Mapping[str, Tensor], seed: int, number: int) -> ParamDict:
    """The draw of this number of a standard normal in every parameter."""
    generator = _generator(seed, f"landscape noise {number}")
    return {name: _normal(weight, generator) for name, weight in weights.items()}


def _normal(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that every device gets the same."""
    return torch.randn(weight.shape, dtype=weight.dtype, generator=generator, device="cpu").to(weight.device)


def _generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(Streams(seed).derive_seed(purpose))
