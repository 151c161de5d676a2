"""What a learner is given, and refuses before anything is learnt."""

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
def test_a_prepare_that_works_in_place_is_refused(case: str) -> None:
    """A batch is prepared at every glance and then kept: it would be learnt from and remembered as something else."""
    x, model = X.clone(), nn.Linear(6, 4)
    before = model.weight.detach().clone()
    learner = steppe.Learner(model, steppe.ER(), prepare=IN_PLACE[case])
    with pytest.raises(steppe.UsageError, match="`prepare` changes its input in place"):
        learner.learn(steppe.Task((x, Y), (x, Y)))
    assert torch.equal(x, X)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("prepare", [lambda x: x, lambda x: x.flip(1), lambda x: x.clone().sub_(0.5)])
def test_a_prepare_that_leaves_its_input_alone_serves(prepare: Callable[[Tensor], Tensor]) -> None:
    """As if the samples had been prepared before."""
    weights = []
    for x, own in ((X, prepare), (prepare(X), None)):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        learner = steppe.Learner(model, steppe.ER(buffer=9), prepare=own)
        for _ in range(2):
            learner.learn(steppe.Task((x, Y)), glances=2)
        weights.append(model.weight)
    assert torch.equal(*weights)
