"""Coverage claims only layers whose weight multiplies the recorded inputs: whole models whose old outputs stay, and
others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import LAYERS
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, dropout, linear, normalize

import steppe
from steppe.network.network import Network
from steppe.projection import coverage
from steppe.projection.hooks import capture_inputs, disable_fused_attention
from steppe.projection.layers import RULES, projected_weights, register_rule
from steppe.projection.misread_weights import find_misread_weights

F64: dict[str, Any] = {"dtype": torch.float64, "bias": False}
SIZE = 18  # of a vector, and of a patch


def own(use: Callable[[nn.Linear, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A linear layer with its own forward."""

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return use(self, input)

    return lambda: Own(SIZE, 7, **F64)


def custom_convolution(use: Callable[[nn.Conv2d, Tensor], Tensor], inside: bool = False) -> Callable[[], nn.Module]:
    """A convolution with its own forward or `_conv_forward`."""

    class Own(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if inside else use(self, input)

    class Inside(Own):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return use(self, input)

    return lambda: (Inside if inside else Own)(2, 7, 3, **F64)


def with_hook(before: Any = None, after: Any = None, kind: type[nn.Module] = nn.Linear) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(SIZE, 7, **F64) if kind is nn.Linear else nn.Conv2d(2, 7, 3, **F64)
        if before is not None:
            layer.register_forward_pre_hook(before)
        if after is not None:
            layer.register_forward_hook(after)
        return layer

    return build


def with_forward(use: Callable[[nn.Linear, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Replaces the class's forward on the instance."""

    def build() -> nn.Module:
        layer = nn.Linear(SIZE, 7, **F64)
        layer.forward = lambda x: use(layer, x)  # type: ignore[method-assign]
        return layer

    return build


class Called(nn.Linear):
    """Overrides `__call__`."""

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = super().__call__(x)
        return output * self.weight.detach().square().sum()


def round_to_quarters(w: Tensor) -> Tensor:
    """Rounds to quarters, with the identity as gradient."""
    return w + (torch.round(4 * w) / 4 - w).detach()


def bound_rows(layer: nn.Module, args: object) -> None:
    """Normalizes the rows to length 1 whenever the layer is called."""
    assert isinstance(layer, nn.Linear)
    layer.weight.data = normalize(layer.weight.data, dim=1)


def standardize(layer: nn.Conv2d, x: Tensor) -> Tensor:
    w = layer.weight
    return conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True))


TRUE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, 7, **F64),
    "convolution": lambda: nn.Conv2d(2, 7, 3, **F64),
    "twice the weight": own(lambda m, x: linear(x, 2 * m.weight)),
    "scaled inputs": own(lambda m, x: linear(normalize(x), m.weight)),
    "bounded outputs": own(lambda m, x: torch.tanh(linear(x, m.weight))),
    "dropped weights in training": own(lambda m, x: linear(x, dropout(m.weight, 0.5, m.training))),
    "the samples turned round": own(lambda m, x: linear(x.flip(0), m.weight)),
    "the mean of all": own(lambda m, x: linear(x.mean(0, keepdim=True), m.weight) + 0 * x[:, :1]),
    "replaced, the same": with_forward(lambda m, x: linear(x, m.weight)),
    "inputs changed by a hook": with_hook(lambda layer, args: (torch.sin(3 * args[0]),)),
    "patches changed by a hook": with_hook(lambda layer, args: (torch.sin(3 * args[0]),), kind=nn.Conv2d),
    "outputs changed by a hook": with_hook(after=lambda layer, args, output: output.cos()),
    "a convolution scaled": custom_convolution(lambda m, x: 3 * conv2d(x, m.weight)),
}
FALSE: dict[str, Callable[[], nn.Module]] = {
    "cosines": own(lambda m, x: linear(normalize(x), normalize(m.weight))),
    "other inputs": own(lambda m, x: linear(torch.sin(3 * x), m.weight)),
    "other inputs beside": own(lambda m, x: linear(x, m.weight) + linear(0.1 * torch.sin(3 * x), m.weight)),
    "replaced": with_forward(lambda m, x: linear(torch.sin(3 * x), m.weight)),
    "rounded weights": own(lambda m, x: linear(x, round_to_quarters(m.weight))),
    "weights of bounded length": with_hook(bound_rows),
    "a hook with the weight": with_hook(after=lambda layer, args, output: output * layer.weight.square().mean()),
    "called in its own way": lambda: Called(SIZE, 7, **F64),
    "standardized convolution": custom_convolution(standardize),
    "standardized within": custom_convolution(standardize, inside=True),
    "patches of another image": custom_convolution(
        lambda m, x: conv2d(avg_pool2d(x, 3, stride=1, padding=1), m.weight),
    ),
}


