"""Rules of layers with several weights or arguments, or weights in another layout, against slow references."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from layer_calls import ATTENTION, CALLS, CELLS, RECURRENT, TABLES, TRANSPOSED, Call
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence, unpack_sequence

from steppe.fast.factored import to_dense
from steppe.projection.hooks import capture_inputs
from steppe.projection.layers import ProjectedWeight, projected_weights
from steppe.projection.layouts import make_projector
from steppe.projection.misread_weights import find_misread_weights
from steppe.projection.row_counts import RowCounts
from steppe.projection.rules.recurrent import recompute
from steppe.projection.rules.registry import Layout
from steppe.tensors.nest import leaves

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def made(case: str) -> Call:
    torch.manual_seed(0)
    return CALLS[case]()


def collected(call: Call) -> dict[str, tuple[ProjectedWeight, Tensor]]:
    """What a call's weights multiply, by their names in the layer."""
    found: dict[str, tuple[ProjectedWeight, Tensor]] = {}

    def sink(weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        found[weight.name] = weight, weight.rule(layer, x)

    with torch.no_grad(), capture_inputs(projected_weights(call.layer), sink):
        call.layer(*call.args, **call.kwargs)
    return found


def numbers(call: Call) -> Tensor:
    """All numbers that a call returns."""
    output = call.layer(*call.args, **call.kwargs)
    return torch.cat([x.flatten() for x in leaves(output) if isinstance(x, Tensor) and x.is_floating_point()])


def projector_of(weight: ProjectedWeight, columns: Tensor) -> Any:
    """A projector onto everything that a weight multiplies."""
    if weight.layout is Layout.TABLE:
        counts = RowCounts(len(weight.parameter))
        counts.add(columns)
        spectrum = counts.leading(1.0)
        assert spectrum is not None
        basis = spectrum.vectors
        return make_projector(weight.layout, weight.parameter, basis, torch.ones(1, len(basis), dtype=torch.float64))
    basis, values, _ = torch.linalg.svd(columns.mT, full_matrices=False)
    basis = basis * (values > 1e-9 * values.amax()).unsqueeze(1)
    return make_projector(weight.layout, weight.parameter, basis, torch.ones_like(values))


@pytest.mark.parametrize("case", CALLS)
def test_gradients_lie_in_the_span_of_the_inputs(case: str) -> None:
    call = made(case)
    found = collected(call)
    assert set(found) == {
        name for name, p in call.layer.named_parameters() if p.squeeze().ndim > 1 and not name.startswith("bias")
    }
    output = numbers(call)
    slopes = torch.randn_like(output)
    for name, (weight, columns) in found.items():
        (gradient,) = torch.autograd.grad(output, weight.parameter, slopes, retain_graph=True)
        assert gradient.norm() > 1e-3, name
        left = to_dense(projector_of(weight, columns).project_out(gradient))
        assert left.norm() < 1e-10 * gradient.norm(), name


@pytest.mark.parametrize("case", CALLS)
def test_orthogonal_steps_preserve_the_outputs(case: str) -> None:
    """All weights move at once.

    Steps along what they multiply change the outputs, so no direction is protected unnecessarily.
    """
    call = made(case)
    found = collected(call)
    before = numbers(call).detach()
    steps = {name: torch.randn_like(weight.parameter) for name, (weight, _) in found.items()}
    if getattr(call.layer, "padding_idx", None) is not None:
        steps["weight"][call.layer.padding_idx] = 0.0  # as its gradient is
    for across in (True, False):
        other = made(case)
        with torch.no_grad():
            for name, (weight, columns) in found.items():
                projector = projector_of(weight, columns)
                part = to_dense((projector.project_out if across else projector.project_onto)(steps[name]))
                assert part.norm() > 1e-2, name
                other.layer.get_parameter(name).add_(part)
            moved = (numbers(call._replace(layer=other.layer)) - before).norm()
        if across:
            assert moved < 1e-10 * before.norm()
        else:
            assert moved > 1e-2 * before.norm()


@pytest.mark.parametrize("case", [case for case in CALLS if case != "embedding, bounded"])
def test_unknown_layers_are_tested(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.projection.misread_weights._is_known", lambda layer, names: False)
    call = made(case)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = call.layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(*call.args, **call.kwargs)

    model = Model()
    assert find_misread_weights(model, projected_weights(model), torch.zeros(1)) == []
    weights = {f"layer.{name}" for name in collected(call)}

    def spoil(layer: nn.Module, args: Any, output: Any) -> Any:
        total = sum(weight.parameter.square().sum() for weight in projected_weights(layer).values())
        parts = list(output) if isinstance(output, tuple) and not isinstance(output[0], PackedSequence) else [output]
        return (parts[0] * total, *parts[1:]) if not isinstance(parts[0], tuple) else (total * output[1][0],)

    call.layer.register_forward_hook(spoil)
    assert set(find_misread_weights(model, projected_weights(model), torch.zeros(1))) == weights


# Slow twins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRANSPOSED)
def test_patches_of_transposed_convolutions_are_those_a_loop_over_inputs_finds(case: str) -> None:
    """The loop scatters: every position of the input adds to as many positions of the output as the kernel has taps."""
    call = made(case)
    layer: Any = call.layer
    ((_, columns),) = collected(call).values()
    space = len(layer.kernel_size)
    x = call.args[0] if call.args[0].ndim == space + 2 else call.args[0][None]
    output = layer(*call.args, **call.kwargs)
    places = output.shape[-space:]
    width = layer.in_channels // layer.groups
    expected = torch.zeros(layer.groups, len(x), *places, width, *layer.kernel_size, dtype=torch.float64)
    for sample, channel in itertools.product(range(len(x)), range(layer.in_channels)):
        for place in itertools.product(*map(range, x.shape[2:])):
            for tap in itertools.product(*map(range, layer.kernel_size)):
                to = tuple(
                    p * layer.stride[a] - layer.padding[a] + t * layer.dilation[a]
                    for a, (p, t) in enumerate(zip(place, tap, strict=True))
                )
                if all(0 <= each < size for each, size in zip(to, places, strict=True)):
                    expected[(channel // width, sample, *to, channel % width, *tap)] += x[(sample, channel, *place)]
    assert torch.equal(columns, expected.flatten(1, 1 + space).flatten(2))
    rows = layer.weight.reshape(layer.groups, width, -1, math.prod(layer.kernel_size)).transpose(1, 2).flatten(2)
    plain = (columns @ rows.mT).reshape(layer.groups, len(x), *places, -1).movedim(-1, 2).transpose(0, 1).flatten(1, 2)
    if layer.bias is not None:
        plain = plain + layer.bias.reshape(-1, *[1] * space)
    torch.testing.assert_close(plain.reshape(output.shape), output, **CLOSE)


def sequences(layer: Any, x: Any) -> list[Tensor]:
    """Each sample's sequence, (steps, size)."""
    if isinstance(x, PackedSequence):
        return list(unpack_sequence(x))
    if x.ndim == 2:
        return [x]
    return list(x if layer.batch_first else x.transpose(0, 1))


def stepped(layer: Any, suffix: str, x: Tensor, h: Tensor, c: Tensor) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """One sample through one layer and direction by torch's own layer, step by step, each from the previous state."""
    reduced = type(layer)(x.shape[1], layer.hidden_size, bias=layer.bias, dtype=x.dtype, **settings_of(layer))
    for name in list(reduced.state_dict()):
        getattr(reduced, name).data = getattr(layer, name.removesuffix("_l0") + suffix).data
    seen: dict[str, list[Tensor]] = {f"weight_{kind}{suffix}": [] for kind in ("ih", "hh")}
    outputs = []
    for step in x:
        seen[f"weight_ih{suffix}"].append(step)
        seen[f"weight_hh{suffix}"].append(h[0])
        if isinstance(layer, nn.LSTM):
            _, (h, c) = reduced(step[None], (h, c))
        else:
            _, h = reduced(step[None], h)
        if layer.proj_size:  # what the fused layer multiplies by W_hr: o ∘ tanh(c)
            gates = reduced.weight_ih_l0 @ step + reduced.bias_ih_l0 + reduced.bias_hh_l0
            gates = gates + reduced.weight_hh_l0 @ seen[f"weight_hh{suffix}"][-1]
            open_by = torch.sigmoid(gates[3 * layer.hidden_size :])
            seen.setdefault(f"weight_hr{suffix}", []).append(open_by * torch.tanh(c[0]))
        outputs.append(h[0])
    return outputs, seen


def settings_of(layer: Any) -> dict[str, Any]:
    if isinstance(layer, nn.LSTM):
        return {"proj_size": layer.proj_size}
    return {"nonlinearity": layer.nonlinearity} if isinstance(layer, nn.RNN) else {}


def rows_of(columns: Tensor) -> Tensor:
    """Sorted, since the order of input vectors does not matter."""
    return torch.stack(sorted(columns.reshape(-1, columns.shape[-1]), key=lambda row: row.tolist()))


@torch.no_grad()
@pytest.mark.parametrize("case", RECURRENT)
def test_hidden_states_are_those_of_the_fused_layer_run_step_by_step(case: str) -> None:
    call = made(case)
    layer: Any = call.layer
    inputs = sequences(layer, call.args[0])
    hx = call.kwargs.get("hx", call.args[1] if len(call.args) > 1 else None)
    ways = 2 if layer.bidirectional else 1
    expected: dict[str, list[Tensor]] = {}
    for sample, x in enumerate(inputs):
        for depth in range(layer.num_layers):
            both = []
            for way in range(ways):
                suffix, place = f"_l{depth}" + way * "_reverse", depth * ways + way
                h, c = (hx if isinstance(hx, tuple) else (hx, None)) if hx is not None else (None, None)
                sizes = layer.proj_size or layer.hidden_size, layer.hidden_size
                h, c = (
                    torch.zeros(1, size, dtype=torch.float64)
                    if s is None
                    else s.reshape(layer.num_layers * ways, -1, size)[place, sample][None]
                    for s, size in zip((h, c), sizes, strict=True)
                )
                outputs, seen = stepped(layer, suffix, x.flip(0) if way else x, h, c)
                both.append(torch.stack(outputs[::-1] if way else outputs))
                for name, rows in seen.items():
                    expected.setdefault(name, []).extend(rows)
            x = torch.cat(both, -1)
    found = collected(call)
    assert set(found) == set(expected)
    for name, (_, columns) in found.items():
        torch.testing.assert_close(rows_of(columns), rows_of(torch.stack(expected[name])), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("case", RECURRENT)
def test_recomputed_outputs_are_those_of_the_fused_layer(case: str) -> None:
    call = made(case)
    layer: Any = call.layer
    fused, _ = layer(*call.args, **call.kwargs)
    if isinstance(fused, PackedSequence):
        fused, _ = pad_packed_sequence(fused)
    elif fused.ndim == 2:
        fused = fused[:, None]
    elif layer.batch_first:
        fused = fused.transpose(0, 1)
    torch.testing.assert_close(recompute(layer, *call.args, **call.kwargs)[0], fused, **CLOSE)


@pytest.mark.parametrize("case", CELLS)
def test_cells_multiply_their_input_and_hidden_state(case: str) -> None:
    call = made(case)
    hidden = call.kwargs["hx"] if call.kwargs else call.args[1]
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    found = collected(call)
    assert torch.equal(found["weight_ih"][1][0], call.args[0].reshape(-1, 6))
    assert torch.equal(found["weight_hh"][1][0], hidden.reshape(-1, 8))


def test_a_cell_without_a_state_multiplies_zeros() -> None:
    found = collected(Call(nn.LSTMCell(6, 8), (torch.randn(3, 6),), {}))
    assert not found["weight_hh"][1].any()


@torch.no_grad()
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_multiplies_its_arguments_and_what_a_loop_over_heads_finds(case: str) -> None:
    call = made(case)
    layer: Any = call.layer
    arguments = dict(zip(("query", "key", "value"), call.args, strict=False)) | call.kwargs
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    found = {name: columns for name, (_, columns) in collected(call).items()}
    if layer.in_proj_weight is None:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        for name, x in (("q_proj_weight", q), ("k_proj_weight", k), ("v_proj_weight", v)):
            assert torch.equal(found[name][0], x.flatten(0, -2))
    else:
        weights = list(layer.in_proj_weight.chunk(3))
        for group, x in zip(found["in_proj_weight"], (q, k, v), strict=True):
            count = x.shape[:-1].numel()
            assert torch.equal(group[:count], x.flatten(0, -2))
            assert not group[count:].any()
    biases = [0.0] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    batches = [
        x[None] if x.ndim == 2 else x if layer.batch_first else x.transpose(0, 1) for x in (q, k, v)
    ]  # (samples, steps, size)
    heads, size = layer.num_heads, layer.head_dim
    rows = []
    for sample in range(len(batches[0])):
        q, k, v = (x[sample] @ w.T + b for x, w, b in zip(batches, weights, biases, strict=True))
        if layer.bias_k is not None:
            k, v = torch.cat([k, layer.bias_k[0]]), torch.cat([v, layer.bias_v[0]])
        if layer.add_zero_attn:
            k, v = (torch.cat([x, torch.zeros(1, heads * size, dtype=torch.float64)]) for x in (k, v))
        for place in range(len(q)):
            row = torch.zeros(heads * size, dtype=torch.float64)
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = torch.stack([q[place, part] @ key[part] / math.sqrt(size) for key in k])
                for other in range(batches[1].shape[1]):
                    padding, mask = arguments.get("key_padding_mask"), arguments.get("attn_mask")
                    if padding is not None and padding[sample, other]:
                        scores[other] = -math.inf
                    if mask is not None and other > place:
                        scores[other] = -math.inf
                row[part] = torch.softmax(scores, 0) @ v[:, part]
            rows.append(row)
    torch.testing.assert_close(rows_of(found["out_proj.weight"]), rows_of(torch.stack(rows)), **CLOSE)


@pytest.mark.parametrize("case", TABLES)
def test_the_rows_of_tables_are_those_that_a_change_shows_in(case: str) -> None:
    call = made(case)
    layer: Any = call.layer
    ((_, rows),) = collected(call).values()
    before = numbers(call).detach()
    shown = set()
    for row in range(len(layer.weight)):
        changed = made(case)._replace(args=call.args, kwargs=call.kwargs)
        with torch.no_grad():
            changed.layer.get_parameter("weight")[row] *= -1.5
            if not torch.allclose(numbers(changed), before):
                shown.add(row)
    assert set(rows.tolist()) == shown - {layer.padding_idx}


def test_bfloat16_inputs_are_widened() -> None:
    """Under autocast a layer gets bfloat16 inputs; bases are computed from them in full precision."""
    layer = nn.GRU(4, 3)
    x = torch.randn(5, 2, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = collected(Call(layer, (x,), {}))
    assert {columns.dtype for _, columns in found.values()} == {torch.float32}
    assert torch.equal(rows_of(found["weight_ih_l0"][1]), rows_of(x.float()))
