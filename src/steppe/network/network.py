"""The user's model as the methods see it: losses and gradients at w or at w + v, by parameter name.

The model itself is never changed: other weights only stand in for its own while a gradient is taken, running
statistics move only when asked, and train or eval mode is restored module by module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, autocast, nn
from torch.nn.functional import cross_entropy, nll_loss

from steppe.checkpoint.tree import State, as_names
from steppe.data.transforms import UnitRange
from steppe.errors import DataError, ModelError, UsageError, short_repr
from steppe.fast.agreement import agree
from steppe.fast.chain_recognition import find_linear_chain
from steppe.fast.factored import FactoredGrad, Gradient, ParamDict, to_dense
from steppe.fast.linear_chain import LinearChain
from steppe.fast.linear_hooks import outer_product, record_linear_calls
from steppe.fast.matmul import fast_linear_layers, plus_product, wide_linear_layers
from steppe.network.heads import Heads, validate_heads
from steppe.network.input_copies import InputCopies
from steppe.network.module_state import (
    buffers_of,
    check_learnable,
    empty_buffers,
    in_mode,
    load_tensors,
    non_persistent_buffers,
    preserve_buffers,
    put_back,
    swap_parameters,
    tensors_of,
)
from steppe.runtime.devices import to_device
from steppe.tensors.batch import Batch

_MANY = 128  # samples from which on a chain's own way to its outputs is the quicker one
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers whose parameters are scales and shifts."""


