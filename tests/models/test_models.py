"""The paper's networks: parameter counts, and forwards against a plain sequence of the same layers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, max_pool2d, relu

from steppe.errors import ModelError
from steppe.models.alexnet import AlexNet
from steppe.models.four_conv import FourConv
from steppe.models.gpm_alexnet import GPMAlexNet
from steppe.models.gpm_lenet import GPMLeNet
from steppe.models.layers.dropout import _scale, _table, dropout, dropout_pool_relu
from steppe.models.layers.response_norm import ResponseNorm
from steppe.models.lenet import LeNet
from steppe.models.mlp import MLP
from steppe.projection.layers import coverable_weights


def mlp_in_a_row() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(784, 100, bias=False), nn.ReLU(), nn.Linear(100, 100, bias=False), nn.ReLU()),
        nn.Linear(100, 10, bias=False),
    )


def alexnet_in_a_row() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 4, bias=False), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, bias=False), nn.BatchNorm2d(128), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 256, 2, bias=False), nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(2048, 2048, bias=False), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2048, 100, bias=False)),
    )


def gpm_alexnet_in_a_row() -> nn.Sequential:
    def norm(channels: int, kind: type[nn.BatchNorm1d] | type[nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.Module:
        return kind(channels, track_running_stats=False)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 4, bias=False), norm(64), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, bias=False), norm(128), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 256, 2, bias=False), norm(256), nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1024, 2048, bias=False), norm(2048, nn.BatchNorm1d), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(2048, 2048, bias=False), norm(2048, nn.BatchNorm1d), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(2048, 100, bias=False),
    )


def lenet_in_a_row() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 20, 5, padding=2, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(20, 50, 5, padding=2, bias=False), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Flatten(), nn.Linear(3200, 800, bias=False), nn.ReLU(), nn.Linear(800, 500, bias=False), nn.ReLU()),
        nn.Linear(500, 100, bias=False),
    )


def gpm_lenet_in_a_row() -> nn.Sequential:
    def respond() -> nn.Module:
        return nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1.0)

    return nn.Sequential(
        *(nn.Conv2d(3, 20, 5, padding=2, bias=False), nn.ReLU(), respond(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(20, 50, 5, padding=2, bias=False), nn.ReLU(), respond(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Flatten(), nn.Linear(3200, 800, bias=False), nn.ReLU(), nn.Linear(800, 500, bias=False), nn.ReLU()),
        nn.Linear(500, 100, bias=False),
    )


def four_conv_in_a_row() -> nn.Sequential:
    convolutions = [nn.Conv2d(channels, 160, 3, 2, 1, bias=False) for channels in (3, 160, 160, 160)]
    return nn.Sequential(
        *(layer for convolution in convolutions for layer in (convolution, nn.ReLU())),
        *(nn.Flatten(), nn.Linear(2560, 640, bias=False), nn.ReLU(), nn.Linear(640, 640, bias=False), nn.ReLU()),
        nn.Linear(640, 200, bias=False),
    )


CASES = [
    (MLP, mlp_in_a_row, 89_400, (784,), 3),
    (AlexNet, alexnet_in_a_row, 6_704_384, (3, 32, 32), 6),
    (GPMAlexNet, gpm_alexnet_in_a_row, 6_713_216, (3, 32, 32), 6),
    (LeNet, lenet_in_a_row, 3_036_640, (3, 32, 32), 5),
    (GPMLeNet, gpm_lenet_in_a_row, 3_036_500, (3, 32, 32), 5),
    (FourConv, four_conv_in_a_row, 2_871_520, (3, 64, 64), 7),
]


@pytest.mark.parametrize(("network", "row", "parameters", "shape", "layers"), CASES, ids=[c[0].__name__ for c in CASES])
def test_parameters(
    network: type[nn.Module], row: object, parameters: int, shape: tuple[int, ...], layers: int
) -> None:
    model = network()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert not any(name.endswith("bias") and "norm" not in name for name, _ in model.named_parameters())
    assert len(coverable_weights(model)) == layers


@pytest.mark.parametrize(("network", "row", "parameters", "shape", "layers"), CASES, ids=[c[0].__name__ for c in CASES])
@pytest.mark.parametrize("training", [True, False])
def test_forward_equals_a_sequence_of_layers(network, row, parameters, shape, layers, training) -> None:  # type: ignore[no-untyped-def]
    """Without dropout, whose masks are drawn differently."""
    model, twin = network().double().train(training), row().double().train(training)
    twin.load_state_dict(dict(zip(twin.state_dict(), model.state_dict().values(), strict=True)))
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if issubclass(network, AlexNet):
        model.dropout_rates = (0.0,) * 5
    x = torch.rand(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x))
    if len(shape) == 3:
        torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), twin(x))


class EarlyLeNet(LeNet):
    """ReLU before pooling, as in the paper."""

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.norm1(self.conv1(x))), 3, stride=2, padding=1)
        x = max_pool2d(relu(self.norm2(self.conv2(x))), 3, stride=2, padding=1)
        output: Tensor = self.head(relu(self.hidden2(relu(self.hidden1(x.flatten(1))))))
        return output


class EarlyAlexNet(AlexNet):
    """ReLU before pooling, as in the paper; dropout and pooling separately."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.dropout_rates
        x = max_pool2d(dropout(relu(self.conv1(x)), shares[0], self.training), 2)
        x = max_pool2d(dropout(relu(self.norm2(self.conv2(x))), shares[1], self.training), 2)
        x = max_pool2d(dropout(relu(self.conv3(x)), shares[2], self.training), 2)
        x = dropout(relu(self.hidden1(x.flatten(1))), shares[3], self.training)
        output: Tensor = self.head(dropout(relu(self.hidden2(x)), shares[4], self.training))
        return output


