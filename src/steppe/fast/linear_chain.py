"""Loss and gradient of a chain of linear layers, layer by layer, without autograd (docs/performance.md says when).

For such a model the arithmetic is so little that recording it costs more than doing it. With X_l the inputs of layer l
and δ_l the gradient of the loss in its outputs, W_l's gradient is δ_lᵀ X_l, and δ_{l−1} = (δ_l W_l) ∘ σ'.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from steppe.fast.factored import FactoredGrad, ParamDict
from steppe.fast.matmul import product, times_transposed
from steppe.fast.straight_line import find_function, straight_line

LossOf = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From the chain's output the loss and its gradient in the output."""

FACTORS = 2**12
"""Elements from which on a weight's gradient is kept as factors rather than multiplied out."""
WIDE = 2**15
"""Elements from which on a weight is not moved for a perturbation, but added to by factors."""


class Activation(NamedTuple):
    """A function applied to each element, the same in place, and how its output turns the gradient back."""

    forward: Callable[[Tensor], Tensor]
    forward_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_ATEN = torch.ops.aten
_threshold_backward = _ATEN.threshold_backward.default
RELU = Activation(torch.relu, torch.relu_, lambda slope, output: _threshold_backward(slope, output, 0))
TANH = Activation(torch.tanh, torch.tanh_, _ATEN.tanh_backward.default)
SIGMOID = Activation(torch.sigmoid, torch.sigmoid_, _ATEN.sigmoid_backward.default)
_BY_KIND: dict[type[nn.Module], Activation] = {nn.ReLU: RELU, nn.Tanh: TANH, nn.Sigmoid: SIGMOID}
_BY_FUNCTION: dict[object, Activation] = {
    **dict.fromkeys((torch.relu, torch.relu_, functional.relu, "relu", "relu_"), RELU),
    **dict.fromkeys((torch.tanh, functional.tanh, "tanh"), TANH),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, "sigmoid"), SIGMOID),
}


class Link(NamedTuple):
    """A linear layer with what follows it."""

    layer: nn.Linear
    weight: str
    """The weight's name among the model's parameters."""
    bias: str
    """The bias's name."""
    activation: Activation | None = None

    def completed(self, columns: Tensor) -> Tensor:
        """What W Xᵀ becomes, in place."""
        if self.layer.bias is not None:
            columns += self.layer.bias.unsqueeze(1)
        return columns if self.activation is None else self.activation.forward_(columns)


class LinearChain:
    """A model that is nothing but linear layers with elementwise functions between them."""

    def __init__(self, links: list[Link], modules: Sequence[nn.Module], flattens: bool) -> None:
        self.links, self.flattens = links, flattens
        self._modules = modules
        self._parts = [(module._modules, list(module._modules.values())) for module in modules if module._modules]
        self._hooks = [hooks for module in modules for hooks in _hooks(module)]
        self._weights = [p for link in links for p in link.layer.parameters()]
        self.weights = [link.layer.weight for link in links]

    @property
    def intact(self) -> bool:
        """Whether the model still is this chain: the same layers, and nobody who looks on. Asked at every update."""
        if any(self._hooks):
            return False
        for weight in self._weights:
            if weight._backward_hooks:
                return False
        for now, then in self._parts:  # noqa: SIM110 - a loop costs half of what `all` does
            if list(now.values()) != then:
                return False
        return True

    @property
    def untouched(self) -> bool:
        """Whether it is intact even where much may have happened to the model since it was looked at."""
        return self.intact and not any(map(_interfered, self._modules)) and not _watched_everywhere()

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """What the model gives for many samples, (n, in). The samples are the columns here, W Xᵀ instead of X Wᵀ: for
        BLAS the quicker way round.
        """
        return next(self.outputs_for(x, self.links[0].layer.weight))

    @torch.no_grad()
    def first_weights(self, orders: Sequence[Tensor]) -> Tensor:
        """The first layer's weight for samples whose numbers stand in other orders than those of the samples at hand,
        one below the other: X[:, order] Wᵀ = X W'ᵀ with W'[:, order] = W.
        """
        weight = self.links[0].layer.weight
        found = weight.new_empty((len(orders), *weight.shape))
        for place, order in zip(found, orders, strict=True):
            place[:, order.to(weight.device)] = weight
        return found.flatten(0, 1)

    @torch.no_grad()
    def outputs_for(self, x: Tensor, first: Tensor) -> Iterator[Tensor]:
        """The same with each of several first weights, one below the other, in turn."""
        head, *others = self.links
        for each in torch.split(product(first, x.t()), head.layer.out_features):
            columns = head.completed(each)
            for link in others:
                columns = link.completed(product(link.layer.weight, columns))
            yield columns.t()

    @torch.no_grad()
    def gradient(self, x: Tensor, loss_of: LossOf, at: ParamDict) -> tuple[Tensor, dict[str, Tensor | FactoredGrad]]:
        """The loss on samples, (n, in), and its gradient in every weight and bias, at the weights or at others."""
        inputs = [x]
        for link in self.links:
            output = times_transposed(inputs[-1], at.get(link.weight, link.layer.weight))
            if link.layer.bias is not None:
                output += at.get(link.bias, link.layer.bias)
            inputs.append(output if link.activation is None else link.activation.forward_(output))
        loss, slope = loss_of(inputs[-1])
        gradient: dict[str, Tensor | FactoredGrad] = {}
        for place in reversed(range(len(self.links))):
            link = self.links[place]
            if link.activation is not None:
                slope = link.activation.backward(slope, inputs[place + 1])
            gradient[link.weight] = weight_gradient(slope, inputs[place])
            if link.layer.bias is not None:
                gradient[link.bias] = slope.sum(0)
            if place > 0:
                slope = slope @ at.get(link.weight, link.layer.weight)
        return loss, gradient


