"""Arguments that `Learner` rejects before anything is learned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import steppe

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 4
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: x.sub_(0.5).div_(0.25),
    "a value that was there already": lambda x: x.clamp_(-99, 99),
    "a part of it": lambda x: (x[:, 0].zero_(), x)[1],
    "a copy afterwards": lambda x: x.mul_(2).clone(),
    "behind torch's back": lambda x: torch.from_numpy(np.multiply(x.numpy(), 2, out=x.numpy())),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place_input_transform_is_rejected(case: str) -> None:
    """A batch is prepared once per update and then stored, so an in-place transform would corrupt what is stored."""
    x, model = X.clone(), nn.Linear(6, 4)
    before = model.weight.detach().clone()
    learner = steppe.Learner(model, steppe.ER(), input_transform=IN_PLACE[case])
    with pytest.raises(steppe.UsageError, match="`input_transform` changes its input in place"):
        learner.learn(steppe.Task((x, Y), (x, Y)))
    assert torch.equal(x, X)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("prepare", [lambda x: x, lambda x: x.flip(1), lambda x: x.clone().sub_(0.5)])
def test_pure_input_transform_is_accepted(prepare: Callable[[Tensor], Tensor]) -> None:
    """It gives the same weights as samples transformed beforehand."""
    weights = []
    for x, own in ((X, prepare), (prepare(X), None)):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        learner = steppe.Learner(model, steppe.ER(buffer=9), input_transform=own)
        for _ in range(2):
            learner.learn(steppe.Task((x, Y)), updates_per_batch=2)
        weights.append(model.weight)
    assert torch.equal(*weights)


class TwoTypes(nn.Module):
    """A body in float32 and a head in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(x)).to(self.head.weight.dtype))
        return output.double()


REFUSE_TYPES = [
    steppe.FSDGPM(),
    steppe.FSDGPM(perturbation="importance-only"),
    steppe.FSDGPM(perturbation="look-ahead"),
    steppe.GEM(),
    steppe.AGEM(),
]
TAKE_TYPES = [
    steppe.FSDGPM(importance="ones"),
    steppe.FSDGPM(importance="spectral"),
    steppe.GPM(),
    steppe.AGEM(reference="batch"),
    steppe.ER(),
    steppe.Finetune(),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", REFUSE_TYPES, ids=repr)
def test_mixed_weight_dtypes_are_rejected_before_learning(method: steppe.MethodConfig, dtype: torch.dtype) -> None:
    model = TwoTypes(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    learner = steppe.Learner(model, method)
    for call in (learner.validate, learner.learn):
        with pytest.raises(steppe.ModelError, match=rf"several types.*torch.float32 on cpu.*'head.weight' {dtype}"):
            call(steppe.Task((X, Y)))
    assert learner.num_tasks == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", TAKE_TYPES, ids=repr)
def test_methods_without_that_restriction_accept_mixed_dtypes(method: steppe.MethodConfig, dtype: torch.dtype) -> None:
    learner = steppe.Learner(TwoTypes(dtype), method)
    for _ in range(3):
        learner.learn(steppe.Task((X, Y)))
    assert learner.num_tasks == 3


def test_weight_of_another_dtype_can_be_excluded() -> None:
    learner = steppe.Learner(TwoTypes(torch.bfloat16), steppe.FSDGPM(), exclude=("head",))
    for _ in range(2):
        assert set(learner.learn(steppe.Task((X, Y))).diagnostics["ranks"]) == {"body.weight"}


class Waves(nn.Module):
    """A complex weight behind a real one."""

    def __init__(self, learnt: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=learnt)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.phase).real


def test_trainable_complex_weights_are_rejected() -> None:
    """Frozen ones are accepted."""
    with pytest.raises(steppe.ModelError, match=r"'phase' is torch.complex64, .*view_as_real\), or freeze it"):
        steppe.Learner(Waves(learnt=True), steppe.FSDGPM())
    with pytest.raises(steppe.ModelError, match=r"'weight' is torch.complex64"):
        steppe.Learner(nn.Linear(6, 4, dtype=torch.complex64), steppe.ER())
    steppe.Learner(Waves(learnt=False), steppe.FSDGPM()).learn(steppe.Task((X, Y)))


def test_weights_created_in_inference_mode_are_rejected() -> None:
    with torch.inference_mode():
        model = nn.Linear(6, 4)
    with pytest.raises(steppe.ModelError, match=r"'weight' was created under torch.inference_mode.*outside of it"):
        steppe.Learner(model, steppe.ER())


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), (5, "int"), ([1.0], "float"), ({"x": "a"}, "str")])
def test_input_transform_must_return_a_tensor(given: object, kind: str) -> None:
    learner = steppe.Learner(nn.Linear(6, 4), steppe.ER(), input_transform=lambda x: given)  # type: ignore[arg-type, return-value]
    with pytest.raises(steppe.UsageError, match=f"`input_transform` must return a tensor, .* got {kind}"):
        learner.learn(steppe.Task((X, Y)))
    with pytest.raises(steppe.UsageError, match="`input_transform` must return a tensor"):
        learner.predict(X)


@pytest.mark.parametrize(
    ("augment", "says"),
    [
        (lambda x: None, "returned NoneType for inputs of shape"),
        (lambda x: x[:3], r"returned a tensor of shape \(3, 6\) for inputs of shape \(10, 6\)"),
        (lambda x: x.sum(), r"returned a tensor of shape \(\) for"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_augment_must_return_variants(augment: Callable[[Tensor], Tensor], says: str, together: bool) -> None:
    task = steppe.Task((X, Y), augment=lambda x, generator: augment(x), name="digits")
    learner = steppe.Learner(nn.Linear(6, 4), steppe.Finetune())
    says = says.replace("10", "[0-9]+") if together else says
    with pytest.raises(steppe.DataError, match=f"digits: `augment` {says}"):
        learner.learn([task, task] if together else task)
    assert learner.num_tasks == 0
