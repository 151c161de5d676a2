"""Gradient-memory coverage: weights that a model also uses outside their layers, and shared heads."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from own_models import OWN
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

import steppe
from steppe.errors import ModelError
from steppe.network.network import Network
from steppe.projection.coverage import find_covered_weights, warn_shared_head
from steppe.projection.hooks import find_weights_used_outside
from steppe.projection.layers import projected_weights

X = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(3) % 4


class Encoded(nn.Module):
    """An encoder, some use of its weight, and a head."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor], kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.e = kind(6, 6, dtype=torch.float64)
        self.h = nn.Linear(6, 4, dtype=torch.float64)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.use(self.e, x)))


class Scaled(nn.Linear):
    """Computes something else with the weight, but within the layer."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, 2 * self.weight)


OUTSIDE = {
    "transposed": lambda e, x: linear(torch.tanh(e(x)), e.weight.t()),
    "on another input": lambda e, x: e(x) + linear(x.cos(), e.weight),
    "by a penalty": lambda e, x: e(x) * e.weight.square().sum(),
    "never called": lambda e, x: linear(x, nn.functional.normalize(e.weight), e.bias),
}
BY_VALUE = {
    "its norm, detached": lambda e, x: e(x) * e.weight.detach().norm(),
    "its norm, without gradients": lambda e, x: e(x) * torch.no_grad()(lambda: e.weight.norm())(),
    "itself, detached": lambda e, x: e(x) + linear(x.cos(), e.weight.detach()),
}
INSIDE = {
    "called": lambda e, x: e(x),
    "twice": lambda e, x: e(torch.tanh(e(x))),
    "by its type": lambda e, x: e(x.to(e.weight)),
    "times zero": lambda e, x: e(x) + 0 * e.weight.sum(),
    "for nothing": lambda e, x: (linear(e(x), e.weight), e(x))[1],
}


def share_outside_the_span(model: Encoded) -> float:
    """The slow reference: the part of the encoder's gradient outside the span of its calls' inputs."""
    inputs: list[Tensor] = []
    model.e.register_forward_pre_hook(lambda layer, args: inputs.append(args[0].detach()))
    loss = nn.functional.cross_entropy(model(X), Y)
    (g,) = torch.autograd.grad(loss, [model.e.weight])
    seen = torch.cat(inputs) if inputs else torch.zeros(1, 6, dtype=torch.float64)
    left = g - g @ torch.linalg.pinv(seen) @ seen
    return float(left.norm() / g.norm())


@pytest.mark.parametrize("name", OUTSIDE)
def test_weight_used_outside_its_layer_is_rejected_unless_excluded(name: str) -> None:
    model = Encoded(OUTSIDE[name])
    assert find_weights_used_outside(model, projected_weights(model), X) == ["e.weight"]
    with pytest.raises(ModelError, match=r"'e.weight' is used outside .*exclude=\('e.weight',\)"):
        steppe.Learner(model, steppe.GPM()).learn(steppe.Task((X, Y)))
    result = steppe.Learner(model, steppe.GPM(), exclude=("e.weight",)).learn(steppe.Task((X, Y)))
    assert set(result.diagnostics["ranks"]) == {"h.weight"}
    assert share_outside_the_span(model) > 0.01


@pytest.mark.parametrize("name", BY_VALUE)
def test_a_weight_whose_value_is_used_without_a_gradient_is_named(name: str) -> None:
    """Its gradient could be projected, and yet old outputs would change."""
    model = Encoded(BY_VALUE[name])
    with pytest.warns(UserWarning, match=r"without protection: e\.weight$"):
        covered = find_covered_weights(Network(model), X, (), multi_head=False)
    assert set(covered) == {"h.weight"}
    assert share_outside_the_span(model) < 1e-9


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("kind", [nn.Linear, Scaled])
def test_harmless_uses_are_covered(name: str, kind: type[nn.Linear]) -> None:
    model = Encoded(INSIDE[name], kind)
    assert set(find_covered_weights(Network(model), X, (), multi_head=False)) == {"e.weight", "h.weight"}
    assert share_outside_the_span(model) < 1e-9


@pytest.mark.filterwarnings("ignore:these weights belong")
@pytest.mark.parametrize("name", OWN)
def test_usual_models_use_their_weights_in_layers(name: str) -> None:
    model = OWN[name].build()
    x, _ = OWN[name].data(3, 0)
    assert find_weights_used_outside(model.eval(), projected_weights(model), x) == []


def test_layers_that_share_a_weight_and_convolutions() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(torch.tanh(self.a(x)))
            return conv2d(self.c(x), self.c.weight).flatten(1)

    model = Model()
    assert find_weights_used_outside(model, projected_weights(model), torch.randn(2, 2, 3, 3)) == ["c.weight"]


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_not_changed(fails: bool) -> None:
    def use(e: nn.Linear, x: Tensor) -> Tensor:
        e.weight.requires_grad_(False)  # as if the call were interrupted
        raise RuntimeError("broken")

    model = Encoded(use if fails else OUTSIDE["transposed"])
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            find_weights_used_outside(model, projected_weights(model), X)
    else:
        find_weights_used_outside(model, projected_weights(model), X)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def overlaps(one: range | None, other: range | None) -> bool:
    """The slow reference: whether an output belongs to both."""
    return bool(set(range(4) if one is None else one) & set(range(4) if other is None else other))


SHARED = "head, outputs 0 to 1, overlaps task 1's, which is not protected.*omit `head` in all tasks"


@pytest.mark.parametrize(
    "method", [steppe.GPM(), steppe.SGP(), steppe.FSDGPM()], ids=lambda method: type(method).__name__
)
def test_overlapping_heads_give_a_warning_at_the_users_line(method: steppe.MethodConfig) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    learner = steppe.Learner(model, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.learn(steppe.Task((X, Y % 2), head=range(0, 2)))
        learner.learn(steppe.Task((X, Y % 2 + 2), head=range(2, 4)))
    with pytest.warns(UserWarning, match=f"digits: its {SHARED}") as found:
        result = learner.learn(steppe.Task((X, Y % 2), head=range(0, 2), name="digits"))
    assert [warning.filename for warning in found] == [__file__]
    assert set(result.diagnostics["ranks"]) == {"0.weight"}  # the warning is true


@pytest.mark.parametrize("head", [range(start, stop) for start in range(4) for stop in range(start + 1, 5)] + [None])
def test_which_heads_overlap(head: range | None) -> None:
    for earlier in ([range(0, 2)], [range(0, 1), range(2, 3)], [range(1, 2), None], [range(3, 4), range(0, 1)]):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn_shared_head("digits", head, earlier, 4)
        assert len(found) == any(overlaps(head, other) for other in earlier)


def test_no_warning_if_nothing_is_unprotected() -> None:
    """With one head for all, the last layer is covered.

    Without projection, nothing is. Learned together, nothing is forgotten.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method, first, together in (
            (steppe.GPM(), None, False),
            (steppe.ER(), range(0, 2), False),
            (steppe.GPM(), range(0, 2), True),
        ):
            model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
            learner = steppe.Learner(model, method)
            tasks = [steppe.Task((X, Y % 2), head=first), steppe.Task((X, Y % 2), head=range(0, 2))]
            for part in [tasks] if together else tasks:
                learner.learn(part)