@pytest.mark.parametrize(("network", "early"), [(LeNet, EarlyLeNet), (AlexNet, EarlyAlexNet)], ids=["le", "alex"])
def test_relu_after_pooling_has_the_same_bits(network: type[nn.Module], early: type[nn.Module]) -> None:
    model, twin = network(), early()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last)
    found = []
    for one in (model, twin):
        torch.manual_seed(0)  # dropout
        loss = cross_entropy(one(x), torch.arange(8))
        found.append([loss, *torch.autograd.grad(loss, list(one.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_initialization() -> None:
    """torch's own, U(±1/√fan-in), except for N(0, 2/fan-in) in the network of four convolutions and U(±√(6/fan-in)) in
    the LeNet of GPM's code."""
    weight = AlexNet().conv2.weight
    assert float(weight.detach().abs().max()) <= 1 / math.sqrt(576)
    assert float(weight.detach().std()) == pytest.approx(1 / math.sqrt(3 * 576), rel=0.02)
    for weight in (FourConv().conv2.weight, FourConv().hidden1.weight):
        assert float(weight.detach().std()) == pytest.approx(math.sqrt(2 / weight[0].numel()), rel=0.02)
        assert float(weight.detach().abs().max()) > 3 * math.sqrt(2 / weight[0].numel())

    for weight in GPMLeNet().parameters():
        bound = math.sqrt(6 / weight[0].numel())
        assert 0.99 * bound < float(weight.detach().abs().max()) <= bound


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("channels", [1, 4, 7])
def test_response_norm_equals_torchs(channels: int, size: int) -> None:
    x = 3 * torch.randn(2, channels, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = ResponseNorm(channels, size, 0.3, 0.6, 1.5).double()
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.testing.assert_close(
            own(x.to(memory_format=layout)), nn.LocalResponseNorm(size, 0.3, 0.6, 1.5)(x), rtol=1e-7, atol=0
        )
    assert own.state_dict() == {}


def test_response_norm_in_mixed_precision() -> None:
    x = torch.randn(2, 20, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    own, exact = ResponseNorm(20, 4, 0.001 / 9, 0.75, 1.0), nn.LocalResponseNorm(4, 0.001 / 9, 0.75, 1.0)(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(own(x), exact)
    assert not torch.equal(exact, x.float())


@pytest.mark.parametrize("size", [19, 23, 31, 32, 33, 64])
@pytest.mark.parametrize("network", [AlexNet, GPMAlexNet, LeNet, GPMLeNet, FourConv])
def test_any_image_size_is_accepted(network: type[nn.Module], size: int) -> None:
    assert network(7, size)(torch.rand(2, 3, size, size)).shape == (2, 7)


def test_alexnet_rejects_images_too_small_for_its_pooling() -> None:
    with pytest.raises(ModelError, match=r"size = 18.*too small"):
        AlexNet(10, 18)


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dropout_drops_its_share_and_scales_the_rest(share: float, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.ones(16, 8, 31, 33).to(memory_format=layout).requires_grad_()
    y = dropout(x, share, training=True)
    kept = y > 0
    deviation = math.sqrt(share * (1 - share) / x.numel())
    assert abs(float((~kept).double().mean()) - share) < 4 * deviation
    assert torch.allclose(y[kept], torch.tensor(1 / (1 - share)), rtol=1e-4)
    for axis in range(4):  # no stripes: the share is even along every axis
        along = (~kept).double().mean([other for other in range(4) if other != axis])
        spread = math.sqrt(share * (1 - share) / (x.numel() / x.shape[axis]))
        assert float((along - share).abs().max()) < 5 * spread
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())


@pytest.mark.parametrize("share", [1e-5, 0.01, 0.1, 0.2, 1 / 3, 0.5, 0.7, 0.9, 0.99999])
def test_outcomes_of_four_elements_have_independent_probabilities(share: float) -> None:
    """Over all values of sixteen bits, instead of random draws."""
    ways = _table(share).view(torch.uint8).view(-1, 4).double()  # 1: kept
    assert len(ways) == 2**16
    for kept in itertools.product((0.0, 1.0), repeat=4):
        found = float((ways == torch.tensor(kept, dtype=torch.float64)).all(1).double().mean())
        assert abs(found - math.prod(1 - share if one else share for one in kept)) < 2**-13
    for place in range(4):
        assert abs(1 - float(ways[:, place].mean()) - share) <= 2**-14
        assert float(ways[:, place].mean()) * _scale(share) == pytest.approx(1)


@pytest.mark.usefixtures("fast_paths_on")
def test_every_draw_decides_different_elements() -> None:
    """Of eleven elements, none is decided twice: four draws of sixteen bits, from one number of the generator."""
    torch.manual_seed(5)
    draw = int(torch.empty(1, dtype=torch.int64).random_(-(2**63), None))
    expected = [
        kept
        for place in range(4)
        for kept in _table(0.2)[draw >> 16 * place & 0xFFFF].view(1).view(torch.uint8).tolist()
    ]
    torch.manual_seed(5)
    assert (dropout(torch.ones(11), 0.2, training=True) > 0).tolist() == [bool(kept) for kept in expected[:11]]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_second_derivative_of_dropout_pool_relu(layout: torch.memory_format) -> None:
    """As second-order methods and curvature need; against finite differences, with the same mask in every call."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=chance).to(memory_format=layout).requires_grad_()

    def drawn_alike(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return dropout_pool_relu(x, 0.5, training=True)

    assert bool((drawn_alike(x) > 0).any())
    assert gradcheck(drawn_alike, (x,))
    assert gradgradcheck(drawn_alike, (x,))
    # Piecewise linear functions have no second derivative of their own; it comes from the functions after them.
    assert gradgradcheck(lambda x: drawn_alike(x).pow(3), (x,))


def test_dropout_uses_the_global_generator_and_is_off_in_eval_mode() -> None:
    x = torch.rand(5, 7)
    torch.manual_seed(3)
    one = dropout(x, 0.5, training=True)
    other = dropout(x, 0.5, training=True)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5, training=True), one)
    assert not torch.equal(one, other)
    assert dropout(x, 0.5, training=False) is x
    for share in (0.0, 1e-6, 0.999999, 1.0):  # too close to 0 or 1 for sixteen bits
        assert int((dropout(x, share, training=True) != 0).sum()) == (x.numel() if share < 0.5 else 0)
    assert dropout(x.T, 0.5, training=True).shape == (7, 5)  # not densely laid out: torch's own
