"""Models whose forward changes its input learn the same as if the forward began with a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe.network.input_copies import InputCopies

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 4
METHODS = [
    steppe.Finetune(),
    steppe.ER(buffer=50),
    steppe.DERPlusPlus(buffer=50),
    steppe.FSDGPM(buffer=50),
    steppe.FSDGPM(buffer=50, second_order=True),
    steppe.GPM(),
    steppe.LaMAML(),
    steppe.ICaRL(),
    steppe.AGEM(),
    steppe.EWC(),
]


class InPlace(nn.Module):
    """Changes its input in one mode or in both; or a copy instead, with `spare`."""

    def __init__(self, change: Callable[[Tensor], object], modes: tuple[bool, ...], *, spare: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 9), nn.Linear(9, 4)
        self.change, self.modes, self.spare = change, modes, spare

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.spare else x
        if self.training in self.modes:
            self.change(x)
        output: Tensor = self.head(torch.relu(self.body(x)))
        return output


def weights(model: nn.Module, method: steppe.MethodConfig, x: Tensor, **learning: int) -> list[Tensor]:
    """The weights after two tasks and evaluations on both; the inputs must not change."""
    learner = steppe.Learner(model, method)
    tasks = [steppe.Task((x, Y % 2), (x, Y % 2), head=range(2)), steppe.Task((x, Y % 2 + 2), head=range(2, 4))]
    before = x.clone()
    for task in tasks:
        learner.learn(task, **learning)  # type: ignore[arg-type]
    learner.evaluate(tasks[0])
    assert torch.equal(learner.predict(x), learner.predict(before))
    assert torch.equal(x, before)
    return [*model.state_dict().values()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("modes", [(True,), (False,), (True, False)], ids=["train", "eval", "both"])
def test_learns_the_same_as_with_a_copy(method: steppe.MethodConfig, modes: tuple[bool, ...]) -> None:
    found = []
    for spare in (False, True):
        torch.manual_seed(0)
        model = InPlace(lambda x: x.add_(0.5), modes, spare=spare)
        found.append(weights(model, method, X.clone(), updates_per_batch=2))
    assert all(map(torch.equal, *found))


def test_in_place_dropout_does_not_change_stored_samples() -> None:
    learner = steppe.Learner(nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(6, 4)), steppe.ER(buffer=60))
    learner.learn(steppe.Task((X, Y)))
    held = learner.state_dict()["method"]["replay"]["stored"].x
    assert all(bool((sample == X).all(1).any()) for sample in held)


def test_batches_of_a_loader_are_not_changed() -> None:
    x = X.clone()
    batches = [(x[:20], Y[:20]), (x[20:], Y[20:])]

    def whole(parts: list[int]) -> tuple[Tensor, Tensor]:
        return batches[parts[0] // 20]

    loader = DataLoader(range(40), batch_size=20, collate_fn=whole)  # type: ignore[arg-type]
    model = InPlace(torch.Tensor.relu_, (True, False), spare=False)
    steppe.Learner(model, steppe.ER()).learn(steppe.Task(loader, TensorDataset(x, Y)), epochs=2)
    assert torch.equal(x, X)


def test_models_that_do_not_change_their_input_get_no_copies() -> None:
    """Only the first forward in each mode gets a copy."""
    model = nn.Linear(6, 4)
    given: list[int] = []
    model.register_forward_pre_hook(lambda module, args: given.append(args[0].data_ptr()))
    copies = InputCopies(model)
    for _ in range(3):
        copies.call(X)
    assert [place == X.data_ptr() for place in given] == [False, True, True]
    model.eval()
    copies.call(X)
    assert given[-1] != X.data_ptr()


def test_model_that_starts_changing_its_input_is_an_error_then_gets_copies() -> None:
    model = InPlace(lambda x: x.add_(0.5), (), spare=False)
    learner = steppe.Learner(copy.deepcopy(model), steppe.Finetune())
    learner.learn(steppe.Task((X, Y)))
    changed = learner.model
    assert isinstance(changed, InPlace)
    changed.modes = (True,)
    learner.learn(steppe.Task((X, Y)))  # checked again
    changed.modes = ()
    copies = InputCopies(changed)
    copies.call(X.clone())
    changed.modes = (True,)
    with pytest.raises(steppe.ModelError, match=r"in place, but did not in its first forward.*inplace=False"):
        copies.call(X.clone())
    x = X.clone()
    copies.call(x)
    assert torch.equal(x, X)


def test_detected_within_inference_mode_too() -> None:
    model = InPlace(lambda x: x.add_(0.5), (False,), spare=False)
    learner = steppe.Learner(model, steppe.ER())
    learner.learn(steppe.Task((X, Y)))
    with torch.inference_mode():
        x = X.clone()
        learner.predict(x)
        assert torch.equal(x, X)
