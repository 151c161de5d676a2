"""Whether a layer is the model's head: what follows it may scale and shift its outputs, but not mix them or add the
outputs of other layers.

In one forward, the layer's output h is cut out of the graph. The graph then shows what else the model's output y
depends on, and the Jacobian of y in h shows how it depends on h. y_i may depend on h_i in any way, and on the other
elements of h through what all share: a scale (such as a norm of h) or a shift (as in log_softmax). Then the Jacobian
has rank 1 off its diagonal, at least after subtracting the shift, which is the same in all its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from steppe.runtime.hooks import temporary_hooks
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, clone_nest, leaves

_ROWS = 8  # number of rows of the Jacobian to compute
_PARALLEL = 1e-4  # sin² of the angle up to which vectors count as parallel
_FAINT = 1e-5  # norms up to this share of the largest entry may be rounding noise


def is_output_head(model: nn.Module, layers: Sequence[nn.Module], others: Iterable[nn.Module], x: Nest) -> bool:
    """Whether the model's output is, element by element, a function of these layers' outputs.

    Args:
        model: The model.
        layers: The layers that may be the head.
        others: All other layers with weights; if the output depends on one of them other than through `layers`, or on a
            matrix outside all layers, the answer is no.
        x: Prepared inputs.

    Returns:
        Whether the layers are the head.
    """
    cuts: list[Tensor] = []
    around: list[Tensor] = _matrices_outside_layers(model, [*layers, *others])

    def cut(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        cuts.append(output.detach().requires_grad_())
        return cuts[-1].clone()  # the model may modify it in place, which a leaf does not allow

    def note(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        around.extend(part for part in leaves(output) if isinstance(part, Tensor) and part.requires_grad)

    with temporary_hooks() as hooks:
        for hook, hooked in ((cut, layers), (note, others)):
            hooks += [layer.register_forward_hook(hook) for layer in dict.fromkeys(hooked)]
        with torch.enable_grad():
            output: Tensor = call_model(model, clone_nest(x))  # the model may modify it in place
    if not output.requires_grad:
        return False
    weights = torch.arange(output.numel(), device=output.device).cos().reshape(output.shape).to(output.dtype)
    # (unequal, because the plain sum of a softmax is constant)
    gradients = torch.autograd.grad(output, [*cuts, *around], weights, allow_unused=True, retain_graph=True)
    if any(g is not None and bool(g.any()) for g in gradients[len(cuts) :]):
        return False
    used = [h for h, g in zip(cuts, gradients, strict=False) if g is not None]
    return bool(used) and all(_is_rowwise(h, output) for h in used)


def _is_rowwise(h: Tensor, output: Tensor) -> bool:
    """Whether each element of the first sample's output depends only on its own element of h, and shared quantities."""
    if h.numel() != output.numel():
        return False
    size = output.shape[1]
    rows = list(range(size)) if size <= _ROWS else [index * (size - 1) // (_ROWS - 1) for index in range(_ROWS)]
    gradients = [torch.autograd.grad(output[0, row], [h], retain_graph=True)[0] for row in rows]
    jacobian = torch.stack([g.double().reshape(output.shape)[0] for g in gradients])
    return bool(jacobian.isfinite().all()) and bool(jacobian.any()) and not mixes_rows(jacobian, rows)


def mixes_rows(jacobian: Tensor, rows: Sequence[int]) -> bool:
    """Whether a Jacobian, given some of its rows, (rows, size), mixes the elements of its input."""
    if _rank_one(jacobian, rows):
        return False
    if jacobian.shape[1] < 5:  # too few elements to decide after subtracting the shift
        return True
    return not _rank_one(jacobian[1:] - jacobian[0], rows[1:], beside=rows[:1])


def _rank_one(parts: Tensor, rows: Sequence[int], beside: Sequence[int] = ()) -> bool:
    """Whether all pairs of rows are parallel off the diagonal, ignoring also the columns in `beside`."""
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
    """The trainable matrices outside the layers; vectors may be scales and shifts of the output."""
    known = {id(p) for layer in layers for p in layer.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.squeeze().ndim > 1 and id(p) not in known]
