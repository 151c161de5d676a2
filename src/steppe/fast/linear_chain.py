"""A chain of linear layers: its outputs, loss and gradient layer by layer, without autograd.

The arithmetic of such a model is so small that autograd's bookkeeping costs more. With X_l the inputs of layer l and
δ_l the gradient of the loss in its outputs, the gradient of W_l is δ_lᵀ X_l, and δ_{l−1} = (δ_l W_l) ∘ σ'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steppe.fast.factored import FactoredGrad, ParamDict
from steppe.fast.matmul import product, times_transposed

LossFn = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps the chain's output to the loss and its gradient in the output."""

FACTORS = 2**12
"""From this many elements on, a weight's gradient stays factored."""
WIDE = 2**15
"""From this many elements on, a weight is not copied to be perturbed: factors are added to its outputs instead."""


class Activation(NamedTuple):
    """An elementwise function, the same in place, and its backward pass from the gradient and the output."""

    forward: Callable[[Tensor], Tensor]
    forward_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class Link(NamedTuple):
    """A linear layer and the activation after it."""

    layer: nn.Linear
    weight: str
    """The weight's name among the model's parameters."""
    bias: str
    """The bias's name."""
    activation: Activation | None = None

    def finish_(self, output: Tensor, bias: Tensor | None) -> Tensor:
        """Add the bias to a product of weight and inputs and apply the activation, both in place."""
        if bias is not None:
            output += bias
        return output if self.activation is None else self.activation.forward_(output)


class LinearChain:
    """A model that consists of linear layers with elementwise functions between them.

    `chain_recognition.find_linear_chain` builds it.

    Args:
        links: The layers in order.
        modules: All modules of the model.
        flattens: Whether the model flattens its inputs first.
    """

    def __init__(self, links: list[Link], modules: Sequence[nn.Module], flattens: bool) -> None:
        self.links, self.flattens = links, flattens
        self._modules = modules
        self._parts = [(module._modules, list(module._modules.values())) for module in modules if module._modules]
        self._hooks = [hooks for module in modules for hooks in _hooks(module)]
        self._parameters = [p for link in links for p in link.layer.parameters()]
        self.weights = [link.layer.weight for link in links]

    @property
    def intact(self) -> bool:
        """Whether the model still has the same layers, and no hooks. Checked at every update, so it is cheap."""
        if any(self._hooks):
            return False
        for parameter in self._parameters:
            if parameter._backward_hooks:
                return False
        for now, then in self._parts:  # noqa: SIM110 - a loop costs half of what `all` does
            if list(now.values()) != then:
                return False
        return True

    @property
    def untouched(self) -> bool:
        """Whether the model is intact by the full check, for use after user code may have run."""
        return self.intact and not any(map(overrides_call, self._modules)) and not has_global_hooks()

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """The model's outputs for many samples. It computes W Xᵀ instead of X Wᵀ, which is faster in BLAS.

        Args:
            x: The samples, (n, in).

        Returns:
            The outputs, (n, out).
        """
        return next(self.outputs_for(x, self.links[0].layer.weight))

    @torch.no_grad()
    def outputs_for(self, x: Tensor, first: Tensor) -> Iterator[Tensor]:
        """Yield the outputs for each of several first weights.

        Args:
            x: The samples, (n, in).
            first: The first weights, stacked along the rows.
        """
        for each in torch.split(product(first, x.t()), self.links[0].layer.out_features):
            yield self.finish_columns_(each, {}).t()

    @torch.no_grad()
    def finish_columns_(self, columns: Tensor, at: ParamDict) -> Tensor:
        """Compute the outputs from the first layer's product with the inputs.

        Args:
            columns: W Xᵀ, overwritten.
            at: Parameters to use in place of the model's own.

        Returns:
            The outputs, (out, n).
        """
        for place, link in enumerate(self.links):
            if place > 0:
                columns = product(at.get(link.weight, link.layer.weight), columns)
            bias = at.get(link.bias, link.layer.bias)
            columns = link.finish_(columns, None if bias is None else bias.unsqueeze(1))
        return columns

    @torch.no_grad()
    def first_weights(self, orders: Sequence[Tensor]) -> Tensor:
        """The first weight W' for inputs with permuted features, X[:, order] Wᵀ = X W'ᵀ with W'[:, order] = W.

        Args:
            orders: Permutations of the features.

        Returns:
            W' for each of them, stacked along the rows.
        """
        weight = self.links[0].layer.weight
        permuted = weight.new_empty((len(orders), *weight.shape))
        for each, order in zip(permuted, orders, strict=True):
            each[:, order.to(weight.device)] = weight
        return permuted.flatten(0, 1)

    @torch.no_grad()
    def loss_and_grad(
        self, x: Tensor, loss_fn: LossFn, at: ParamDict
    ) -> tuple[Tensor, dict[str, Tensor | FactoredGrad]]:
        """Compute the loss and its gradient.

        Args:
            x: The samples, (n, in).
            loss_fn: The loss on the outputs.
            at: Parameters to use in place of the model's own.

        Returns:
            The loss, and its gradient in every parameter.
        """
        inputs = [x]
        for link in self.links:
            output = times_transposed(inputs[-1], at.get(link.weight, link.layer.weight))
            inputs.append(link.finish_(output, at.get(link.bias, link.layer.bias)))
        loss, slope = loss_fn(inputs[-1])
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
    """δᵀX, factored if the matrix is large and there are fewer samples than rows."""
    count, rows = slope.shape
    if count < rows and rows * inputs.shape[1] > FACTORS:
        return FactoredGrad(slope, inputs)
    return torch.mm(slope.t(), inputs)


def overrides_call(module: nn.Module) -> bool:
    """Whether calling a module does more than the forward of its class.

    Args:
        module: The module, without the modules inside it.

    Returns:
        True if it or one of its parameters has hooks, or its call or forward is replaced.
    """
    return bool(
        any(_hooks(module))
        or "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module._parameters.values() if p is not None)
    )


def has_global_hooks() -> bool:
    """Whether hooks are registered on all modules of the process."""
    registered = vars(nn.modules.module)
    return any(registered[f"_global_{kind}_hooks"] for kind in ("forward", "forward_pre", "backward", "backward_pre"))


def _hooks(module: nn.Module) -> list[Mapping[int, object]]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
