"""Whether a layer gives the model's output: what follows it may scale and shift its rows, but neither mix them nor add
what other layers give.

The layer's output is cut out of the graph of one forward, which then shows what the model's output h ↦ y depends on
besides, and by y's Jacobian how y depends on it. Row i of y may depend on row i of h in any way, and on the others
through what all rows have in common: a scale (a norm of h, say) or a shift (as in log_softmax). Then off its diagonal
the Jacobian is of rank 1, or is so once the shift, which is the same in all rows, is taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from steppe.runtime.hooks import temporary_hooks

_ROWS = 8  # of the Jacobian that are looked at
_PARALLEL = 1e-4  # sin² of the angle between vectors that count as parallel
_FAINT = 1e-5  # of the largest entry: a vector that rounding may have made


def is_output_head(model: nn.Module, layers: Sequence[nn.Module], others: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether the model's output on prepared inputs comes, row by row, from what these layers give, and neither from
    what other layers give by a way around them, nor from a matrix that belongs to no layer at all.
    """
    cuts: list[Tensor] = []
    around: list[Tensor] = _matrices_outside_layers(model, [*layers, *others])

    def cut(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        cuts.append(output.detach().requires_grad_())
        return cuts[-1].clone()  # the model may go on in place, which a leaf does not allow

    def note(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            around.append(output)

    with temporary_hooks() as hooks:
        for hook, hooked in ((cut, layers), (note, others)):
            hooks += [layer.register_forward_hook(hook) for layer in dict.fromkeys(hooked)]
        with torch.enable_grad():
            output: Tensor = model(x.clone())  # it may work in place
    if not output.requires_grad:
        return False
    weights = torch.arange(output.numel(), device=output.device).cos().reshape(output.shape).to(output.dtype)
    # (not all alike, for the sum of softmax and its kin depends on nothing)
    found = torch.autograd.grad(output, [*cuts, *around], weights, allow_unused=True, retain_graph=True)
    if any(g is not None and bool(g.any()) for g in found[len(cuts) :]):
        return False
    used = [h for h, g in zip(cuts, found, strict=False) if g is not None]
    return bool(used) and all(_is_rowwise(h, output) for h in used)


def _is_rowwise(h: Tensor, output: Tensor) -> bool:
    """Whether the first sample's output is its h with each row scaled, shifted, or turned into something else."""
    if h.numel() != output.numel():
        return False
    size = output.shape[1]
    rows = list(range(size)) if size <= _ROWS else [place * (size - 1) // (_ROWS - 1) for place in range(_ROWS)]
    slopes = [torch.autograd.grad(output[0, row], [h], retain_graph=True)[0] for row in rows]
    jacobian = torch.stack([slope.double().reshape(output.shape)[0] for slope in slopes])
    return bool(jacobian.isfinite().all()) and bool(jacobian.any()) and not mixes_rows(jacobian, rows)


def mixes_rows(jacobian: Tensor, rows: Sequence[int]) -> bool:
    """Whether the Jacobian of which these are some rows, (rows, size), is that of an output that mixes its input's."""
    if _rank_one(jacobian, rows):
        return False
    if jacobian.shape[1] < 5:  # without the shift too few places are left to tell
        return True
    return not _rank_one(jacobian[1:] - jacobian[0], rows[1:], beside=rows[:1])


def _rank_one(parts: Tensor, rows: Sequence[int], beside: Sequence[int] = ()) -> bool:
    """Whether each two of these rows are parallel, where neither they nor those beside have their own place."""
    least = _FAINT * float(parts.abs().max())
    for one, other in combinations(range(len(rows)), 2):
        kept = torch.ones(parts.shape[1], dtype=torch.bool, device=parts.device)
        kept[[rows[one], rows[other], *beside]] = False
        a, b = parts[one][kept], parts[other][kept]
        squares = float(a.dot(a) * b.dot(b))
        faint = min(float(a.norm()), float(b.norm())) <= least
        if not faint and squares - float(a.dot(b)) ** 2 > _PARALLEL * squares:
            return False
    return True


def _matrices_outside_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[Tensor]:
    """The trainable weights of none of the layers that are whole matrices, and so neither scales nor shifts of rows."""
    known = {id(p) for layer in layers for p in layer.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.squeeze().ndim > 1 and id(p) not in known]