def weight_gradient(slope: Tensor, inputs: Tensor) -> Tensor | FactoredGrad:
    """δᵀ X; as factors where the matrix is large and the samples are fewer than its rows."""
    count, rows = slope.shape
    if count < rows and rows * inputs.shape[1] > FACTORS:
        return FactoredGrad(slope, inputs)
    return torch.mm(slope.t(), inputs)


def find_linear_chain(model: nn.Module) -> LinearChain | None:
    """The chain that a model is; None where anything else happens in it, or could.

    Its forward must be a straight line of calls to its layers and to the functions known here: no branch, no helper, no
    attribute that might change, no buffer, no hook of any kind, no weight used twice. The model is only looked at:
    nothing of it runs, and nothing is changed, in it or in the process.
    """
    modules = dict(model.named_modules())
    linear = {id(p) for module in modules.values() if type(module) is nn.Linear for p in module.parameters()}
    if {id(p) for p in model.parameters()} != linear or any(True for _ in model.buffers()):
        return None
    if any(_interfered(module) for module in modules.values()) or _watched_everywhere():
        return None
    steps = list(_steps_of_sequence(model)) if type(model) is nn.Sequential else _steps_of_forward(model)
    if steps is None:
        return None
    links: list[Link] = []
    flattens = False
    for path, step in steps:
        if _flattens(step) and not links:
            flattens = True
        elif not _linked(path, step, links):
            return None
    owned = [id(p) for link in links for p in link.layer.parameters()]
    if not links or len(set(owned)) != len(owned) or set(owned) != linear:
        return None
    return LinearChain(links, list(modules.values()), flattens)


_Step = tuple[str, object]
"""What is called: a layer, under its path, or a function or the name of a method, which have none."""


def _steps_of_sequence(sequence: nn.Module, path: str = "") -> Iterator[_Step]:
    """The layers of a sequence and of the sequences in it, in order."""
    for name, part in sequence._modules.items():
        if type(part) is nn.Sequential:
            yield from _steps_of_sequence(part, f"{path}{name}.")
        else:
            yield f"{path}{name}", part


def _steps_of_forward(model: nn.Module) -> list[_Step] | None:
    """What the forward of somebody's own class calls, in order; None where that cannot be read off."""
    kind = type(model)
    plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    calls = straight_line(kind.forward)
    if calls is None or not plain or kind.__module__.startswith("torch.nn"):
        return None
    steps: list[_Step] = []
    for call in calls:
        if call.kind == "layer":
            layer = model._modules.get(call.name)
            if layer is None or getattr(model, call.name) is not layer:  # an attribute that is no layer, or hides it
                return None
            steps.append((call.name, layer))
        else:
            by_path = call.kind == "function"
            steps.append(("", find_function(call.name, kind.forward.__globals__) if by_path else call.name))
    return steps


def _flattens(step: object) -> bool:
    return type(step) is nn.Flatten and (step.start_dim, step.end_dim) == (1, -1)


def _linked(path: str, step: object, links: list[Link]) -> bool:
    """Take one step into the chain, if it has a place there."""
    if type(step) is nn.Linear:
        links.append(Link(step, f"{path}.weight", f"{path}.bias"))
        return True
    if type(step) is nn.Identity:
        return True
    if isinstance(step, nn.Module):
        activation = _BY_KIND.get(type(step))
    else:
        activation = _BY_FUNCTION.get(step) if isinstance(step, Hashable) else None
    if activation is None or not links or links[-1].activation is not None:
        return False
    links[-1] = links[-1]._replace(activation=activation)
    return True


def _interfered(module: nn.Module) -> bool:
    """Whether a module is called in a way of its own, or somebody looks on: hooks, of its weights too."""
    return bool(
        any(_hooks(module))
        or "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module._parameters.values() if p is not None)
    )


def _hooks(module: nn.Module) -> list[Mapping[int, object]]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


def _watched_everywhere() -> bool:
    """Whether hooks are set on all modules there are."""
    everywhere = vars(nn.modules.module)
    return any(everywhere[f"_global_{kind}_hooks"] for kind in ("forward", "forward_pre", "backward", "backward_pre"))