def whole(layer: nn.Module) -> nn.Module:
    return nn.Sequential(
        layer, nn.Tanh(), nn.Flatten(), nn.Linear(7 * (4 if hasattr(layer, "stride") else 1), 4, **F64)
    )


def data(layer: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    shape = (2, 4, 4) if hasattr(layer, "stride") else (SIZE,)
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(3)


def output_change(build: Callable[[], nn.Module]) -> tuple[float, set[str], str]:
    """How much a first task's outputs change while a second one is learned with λ = 1 and all directions kept; which
    weights are covered, and which the warning names."""
    torch.manual_seed(0)
    layer = build()
    model = whole(layer)
    (old, y), new = data(layer, 1), data(layer, 2)
    settings = steppe.FSDGPM(lr=0.1, importance="ones", threshold=1.0, buffer=3, basis_samples=3)
    learner = steppe.Learner(model, settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        learner.learn(steppe.Task((old, y)), epochs=5)
    with torch.no_grad():
        before = model.eval()(old)
        result = learner.learn(steppe.Task(new), epochs=20)
        moved = float((model.eval()(old) - before).abs().max())
    return moved, set(result.diagnostics["ranks"]), " ".join(str(warning.message) for warning in found)


@pytest.mark.parametrize("name", TRUE)
def test_outputs_of_covered_layers_stay(name: str) -> None:
    moved, covered, warned = output_change(TRUE[name])
    assert covered == {"0.weight", "3.weight"}
    assert warned == ""
    assert moved < 1e-9


@pytest.mark.parametrize("name", FALSE)
def test_uncoverable_weights_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, covered, warned = output_change(FALSE[name])
    assert covered == {"3.weight"}
    assert "without protection: 0.weight" in warned
    # rightly so: if covered, it would not preserve what it learned
    monkeypatch.setattr("steppe.projection.coverage.find_misread_weights", lambda *_: [])
    monkeypatch.setattr("steppe.projection.coverage.find_weights_used_by_value", lambda *_: [])
    moved, covered, warned = output_change(FALSE[name])
    assert covered == {"0.weight", "3.weight"}
    assert warned == ""
    assert moved > 1e-4


class Doubled(nn.Module):
    """A parametrization that has nothing to do with norms."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZED: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "spectral norm": (nn.utils.parametrizations.spectral_norm, ["parametrizations.weight.original"]),
    "spectral norm, old form": (nn.utils.spectral_norm, ["weight_orig"]),
    "one of one's own": (
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Doubled()),
        ["parametrizations.weight.original"],
    ),
    "two": (
        lambda layer: nn.utils.parametrize.register_parametrization(
            nn.utils.parametrizations.weight_norm(layer), "weight", Doubled()
        ),
        ["parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
    "a frozen scale": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer).parametrizations.weight.original0.requires_grad_(
            False
        ),
        ["parametrizations.weight.original1"],
    ),
    "a frozen direction": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer).parametrizations.weight.original1.requires_grad_(
            False
        ),
        ["parametrizations.weight.original0"],
    ),
    "a hook besides": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer).register_forward_hook(lambda *_: None),
        ["parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_weights_are_named_where_no_step_can_be_projected(name: str) -> None:
    change, left = PARAMETRIZED[name]

    def build() -> nn.Module:
        layer = nn.Linear(SIZE, 7, **F64)
        change(layer)
        return layer

    _, covered, warned = output_change(build)
    assert covered == {"3.weight"}
    assert warned.endswith("protection: " + ", ".join(f"0.{each}" for each in left))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*TRUE, *FALSE])
def test_detection_in_either_precision_and_mode(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = {**TRUE, **FALSE}[name]()
    model, x = whole(layer).to(dtype), data(layer, 1)[0].to(dtype)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    network = Network(model)
    for count in (1, 3):
        for mode in (True, False):
            model.train(mode)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = coverage.find_covered_weights(network, x[:count], (), multi_head=False)
            assert ("0.weight" in found) == (name in TRUE)
            assert "3.weight" in found
            assert all(module.training == mode for module in model.modules())
    if name != "weights of bounded length":  # the layer itself changes it
        assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", LAYERS)
def test_every_supported_layer_passes_the_test(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the layers that are normally trusted because torch's forward is known."""
    monkeypatch.setattr("steppe.projection.misread_weights._is_known", lambda layer, names: False)
    layer, shape = copy.deepcopy(LAYERS[case])  # other code uses it, and hooks are set here
    model = nn.Sequential(layer)
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert find_misread_weights(model, projected_weights(model), x) == []
    layer.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    layer.register_forward_hook(lambda layer, args, output: output + layer.weight.square().sum())
    assert find_misread_weights(model, projected_weights(model), x) == ["0.weight"]


@pytest.mark.parametrize("right", [True, False])
def test_registered_rules_are_tested_too(right: bool) -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x.exp() @ self.weight.t()

    model = nn.Sequential(Dense())
    try:
        register_rule(Dense)(lambda layer, x: (x.exp() if right else x)[None])
        x = torch.randn(20, 6, dtype=torch.float64)
        assert find_misread_weights(model, projected_weights(model), x) == ([] if right else ["0.weight"])
    finally:
        del RULES[Dense]


class Picky(nn.Linear):
    """Its input has another parameter name."""

    def forward(self, *, features: Tensor) -> Tensor:  # type: ignore[override]
        return linear(features, self.weight)


class Uses(nn.Module):
    """Custom layers, called in custom ways."""

    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.use = layer, nn.Linear(SIZE, 4, dtype=torch.float64), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.use(self.layer, x).sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("layer", "use"),
    [
        (Picky(SIZE, 7, **F64), lambda layer, x: layer(features=x)),
        (own(lambda m, x: linear(x, m.weight) * torch.rand(()))(), lambda layer, x: layer(x)),
        (own(lambda m, x: linear(x, 0 * m.weight))(), lambda layer, x: layer(x)),
        (own(lambda m, x: linear(x, m.weight)[None])(), lambda layer, x: layer(x)[0] if len(x) > 99 else x),
        (own(lambda m, x: (x.argmax(1), str(m)))(), lambda layer, x: layer(x)[0][:, None]),  # type: ignore[arg-type,return-value]
    ],
    ids=["another name", "noise", "no use", "never called", "no numbers"],
)
def test_untestable_layers_are_not_covered(layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    x = torch.randn(3, SIZE, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"without protection: layer\.weight$"):
        found = coverage.find_covered_weights(Network(Uses(layer, use)), x, (), multi_head=False)
    assert set(found) == {"head.weight"}


def test_cosine_classifier_can_be_the_multi_head_output() -> None:
    """It is not covered anyway."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, SIZE, **F64), nn.Tanh(), FALSE["cosines"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = coverage.find_covered_weights(
            Network(model), torch.randn(3, 5, dtype=torch.float64), (), multi_head=True
        )
    assert set(found) == {"0.weight"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_unfused_attention_does_not_change_the_process() -> None:
    """Padding is respected, and torch's global switch is not touched."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False] * 3, [False, False, True]])
    seen: list[tuple[bool, bool]] = []

    def sink(weight: object, layer: nn.Module, x: Tensor) -> None:
        seen.append((x.is_nested, torch.backends.mha.get_fastpath_enabled()))

    weights = projected_weights(model, exclude=("layers.0.self_attn",))
    with torch.no_grad(), disable_fused_attention(model), capture_inputs(weights, sink):
        model(x, src_key_padding_mask=mask)
    assert seen == [(False, True)] * 2
    with torch.no_grad(), capture_inputs(weights, sink):
        model(x, src_key_padding_mask=mask)
    assert seen[2:] == [(True, True)] * 2  # otherwise there would be nothing to prevent
