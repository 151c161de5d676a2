"""Recurrent layers: the input vectors of recurrent weights are hidden states, which fused kernels do not show.

The recurrence is therefore computed again, step by step, for each layer and direction:

    RNN   h_t = tanh(W_ih x_t + W_hh h_{t−1})     (or ReLU)
    GRU   r, z = σ(W_ih x_t + W_hh h_{t−1})       n = tanh(W_ih x_t + r ∘ W_hh h_{t−1})
          h_t = (1 − z) ∘ n + z ∘ h_{t−1}
    LSTM  i, f, o = σ(W_ih x_t + W_hh h_{t−1})    g = tanh(W_ih x_t + W_hh h_{t−1})
          c_t = f ∘ c_{t−1} + i ∘ g               h_t = W_hr (o ∘ tanh(c_t))

with rows of W_ih and W_hh of its own for each of them, with biases, and without W_hr unless the LSTM has `proj_size`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from steppe.projection.rules.registry import register_call_rule

State = tuple[Tensor, Tensor]
"""Hidden and cell state, (samples, size); the cell state of layers without one is not used."""


@register_call_rule(nn.RNN, nn.GRU, nn.LSTM, weights=("weight_ih_l*", "weight_hh_l*", "weight_hr_l*"))
def recurrent_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The rule of recurrent layers: inputs and hidden states of all steps, without padding."""
    assert isinstance(layer, nn.RNNBase)
    return recompute(layer, *args, **kwargs)[1]


@register_call_rule(nn.RNNCell, nn.GRUCell, nn.LSTMCell, weights=("weight_ih", "weight_hh"))
def cell_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The rule of recurrent cells: the input and the hidden state."""
    assert isinstance(layer, nn.RNNCellBase)
    return _cell_inputs(layer, *args, **kwargs)


def _cell_inputs(
    layer: nn.RNNCellBase, input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    hidden = hx[0] if isinstance(hx, tuple) else hx
    columns = {"weight_ih": input.reshape(1, -1, layer.input_size)}
    if hidden is None:
        hidden = input.new_zeros(1, layer.hidden_size)
    return {**columns, "weight_hh": hidden.reshape(1, -1, layer.hidden_size)}


class _Steps(NamedTuple):
    """A batch of sequences, (steps, samples, size), and which of its steps are not padding, (steps, samples)."""

    x: Tensor
    valid: Tensor


def recompute(
    layer: nn.RNNBase, input: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a recurrent layer step by step, without dropout.

    Args:
        layer: The layer.
        input: Its input: a batch, a single sequence or packed sequences.
        hx: The initial state, if given.

    Returns:
        The output of its last layer, (steps, samples, size), 0 where there is padding, and the input vectors of its
        weights.
    """
    steps = _as_steps(layer, input)
    directions = 2 if layer.bidirectional else 1
    shape = layer.num_layers * directions, steps.x.shape[1]
    hidden, cell = hx if isinstance(hx, tuple) else (hx, None)
    hidden = steps.x.new_zeros(*shape, layer.proj_size or layer.hidden_size) if hidden is None else hidden
    cell = steps.x.new_zeros(*shape, layer.hidden_size) if cell is None else cell
    if hidden.ndim == 2:  # of a single sequence
        hidden, cell = hidden.unsqueeze(1), cell if cell.ndim == 3 else cell.unsqueeze(1)
    columns: dict[str, Tensor] = {}
    for depth in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            index, suffix = depth * directions + direction, f"_l{depth}" + "_reverse" * direction
            output, found = _run(layer, suffix, steps, (hidden[index], cell[index]), backward=direction == 1)
            outputs.append(output)
            columns.update({f"{kind}{suffix}": rows[None] for kind, rows in found.items()})
        steps = steps._replace(x=torch.cat(outputs, -1))
    return steps.x, columns


def _as_steps(layer: nn.RNNBase, input: Tensor | PackedSequence) -> _Steps:
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input)
        return _Steps(x, (torch.arange(len(x), device="cpu").unsqueeze(1) < lengths).to(x.device))
    x = input.unsqueeze(1) if input.ndim == 2 else input.transpose(0, 1) if layer.batch_first else input
    return _Steps(x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device))


def _run(
    layer: nn.RNNBase, suffix: str, steps: _Steps, state: State, *, backward: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer in one direction: its output, and the input vectors of its weights, (n, in)."""
    weights = {
        name: getattr(layer, name + suffix)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        if hasattr(layer, name + suffix)
    }
    projected = linear(steps.x, weights["weight_ih"], weights.get("bias_ih"))
    order = reversed(range(len(steps.x))) if backward else range(len(steps.x))
    outputs = list(steps.x[:, :, :0])  # one for each step
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for t in order:
        valid = steps.valid[t]
        seen["weight_hh"].append(state[0][valid])
        recurrent = linear(state[0], weights["weight_hh"], weights.get("bias_hh"))
        hidden, cell = _step(layer, projected[t], recurrent, state)
        if "weight_hr" in weights:
            seen["weight_hr"].append(hidden[valid])
            hidden = linear(hidden, weights["weight_hr"])
        keep = valid.unsqueeze(1)
        state = torch.where(keep, hidden, state[0]), torch.where(keep, cell, state[1])
        outputs[t] = hidden * keep
    columns = {"weight_ih": steps.x[steps.valid], **{name: torch.cat(rows) for name, rows in seen.items()}}
    return torch.stack(outputs), columns


def _step(layer: nn.RNNBase, projected: Tensor, recurrent: Tensor, state: State) -> State:
    """The state after a step, before the projection of the hidden state."""
    hidden, cell = state
    if isinstance(layer, nn.LSTM):
        i, f, g, o = (projected + recurrent).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell
    if isinstance(layer, nn.GRU):
        (r, z, n), (hr, hz, hn) = projected.chunk(3, -1), recurrent.chunk(3, -1)
        z = (z + hz).sigmoid()
        return (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * hidden, cell
    total = projected + recurrent
    return (total.relu() if layer.mode == "RNN_RELU" else total.tanh()), cell
