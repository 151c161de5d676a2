"""The user's model as the methods see it: losses and gradients at w or at w + v, by parameter name.

`Network` combines one part per job. The model itself is never changed: other weights only take the place of its
own while a gradient is computed, running statistics move only when requested, and every module keeps its mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from steppe.checkpoint.tree import State
from steppe.data.padding import Padding
from steppe.fast.factored import Gradient, ParamDict
from steppe.fast.linear_chain import LinearChain
from steppe.network.fast_path import FastPath
from steppe.network.forward import Forward
from steppe.network.gradients import Gradients
from steppe.network.heads import Heads, validate_heads
from steppe.network.inputs import InputPipeline
from steppe.network.model_tensors import ModelTensors
from steppe.network.optimizer_choice import OptimizerChoice
from steppe.network.output_loss import CrossEntropy, Loss, OutputLoss, UserLoss
from steppe.network.scratch import Scratch
from steppe.network.weights import Weights
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest


class Network:
    """A model together with what learning needs of it.

    Args:
        model: The model, used in place.
        input_transform: Turns stored inputs, on the model's device, into the model's inputs. By default bytes are
            scaled to 0…1 and other numbers are kept.
        padding: How sequences of different lengths are padded.
        loss: The mean loss, given output and target; by default cross-entropy within each task's head.
        optimizer: What takes the steps of methods; by default their own SGD.

    Attributes:
        model: The model itself.
        optimizer: The user's optimizer, if there is one.
        weights: The trainable parameters, and which of them are frozen.
        trainable: The trainable parameters by name; short for `weights.trainable`.
        device: The device of the model.
        dtype: The dtype of its weights.
        inputs: Prepares stored samples.
        heads: The columns of the logits that each task may use.
        input_copies: Calls the model so that its input stays unchanged.
        scratch: Memory that updates reuse.
        output_loss: The loss and its gradient in the model's output.

    Example:
        >>> network = Network(nn.Linear(4, 2))
        >>> network.heads.add(None, outputs=2)
        >>> batch = Batch(torch.ones(3, 4), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]))
        >>> loss, gradient = network.loss_and_grad(batch)
        >>> sorted(gradient)
        ['bias', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        input_transform: Callable[[Any], Any] | None = None,
        padding: Padding | None = None,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerChoice | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.weights = Weights(model)
        self.trainable, self.device, self.dtype = self.weights.trainable, self.weights.device, self.weights.dtype
        self.inputs = InputPipeline(input_transform, self.device, self.dtype, padding)
        self.heads = Heads(self.device)
        self.scratch = Scratch(self.weights)
        self.output_loss: OutputLoss = (
            CrossEntropy(self.heads, self.scratch) if loss is None else UserLoss(loss, self.heads)
        )
        self._tensors = ModelTensors(model)
        self._gradients = Gradients(model, self.weights)
        self._forward = Forward(model, self.weights)
        self.input_copies = self._forward.input_copies
        self._fast_path = FastPath(model)

    def prepare_inputs(self, x: Nest) -> Nest:
        """Return stored samples as the model's inputs: on its device, in its dtype, padded, transformed."""
        return self.inputs.prepare_inputs(x)

    def prepare(self, batch: Batch) -> Batch:
        """Return a stored batch as the model's input."""
        return self.inputs.prepare(batch)

    def forward(self, x: Nest) -> Tensor:
        """Return the model's output on prepared inputs, in the current precision."""
        return self._forward(x)

    def outputs(self, x: Nest) -> Tensor:
        """Return the model's output on prepared inputs where no gradient is needed."""
        fast = self._fast_path.outputs(self.chain, x)
        return self.forward(x) if fast is None else fast

    def logits(self, batch: Batch) -> Tensor:
        """Return the model's output with −∞ outside each sample's own head."""
        return self.heads.mask(self.forward(batch.x), batch.task)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over a prepared batch, each sample on its own task's head."""
        return self.output_loss.loss(self.forward(batch.x), batch)

    def loss_and_grad(
        self,
        batch: Batch,
        at: ParamDict | None = None,
        *,
        factored: Mapping[str, Sequence[nn.Module]] = MappingProxyType({}),
        as_factors: bool = False,
        statistics: bool = True,
    ) -> tuple[Tensor, Gradient]:
        """Return the loss on a prepared batch and its gradient.

        Args:
            batch: A prepared batch.
            at: Weights to use in place of some or all of the model's own.
            factored: Weights of linear layers, with the layers that use each. Their gradients come as factors
                wherever the layers see fewer input vectors than the weight has rows; the product is never formed.
            as_factors: Whether other gradients may come as factors too, where that costs nothing.
            statistics: Whether the forward may move running statistics (BatchNorm). Exactly one forward of an
                update should, unless a method's settings say otherwise.
        """
        chain = self.chain
        if chain is not None:
            loss, grads = chain.loss_and_grad(
                batch.x.flatten(1), lambda out: self.output_loss.loss_and_slope(out, batch), at or {}
            )
            return loss, {
                name: g if isinstance(g := grads[name], Tensor) or as_factors or name in factored else g.dense()
                for name in self.trainable
            }
        return self._gradients.loss_and_grad(lambda: self.loss(batch), at, factored, statistics=statistics)

    def gradient_of(self, loss: Tensor) -> ParamDict:
        """Return the gradient of a loss that a method has computed itself."""
        return self._gradients.of(loss)

    def functional_loss(self, batch: Batch, weights: ParamDict, *, statistics: bool = True) -> Tensor:
        """Return the loss with other weights in place of the model's own, differentiable through them."""
        return self.output_loss.loss(self._functional_output(batch, weights, statistics=statistics), batch)

    def functional_logits(self, batch: Batch, weights: ParamDict, *, statistics: bool = True) -> Tensor:
        """Return the logits with other weights in place of the model's own, −∞ outside each sample's own head."""
        return self.heads.mask(self._functional_output(batch, weights, statistics=statistics), batch.task)

    def _functional_output(self, batch: Batch, weights: ParamDict, *, statistics: bool) -> Tensor:
        # Buffers that must not move are replaced by copies: restored afterwards they would count as changed, and a
        # graph that goes through BatchNorm refuses that.
        copies = {} if statistics else {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        replaced = {**weights, **copies}
        return self._forward(
            batch.x, lambda *args, **kwargs: torch.func.functional_call(self.model, replaced, args, kwargs)
        )

    @property
    def chain(self) -> LinearChain | None:
        """The chain of linear layers that gradients may go through instead of autograd, if the model is one.

        None in bfloat16, and from when anything in the model has changed since `use_chain_if_exact`.
        """
        return None if self._forward.is_mixed else self._fast_path.chain

    def use_chain_if_exact(self, batch: Batch) -> None:
        """Use the chain from now on, if the model is one and gives the same gradient on a prepared batch."""
        self._fast_path.enable_if_exact(batch, self.loss_and_grad)

    def mode(self, *, training: bool) -> AbstractContextManager[None]:
        """Put the model in train or eval mode; afterwards each module has its own mode again.

        Modules that are frozen and in eval mode stay in it. In eval mode the model runs in its own precision.

        Args:
            training: Whether to use train mode.

        Returns:
            A context manager.
        """
        return self._forward.mode(training=training)

    def autocast_to(self, precision: str) -> AbstractContextManager[None]:
        """Run the model in this precision inside, in train mode only; its weights stay as they are."""
        return self._forward.autocast_to(precision)

    def fit_outputs(self, outputs: int) -> None:
        """Adapt to the model's number of outputs, which has changed; can be repeated after an exception."""
        self.heads.set_ranges(self.heads.ranges, outputs)
        self.scratch.forget()
        self._forward.find_wide_layers()
        self._fast_path.enable(self.chain is not None)  # anew: what was computed for the old one does not fit

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of all weights and buffers."""
        return self._tensors.snapshot()

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Set all weights and buffers to those of a snapshot."""
        self._tensors.restore(snapshot)

    def state_dict(self) -> State:
        """Return weights and buffers, heads, what is frozen, and whether the chain is used."""
        return {
            **self._tensors.state_dict(),
            "heads": self.heads.ranges,
            "frozen": sorted(self.weights.frozen),
            "statistics_frozen": bool(self.weights.frozen_statistics),
            "chain": self._fast_path.chain is not None,
        }

    def load_state_dict(self, state: State, outputs: int) -> None:
        """Load a state for a model with this many outputs.

        Raises:
            ModelError: The model has weights of other names or shapes.
            ValueError: The state is invalid.
        """
        heads = validate_heads(state["heads"], outputs)
        self._tensors.load_state_dict(state)
        self.heads.set_ranges(heads, outputs)
        self.weights.set_frozen(state["frozen"])
        self.weights.freeze_statistics(bool(state["statistics_frozen"]))
        self._fast_path.enable(bool(state["chain"]))
