"""BatchNorm on several pixels at a time against torch's own, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from steppe import FSDGPM, Learner, Task
from steppe.models.layers import batch_norm as folded_norm
from steppe.models.layers.batch_norm import FoldedBatchNorm2d
from steppe.models.lenet import LeNet

pytestmark = pytest.mark.usefixtures("fast_paths_on")

# channels, images, height and width, and the fold: as many pixels as divide the image, up to 256 channels
CASES = [
    (20, (4, 8, 8), 8),
    (50, (3, 6, 6), 4),
    (3, (2, 5, 4), 8),
    (1, (8, 4, 4), 128),
    (20, (3, 2, 3), 2),
    (128, (2, 2, 2), 2),
    (20, (5, 3, 3), 1),
    (129, (2, 2, 2), 1),
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    found = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(found)


def pair(channels: int, momentum: float | None = 0.1) -> tuple[FoldedBatchNorm2d, nn.BatchNorm2d]:
    generator = torch.Generator().manual_seed(1)
    own, twin = (kind(channels, momentum=momentum).double() for kind in (FoldedBatchNorm2d, nn.BatchNorm2d))
    with torch.no_grad():
        own.weight.copy_(torch.randn(channels, generator=generator))
        own.bias.copy_(torch.randn(channels, generator=generator))
    twin.load_state_dict(own.state_dict())
    return own, twin  # type: ignore[return-value]


def images(channels: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    count, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, channels, height, width, dtype=torch.float64, generator=generator)
    means = torch.randn(channels, 1, 1, dtype=torch.float64, generator=generator)
    return (3 * x + 5 * means).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("channels", "shape", "fold"), CASES)
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_outputs_gradients_and_statistics_equal_torchs(
    channels: int, shape: tuple[int, int, int], fold: int, momentum: float | None
) -> None:
    own, twin = pair(channels, momentum)
    for step in range(3):
        x, given = images(channels, shape, step), images(channels, shape, 10 + step).contiguous()
        assert folded_norm._fold(x, own.weight) == fold
        found = []
        for norm in (own, twin):
            start = x.clone().requires_grad_()
            output = norm(start)
            assert output.is_contiguous(memory_format=torch.channels_last)
            found.append([output, *torch.autograd.grad(output, [start, norm.weight, norm.bias], given)])
        torch.testing.assert_close(found[0], found[1])
        torch.testing.assert_close(own.state_dict(), twin.state_dict())
    torch.testing.assert_close(own.eval()(x), twin.eval()(x))


def test_second_derivative() -> None:
    """Through mean and variance, which also depend on the images."""
    own, _ = pair(3)
    x = images(3, (2, 2, 2)).requires_grad_()
    assert folded_norm._fold(x, own.weight) > 1

    def normalised(*of: Tensor) -> Tensor:
        output: Tensor = folded_norm._BatchNorm.apply(*of, own.eps, 4)[0]  # type: ignore[no-untyped-call]
        return output

    assert torch.autograd.gradcheck(normalised, (x, own.weight, own.bias))
    assert torch.autograd.gradgradcheck(normalised, (x, own.weight, own.bias))


@pytest.mark.parametrize("frozen", [{"weight", "bias"}, {"weight"}, {"bias"}, {"x"}, {"x", "weight"}], ids=sorted)
@pytest.mark.parametrize("twice", [False, True])
def test_frozen_parameters_have_no_gradient(frozen: set[str], twice: bool) -> None:
    """First-order gradients, and those of their squares, which differentiate through the gradients."""
    found: list[list[Tensor]] = []
    for norm in pair(20):
        given = images(20, (4, 8, 8), 1).requires_grad_()
        parts = {"x": images(20, (4, 8, 8)), "weight": norm.weight, "bias": norm.bias}
        wanted = [part.requires_grad_(name not in frozen) for name, part in parts.items()]
        wanted = [part for part in wanted if part.requires_grad]
        gradients = torch.autograd.grad(norm(parts["x"]), wanted, given, create_graph=twice)
        found.append(list(gradients))
        if twice:
            length = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            found[-1] += torch.autograd.grad(length, [*wanted, given], materialize_grads=True)
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("frozen", ["norm1", "conv1"])
def test_a_frozen_part_of_lenet_stays_frozen_in_second_order(frozen: str) -> None:
    model = LeNet(10, 16)
    part = model.get_submodule(frozen).requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    x = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=torch.channels_last)
    Learner(model, FSDGPM(second_order=True, buffer=20, basis_samples=20)).learn(Task((x, torch.arange(24) % 10)))
    for name, p in model.named_parameters():
        assert bool(p.isfinite().all())
        assert torch.equal(p, before[name]) == (id(p) in map(id, part.parameters()))


def test_variance_is_accurate_for_a_large_mean() -> None:
    """The mean of the squares minus the squared mean would lose it."""
    x = (images(4, (8, 16, 16)) + 1e3).float()
    own, twin = (norm.float() for norm in pair(4))
    torch.testing.assert_close(own(x), twin(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("why", ["layout", "one thread", "type", "no statistics", "not affine", "statistics used"])
def test_otherwise_equals_torch_bit_for_bit(why: str) -> None:
    own, twin = pair(20)
    x = images(20, (4, 8, 8))
    if why == "layout":
        x = x.contiguous()
    elif why == "one thread":
        torch.set_num_threads(1)
    elif why == "type":
        x, own, twin = x.bfloat16(), own.float(), twin.float()
    elif why == "no statistics":
        own, twin = (kind(20, track_running_stats=False).double() for kind in (FoldedBatchNorm2d, nn.BatchNorm2d))  # type: ignore[assignment]
    elif why == "not affine":
        own, twin = (kind(20, affine=False).double() for kind in (FoldedBatchNorm2d, nn.BatchNorm2d))  # type: ignore[assignment]
    else:
        own, twin = own.eval(), twin.eval()
    for _ in range(2):
        assert torch.equal(own(x), twin(x))
    assert all(torch.equal(a, b) for a, b in zip(own.state_dict().values(), twin.state_dict().values(), strict=True))


def test_lenet_learns_the_same_with_either() -> None:
    model = LeNet()
    twin = copy.deepcopy(model)
    twin.norm1, twin.norm2 = nn.BatchNorm2d(20), nn.BatchNorm2d(50)
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    found = [
        torch.autograd.grad(one.double()(x.to(memory_format=torch.channels_last)).square().sum(), [*one.parameters()])
        for one in (model, twin)
    ]
    torch.testing.assert_close(found[0], found[1])
