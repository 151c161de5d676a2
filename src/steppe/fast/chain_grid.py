"""Outputs of a chain of linear layers at many points around its weights.

The first layer is linear in α: (W + αD) X = WX + α DX. So two products per direction serve every α, and they are most
of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from steppe.fast.factored import ParamDict
from steppe.fast.linear_chain import LinearChain
from steppe.fast.matmul import product


class ChainGrid:
    """A chain's outputs on given samples, with the first layer's products kept.

    Args:
        chain: The chain.
        parts: The samples in parts, each (n, in).
    """

    def __init__(self, chain: LinearChain, parts: Sequence[Tensor]) -> None:
        self._chain = chain
        self._inputs = [part.t() for part in parts]  # samples as columns
        first = chain.weights[0].detach()
        self._products = [product(first, x) for x in self._inputs]

    def outputs(
        self, directions: Sequence[ParamDict], points: Sequence[Sequence[float]]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the outputs at w + Σ_k a_k d_k.

        Args:
            directions: The directions d_k; one may leave out parameters that it does not move.
            points: The coefficients (a_1, …) of each point.

        Yields:
            The index of the point, the index of the part, and the outputs, (n, out).
        """
        first, *others = self._chain.links
        own = {link.weight: link.layer.weight for link in others}
        own |= {link.bias: link.layer.bias for link in self._chain.links if link.layer.bias is not None}
        for part, (x, base) in enumerate(zip(self._inputs, self._products, strict=True)):
            changes = [None if (d := each.get(first.weight)) is None else product(d, x) for each in directions]
            for index, point in enumerate(points):
                at = {name: _perturbed(p, [d.get(name) for d in directions], point) for name, p in own.items()}
                columns = _perturbed(base, changes, point)
                columns = columns.clone() if columns is base else columns
                yield index, part, self._chain.finish_columns_(columns, at).t()


def _perturbed(start: Tensor, steps: Sequence[Tensor | None], point: Sequence[float]) -> Tensor:
    """The start plus Σ_k a_k step_k; None does not move it."""
    for a, step in zip(point, steps, strict=True):
        if step is not None:
            start = torch.add(start, step, alpha=a)
    return start