class Network:
    """A model, its trainable parameters by name, and the heads of the tasks met so far."""

    def __init__(self, model: nn.Module, input_transform: Callable[[Tensor], Tensor] | None = None) -> None:
        lazy = nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer
        if any(isinstance(tensor, lazy) for tensor in (*model.parameters(), *model.buffers())):
            raise ModelError("the model has lazy layers without weights yet: run one forward through it first.")
        self.model = model
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise ModelError("the model has no trainable parameter: set requires_grad on those to be learnt.")
        for name, parameter in self.trainable.items():
            check_learnable(name, parameter)
        first = next(iter(self.trainable.values()))
        self.device, self.dtype = first.device, first.dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise ModelError(f"the model's weights are {self.dtype}: give them as float32 or float64 (model.float()).")
        self._input_transform = input_transform or UnitRange()
        self._partial = len(self.trainable) != sum(1 for _ in model.parameters())
        buffers = buffers_of(model)
        for module, name, buffer in buffers:
            if 0 in buffer.stride():  # expanded: its values share memory and could not be put back
                setattr(module, name, buffer.clone())
        self._has_buffers = bool(buffers)
        self._lazy_buffers = empty_buffers(model)
        self._scratch: ParamDict = {}
        self._shares: dict[int, tuple[Tensor, Tensor]] = {}  # 1/n and a column of −1/n, by n
        self._numbers: dict[float, Tensor] = {}
        self._chain: LinearChain | None = None
        self._frozen: frozenset[str] = frozenset()
        self._resting: list[nn.Module] = []  # norm layers whose running statistics serve in training too
        self._wide = wide_linear_layers(model)
        self._heads = Heads(self.device)
        self._mixed = False  # whether the model multiplies in bfloat16 for now
        self.input_copies = InputCopies(model)

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters stay from now on, or were never to be learnt."""
        return bool(self._frozen) or self._partial

    @property
    def learnable(self) -> dict[str, nn.Parameter]:
        """The parameters that still move."""
        if not self._frozen:
            return self.trainable
        return {name: p for name, p in self.trainable.items() if name not in self._frozen}

    def freeze_statistics(self, frozen: bool = True) -> None:
        """From now on normalisation layers use their running statistics as they are, in training too; or no longer."""
        layers = self.model.modules() if frozen else ()
        self._resting = [module for module in layers if isinstance(module, nn.modules.batchnorm._NormBase)]

    def freeze_norms(self, frozen: bool = True) -> None:
        """From now on the scales and shifts of normalisation layers stay, or move again. While they stay their
        gradients are 0; running statistics go on.
        """
        layers = self.model.modules() if frozen else ()
        own = {id(p) for module in layers if isinstance(module, NORMS) for p in module.parameters()}
        self._frozen = frozenset(name for name, p in self.trainable.items() if id(p) in own)

    def use_chain_if_exact(self, batch: Batch) -> None:
        """Take gradients the quick way from now on, if the model is a chain of linear layers and the quick way gives
        the same on a prepared batch.
        """
        self._chain = None
        chain = find_linear_chain(self.model)
        if chain is None or (batch.x.ndim > 2 and not chain.flattens):
            return
        expected = self.loss_and_grad(batch)
        self._chain = chain
        found = self.loss_and_grad(batch, as_factors=True)
        same = all(agree(to_dense(found[1][name]), to_dense(g)) for name, g in expected[1].items())
        if not (same and agree(found[0], expected[0])):
            self._chain = None

    @property
    def chain(self) -> LinearChain | None:
        """The quick way to gradients, where the model is a chain of linear layers, multiplies in its own precision, and
        nothing has come between since `use_chain_if_exact`.
        """
        return None if self._mixed else self._intact_chain()

    def _intact_chain(self) -> LinearChain | None:
        if self._chain is not None and not self._chain.intact:
            self._chain = None
        return self._chain

    @torch.no_grad()
    def perturbed(self, step: Gradient, scale: float = 1.0, *, onward: bool = False) -> ParamDict:
        """The weights w + scale · step; with `onward`, what the last call gave, moved further. Always in the same
        memory: fresh memory costs more than the sum.
        """
        for name, d in step.items():
            room = self.scratch(name)
            start = room if onward else self.trainable[name]
            if isinstance(d, FactoredGrad):
                plus_product(start, d.left.t(), d.right, scale=scale, out=room)
            else:
                torch.add(start, d, alpha=scale, out=room)
        return self._scratch

    def scratch(self, name: str) -> Tensor:
        """Memory of a parameter's shape, always the same, for whoever is at work."""
        if not self._scratch:
            with torch.inference_mode(False):
                self._scratch = {each: torch.empty_like(p, requires_grad=False) for each, p in self.trainable.items()}
        return self._scratch[name]

    def with_zero_frozen(self, gradient: ParamDict) -> ParamDict:
        """A gradient in the learnable parameters with zeros for those that stay."""
        return {name: gradient[name] if name in gradient else torch.zeros_like(p) for name, p in self.trainable.items()}

    @property
    def heads(self) -> list[range | None]:
        """The head of each task met so far, in order of learning."""
        return self._heads.rows

    def add_head(self, head: range | None, outputs: int) -> None:
        """Make room for the next task, whose samples use these rows of the output."""
        self._heads.add(head, outputs)

    def prepare_inputs(self, x: Tensor) -> Tensor:
        """Stored samples as the model takes them: on its device, in its number type, normalised."""
        x = self._input_transform(to_device(x, self.device))
        if not isinstance(x, Tensor):
            raise UsageError(
                f"`input_transform` gives a {type(x).__name__}: let it return the model's inputs as a tensor."
            )
        return x.to(self.dtype) if x.is_floating_point() else x

    @property
    def min_batch(self) -> int:
        """How many samples the model must be given at once in eval mode: two where a BatchNorm keeps no running
        statistics, for it takes those of the batch, and a single sample has none.
        """
        norms = (module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        return 2 if any(norm.running_mean is None for norm in norms) else 1

    def batch_size(self, count: int, most: int) -> int:
        """In batches of what size, `most` if possible, so many samples can go through the model in eval mode: so that
        none is left alone in the end where that is too few.
        """
        if self.min_batch == 1:
            return most
        if count == 1:
            raise DataError(
                "a single sample cannot be normalised, as a BatchNorm of the model keeps no running statistics: give "
                "more samples at once, or let it keep them (track_running_stats=True)."
            )
        return next((size for size in range(most, 1, -1) if count % size != 1), count)

    @property
    def transform_is_elementwise(self) -> bool:
        """Whether preparation is known to treat every number of a sample alike, so that their order does not matter to
        it.
        """
        return bool(getattr(self._input_transform, "elementwise", False))

    @property
    def scales_bytes(self) -> bool:
        """Whether preparation is the default: bytes are scaled, other numbers taken as they are."""
        return isinstance(self._input_transform, UnitRange)

    def prepare(self, batch: Batch) -> Batch:
        """A stored batch as the model takes it."""
        return Batch(self.prepare_inputs(batch.x), to_device(batch.y, self.device), to_device(batch.task, self.device))

    def outputs(self, x: Tensor) -> Tensor:
        """The model's output on prepared inputs, of which nothing is to be differentiated."""
        chain = self.chain
        if chain is not None and len(x) >= _MANY and chain.untouched:
            return chain.outputs(x.flatten(1))
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """The model's output on prepared inputs, in the precision of the moment."""
        return self._multiplied(self.model, x)

    def _multiplied(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self._mixed:
            with fast_linear_layers(self._wide):
                return self.input_copies.call(x, call)
        with autocast(self.device.type, torch.bfloat16):
            output = self.input_copies.call(x, call)
        return output.float() if output.dtype == torch.bfloat16 else output

    def logits(self, batch: Batch) -> Tensor:
        """The model's output with everything outside each sample's own head shut off."""
        return self.mask_logits(self.forward(batch.x), batch.task)

    def mask_logits(self, output: Tensor, task: Tensor) -> Tensor:
        """An output, (n, outputs), with everything outside the heads of the samples' tasks shut off."""
        return self._heads.mask(output, task)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy over the batch, each sample on its own task's head."""
        return cross_entropy(self.logits(batch), batch.y)

    def loss_and_grad(
        self,
        batch: Batch,
        at: ParamDict | None = None,
        *,
        factored: Mapping[str, Sequence[nn.Module]] = MappingProxyType({}),
        as_factors: bool = False,
        statistics: bool = True,
    ) -> tuple[Tensor, Gradient]:
        """The loss on a prepared batch and its gradient, at the weights w or at others in their place.

        `factored` names weights of linear layers, each with the layers that use it: their gradients come as factors
        wherever the layers saw fewer input vectors than the weight has rows, and the products are never formed.
        `as_factors` welcomes factors of any weight, where they are to be had for nothing.
        `statistics=False` leaves running statistics (BatchNorm) as they are: unless a method's settings say otherwise,
        exactly one forward of an update moves them.
        """
        chain = self.chain
        if chain is not None:
            loss, all_of_it = chain.loss_and_grad(
                batch.x.flatten(1), lambda out: self.output_loss(out, batch), at or {}
            )
            return loss, {
                name: g if isinstance(g := all_of_it[name], Tensor) or as_factors or name in factored else g.dense()
                for name in self.trainable
            }
        still = nullcontext() if statistics or not self._has_buffers else preserve_buffers(self.model)
        with swap_parameters(self.trainable, at), still:
            with record_linear_calls(factored) as calls:
                loss = self.loss(batch)
            kept = {
                name: seen
                for name, seen in calls.items()
                if seen
                and name not in self._frozen
                and not self.trainable[name]._backward_hooks  # the user's own, which must see the gradient
                and sum(call.rows for call in seen) < self.trainable[name].shape[0]
            }
            whole = {name: p for name, p in self.learnable.items() if name not in kept}
            wanted: list[Any] = [*whole.values(), *(call.output for seen in kept.values() for call in seen)]
            found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        gradient: dict[str, Tensor | FactoredGrad] = {
            name: torch.zeros_like(self.trainable[name]) for name in self._frozen
        }
        for name, p in whole.items():
            gradient[name] = torch.zeros_like(p) if (g := next(found)) is None else g
        for name, seen in kept.items():
            product = outer_product(seen, [next(found) for _ in seen], self.trainable[name].shape[0])
            gradient[name] = product.to(self.trainable[name].dtype) if self._mixed else product
        return loss.detach(), {name: gradient[name] for name in self.trainable}

    def output_loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss given the model's output, and its gradient in the output."""
        likely = torch.log_softmax(self.mask_logits(output, batch.task), 1)
        return nll_loss(likely, batch.y), self._less_labels(likely.exp_(), batch)

    def output_slope(self, output: Tensor, batch: Batch) -> Tensor:
        """The gradient alone."""
        return self._less_labels(torch.softmax(self.mask_logits(output, batch.task), 1), batch)

    def _less_labels(self, softmax: Tensor, batch: Batch) -> Tensor:
        """(softmax − one-hot) / n."""
        count = softmax.shape[0]
        if count not in self._shares:
            with torch.inference_mode(False):
                minus = torch.full((count, 1), -1 / count, dtype=softmax.dtype, device=softmax.device)
            self._shares[count] = self.scalar(1 / count), minus
        share, minus = self._shares[count]
        return softmax.mul_(share).scatter_add_(1, batch.y.unsqueeze(1), minus)

    def scalar(self, value: float) -> Tensor:
        """A number as a tensor, always the same one: to multiply by a Python number costs twice as much."""
        if value not in self._numbers:
            with torch.inference_mode(False):
                self._numbers[value] = torch.tensor(value, dtype=self.dtype, device=self.device)
        return self._numbers[value]

    def gradient_of(self, loss: Tensor) -> ParamDict:
        """The gradient of a loss that a method has put together itself."""
        weights = self.learnable
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
        return self.with_zero_frozen(dict(zip(weights, found, strict=True)))

    def functional_loss(self, batch: Batch, weights: ParamDict, *, statistics: bool = True) -> Tensor:
        """The loss with the given weights in place of the model's own, differentiable through them."""
        return cross_entropy(self.functional_logits(batch, weights, statistics=statistics), batch.y)

    def functional_logits(self, batch: Batch, weights: ParamDict, *, statistics: bool = True) -> Tensor:
        """The logits with the given weights in place of the model's own."""
        # Copies take the place of buffers that must not move: put back afterwards, they would count as changed, and a
        # graph that goes through BatchNorm refuses that.
        copies = {} if statistics else {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        call = torch.func.functional_call
        output = self._multiplied(lambda x: call(self.model, {**weights, **copies}, (x,)), batch.x)
        return self.mask_logits(output, batch.task)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all weights and buffers."""
        return {name: tensor.detach().clone() for name, tensor in tensors_of(self.model).items()}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """All weights and buffers as they were."""
        put_back(self.model, snapshot, self._self_made_now())

    def state_dict(self) -> State:
        """Weights and buffers, heads, what is frozen, and which way gradients are taken."""
        return {
            "weights": tensors_of(self.model),
            "self_made": sorted(self._self_made_now()),
            "heads": self.heads,
            "frozen": sorted(self._frozen),
            "statistics_frozen": bool(self._resting),
            "chain": self._intact_chain() is not None,
        }

    def load_state_dict(self, state: State, outputs: int) -> None:
        """Become what the state tells; weights of other names or shapes are refused."""
        heads = validate_heads(state["heads"], outputs)
        self_made = frozenset(as_names(state.get("self_made")) or ())  # older states do not say
        load_tensors(self.model, state["weights"], self_made)
        self._lazy_buffers |= self_made
        self._heads.set_rows(heads, outputs)
        self._frozen = frozenset(state["frozen"])
        self._resting = []
        if state["statistics_frozen"]:
            self.freeze_statistics()
        self._chain = find_linear_chain(self.model) if state["chain"] else None

    def _self_made_now(self) -> frozenset[str]:
        """The buffers that the model makes by itself; it may have named some only now."""
        self._lazy_buffers |= non_persistent_buffers(self.model)
        return self._lazy_buffers

    def like_weights(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that a state holds for some of the weights; other names or shapes are refused by ValueError."""
        for name, tensor in saved.items():
            if name not in self.trainable or tensor.shape != self.trainable[name].shape:
                raise ValueError(f"there is no weight {short_repr(name)} of shape {tuple(tensor.shape)}")
        return dict(saved)

    @contextmanager
    def autocast_to(self, precision: str) -> Iterator[None]:
        """Inside, the model multiplies in this precision, in train mode alone; its weights stay as they are."""
        found, self._mixed = self._mixed, precision == "bfloat16"
        try:
            yield
        finally:
            self._mixed = found

    @contextmanager
    def mode(self, *, training: bool) -> Iterator[None]:
        """Train or eval mode inside; afterwards every module is in the mode it was found in. Parts that their owner put
        in eval mode and has frozen stay in it. In eval mode the model multiplies in its own precision.
        """
        mixed, self._mixed = self._mixed, self._mixed and training
        try:
            with in_mode(self.model, training, self._resting):
                yield
        finally:
            self._mixed = mixed
