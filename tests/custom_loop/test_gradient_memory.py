"""The gradient projection memory on its own: batches and models as users have them."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import steppe


class TokenModel(nn.Module):
    """Takes what a tokenizer returns, and a mask that matters; returns an object, as Hugging Face models do."""

    class Output(NamedTuple):
        logits: Tensor
        loss: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.places = nn.Parameter(torch.randn(5, 8))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        mask = attention_mask.unsqueeze(-1).to(self.embedding.weight.dtype)
        x = torch.relu(self.mix(self.embedding(input_ids) + self.places)) * mask
        return self.Output(self.head(x.sum(1) / mask.sum(1)), None)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def bases(memory: steppe.GradientProjectionMemory) -> dict[str, Tensor]:
    """The projectors as dense matrices."""
    dense = {}
    for name, p in memory.projectors.items():
        projected = p.project_onto(torch.eye(p.max_rank, dtype=p.importance.dtype))
        assert isinstance(projected, Tensor)
        dense[name] = projected
    return dense


def same_bases(one: steppe.GradientProjectionMemory, other: steppe.GradientProjectionMemory) -> bool:
    left, right = bases(one), bases(other)
    return left.keys() == right.keys() and all(torch.allclose(left[n], right[n], rtol=0, atol=1e-10) for n in left)


def tokens(count: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(20, (count, 5)),
        "attention_mask": (torch.arange(5) <= torch.randint(5, (count, 1))).long(),
    }


class Loader:
    """An iterable that can be passed through again and again, but has no length."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((part, part.sum(1)) for part in self.x.split(4))


def test_batches_of_many_kinds() -> None:
    x = torch.randn(12, 10, dtype=torch.float64)
    y = torch.zeros(12)
    kinds: list[Any] = [
        x,
        [x],
        list(x.split(5)),
        (x, y),
        [[x, y]],
        Loader(x),
        iter(Loader(x)),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5),
        [(((x,), y))],
    ]
    expected = steppe.GradientProjectionMemory(small(), threshold=0.8)
    expected.update([x])
    for kind in kinds:
        memory = steppe.GradientProjectionMemory(small(), threshold=0.8)
        memory.update(kind)
        assert same_bases(memory, expected)
    memory = steppe.GradientProjectionMemory(small(), threshold=0.8)
    memory.update([{"picture": x}], forward=lambda model, batch: model(batch["picture"]))
    assert same_bases(memory, expected)


@pytest.mark.filterwarnings("ignore:these weights are not protected")
def test_dictionaries_are_keywords_without_labels() -> None:
    torch.manual_seed(0)
    model = TokenModel().double()
    x = tokens(9)
    expected = steppe.GradientProjectionMemory(model, threshold=0.9)
    expected.update([x], forward=lambda model, batch: model(batch["input_ids"], batch["attention_mask"]))
    for batch in ({**x, "labels": torch.zeros(9)}, UserDict(x), (x, torch.zeros(9)), (tuple(x.values()), 0)):
        memory = steppe.GradientProjectionMemory(model, threshold=0.9)
        memory.update([batch])
        assert same_bases(memory, expected)
    memory = steppe.GradientProjectionMemory(model, threshold=0.9)
    memory.update({**x, "labels": torch.zeros(9)})
    assert same_bases(memory, expected)


def test_a_model_that_is_called_in_another_way() -> None:
    memory = steppe.GradientProjectionMemory(small())
    with pytest.raises(TypeError) as caught:
        memory.update({"picture": torch.randn(4, 10, dtype=torch.float64)})
    assert "called the model with the keywords picture; if it is called in another way, pass forward=" in str(
        caught.value.__notes__
    )


def test_it_extends_and_rebuilds() -> None:
    model, parts = small(), torch.randn(3, 4, 10, dtype=torch.float64)
    extended = steppe.GradientProjectionMemory(model, threshold=1.0)
    for part in parts[:2]:
        extended.update(part)
    assert extended.num_updates == 2
    assert extended.ranks()["0.weight"] == {"rank": 8, "of": 10}
    for part in parts[:2]:  # all that was seen is held
        assert float((part @ bases(extended)["0.weight"] - part).norm()) < 1e-12
    extended.update(parts[2], rebuild=True)
    assert extended.ranks()["0.weight"]["rank"] == 4
    whole = steppe.GradientProjectionMemory(model, threshold=1.0)
    whole.update(parts[2])
    assert same_bases(extended, whole)


def test_a_basis_holds_at_least_the_share_of_its_threshold() -> None:
    x = torch.randn(100, 10, dtype=torch.float64) * torch.tensor([10.0] + [1.0] * 9)
    memory = steppe.GradientProjectionMemory(small(), threshold=0.5)
    memory.update(x)
    inside = x @ bases(memory)["0.weight"]
    assert float(inside.square().sum() / x.square().sum()) >= 0.5
    assert memory.ranks()["0.weight"]["rank"] == 1
    shares = {"0.weight": 0.99, "2.weight": 0.5}
    for own in (
        steppe.GradientProjectionMemory(small(), threshold=shares),
        steppe.GradientProjectionMemory(small(), threshold=0.1),
    ):
        own.update(x, threshold=shares)
        assert float((x @ bases(own)["0.weight"]).square().sum() / x.square().sum()) >= 0.99


@pytest.mark.filterwarnings("ignore:the basis of")
@pytest.mark.parametrize("limit", [1, 4, 6, 8, 50])
def test_max_samples(limit: int) -> None:
    x = torch.randn(12, 10, dtype=torch.float64)
    seen: list[int] = []

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        seen.append(len(batch[0]))
        assert len(batch[1]) == len(batch[0])
        model(batch[0])

    memory = steppe.GradientProjectionMemory(small(), threshold=1.0)
    memory.update(Loader(x), forward, max_samples=limit)
    expected = steppe.GradientProjectionMemory(small(), threshold=1.0)
    expected.update(x[:limit])
    assert same_bases(memory, expected)
    assert max(seen) <= min(4, limit)


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(8, 2))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(6, 10, requires_grad=True)
    before, random = x.detach().clone(), torch.get_rng_state()
    memory = steppe.GradientProjectionMemory(model)
    memory.update([x])
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_under_autocast_inference_mode_and_in_half_precision() -> None:
    x = torch.randn(6, 10)
    for dtype in (torch.float32, torch.bfloat16):
        model = small().to(dtype)
        memory = steppe.GradientProjectionMemory(model, threshold=1.0)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            memory.update(x.to(dtype))
        held = bases(memory)["0.weight"]
        assert held.dtype == torch.float32
        assert float((x @ held - x).norm() / x.norm()) < 0.02
        optimizer = memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        model(x.to(dtype)).sum().backward()
        optimizer.step()  # the bases are no inference tensors


def test_only_trainable_weights_are_covered() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    model[0].requires_grad_(False)
    memory = steppe.GradientProjectionMemory(model)
    memory.update(torch.randn(4, 10, dtype=torch.float64))
    assert list(memory.ranks()) == ["2.weight"]
    assert memory.uncovered() == ["2.bias"]
    model[0].requires_grad_(True)  # unfrozen later: covered from the next task on
    memory.update(torch.randn(4, 10, dtype=torch.float64))
    assert list(memory.ranks()) == ["2.weight", "0.weight"]
    optimizer = memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    old = model[0](torch.zeros(1, 10, dtype=torch.float64))
    assert old.requires_grad
    assert optimizer.memory is memory


def test_uncovered_weights_are_named() -> None:
    with pytest.warns(UserWarning, match=r"these weights are not protected: places\. .* exclude=.*freeze") as caught:
        memory = steppe.GradientProjectionMemory(TokenModel())
    assert caught[0].filename == __file__
    assert memory.uncovered() == ["places", "mix.bias", "head.bias"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steppe.GradientProjectionMemory(TokenModel(), freeze_uncovered=True)
        steppe.GradientProjectionMemory(small())
        excluding = steppe.GradientProjectionMemory(TokenModel(), exclude=["places", "head"], freeze_uncovered=True)
    assert excluding.uncovered() == ["places", "mix.bias", "head.weight", "head.bias"]
    assert excluding.frozen() == []
    excluding.update(tokens(4))
    assert excluding.frozen() == ["mix.bias"]


def test_a_layer_that_uses_its_weight_otherwise_is_named() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return linear(torch.sin(3 * x), self.weight, self.bias)

    model = nn.Sequential(Scaled(10, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    memory = steppe.GradientProjectionMemory(model)
    with pytest.warns(UserWarning, match=r"these weights .* learned without protection: 0\.weight"):
        memory.update(torch.randn(4, 10, dtype=torch.float64))
    assert "0.weight" in memory.uncovered()
    assert list(memory.ranks()) == ["2.weight"]


def test_a_head_that_grows_keeps_its_basis() -> None:
    model = small()
    memory = steppe.GradientProjectionMemory(model, threshold=1.0, freeze_uncovered=True)
    old = torch.randn(4, 10, dtype=torch.float64)
    memory.update(old)
    with torch.no_grad():
        before, head = model(old), model[2]
        model[2] = nn.Linear(12, 5).double()
        model[2].weight[:3], model[2].bias[:3] = head.weight, head.bias
    optimizer = memory.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 10, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert float((model(old)[:, :3] - before).abs().max()) < 1e-12
    memory.update(torch.randn(4, 10, dtype=torch.float64))
    assert memory.ranks()["2.weight"]["rank"] == 8


def test_a_weight_used_outside_its_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            return 1e4 * self.layer(x).relu() @ self.layer.weight

    with pytest.raises(steppe.ModelError, match=r"'layer\.weight' is used outside its layer.*exclude=\('layer\.weight"):
        steppe.GradientProjectionMemory(Tied()).update(torch.randn(4, 10))


def test_a_saturated_weight_is_a_warning() -> None:
    memory = steppe.GradientProjectionMemory(small(), threshold=1.0)
    with pytest.warns(UserWarning, match=r"'0\.weight' holds all 10 directions .* lower the threshold") as caught:
        memory.update(torch.randn(11, 10, dtype=torch.float64))
    assert caught[0].filename == __file__
    assert memory.saturated() == {"0.weight"} | ({"2.weight"} & memory.saturated())


def test_a_failed_update_changes_nothing() -> None:
    memory = steppe.GradientProjectionMemory(small(), threshold=0.9)
    x = torch.randn(4, 10, dtype=torch.float64)
    memory.update(x)
    before, ranks = bases(memory), memory.ranks()
    memory.model.train()
    for batches, error, message in (
        ([], steppe.DataError, "`batches` is empty"),
        ([x, torch.full_like(x, float("nan"))], steppe.DivergedError, "not finite"),
        ([x, x[:, :3]], RuntimeError, "size"),
        (3, steppe.UsageError, "expected batches, got int"),
    ):
        with pytest.raises(error, match=message):
            memory.update(batches)
        assert memory.ranks() == ranks
        assert all(torch.equal(basis, before[name]) for name, basis in bases(memory).items())
        assert memory.num_updates == 1
        assert all(module.training for module in memory.model.modules())


def test_states() -> None:
    memory = steppe.GradientProjectionMemory(small(), threshold=0.9, importance="spectral")
    memory.update(torch.randn(4, 10, dtype=torch.float64))
    state = memory.state_dict()
    other = steppe.GradientProjectionMemory(small().float(), threshold=0.9, importance="spectral")
    other.load_state_dict(state)
    assert other.ranks() == memory.ranks()
    assert other.num_updates == 1
    assert {p.basis.dtype for p in other.projectors.values()} == {torch.float32}
    assert memory.memory_bytes() == {
        kind: sum(getattr(p, name).nbytes for p in memory.projectors.values())
        for kind, name in (("bases", "basis"), ("importances", "importance"))
    }
    for wrong in (None, {}, {"updates": 1, "bases": {"5.weight": state["bases"]["0.weight"]}}, {**state, "bases": 3}):
        with pytest.raises(steppe.UsageError, match="this is not a state of a memory of this model"):
            other.load_state_dict(wrong)
    narrow = steppe.GradientProjectionMemory(nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3)))
    with pytest.raises(steppe.UsageError, match=r"'0\.weight' does not fit"):
        narrow.load_state_dict(state)
    assert other.ranks() == memory.ranks()


def test_a_copy_goes_on_by_itself() -> None:
    memory = steppe.GradientProjectionMemory(small(), threshold=0.9)
    memory.update(torch.randn(4, 10, dtype=torch.float64))
    ranks = memory.ranks()
    twin = copy.deepcopy(memory)
    twin.update(torch.randn(4, 10, dtype=torch.float64))
    assert twin.model is not memory.model
    assert memory.ranks() == ranks != twin.ranks()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrapped_models(wrap: Any) -> None:
    model = small()
    x = torch.randn(4, 10, dtype=torch.float64)
    memory = steppe.GradientProjectionMemory(wrap(model), threshold=0.9)
    assert memory.model is model
    memory.update(x)
    expected = steppe.GradientProjectionMemory(model, threshold=0.9)
    expected.update(x)
    assert same_bases(memory, expected)
    memory.wrap(torch.optim.SGD(wrap(model).parameters(), lr=0.1))


def test_wrong_arguments() -> None:
    model = small()
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"threshold": 1.5}, "threshold = 1.5 is out of range; it must be above 0 and at most 1"),
        ({"threshold": {"0.weight": 0.5}}, r"must name every covered weight, 0\.weight, 2\.weight"),
        ({"importance": "one"}, "unknown importance 'one'"),
        ({"importance": 3}, "must be a name or an importance rule, got 3"),
        ({"exclude": "head"}, "exclude must be a list of names"),
        ({"exclude": ["head"]}, "exclude names 'head', which is not a layer or weight"),
    ]
    for settings, message in arguments:
        with pytest.raises(steppe.UsageError, match=message):
            steppe.GradientProjectionMemory(model, **settings)
    with pytest.raises(steppe.UsageError, match=r"model must be a torch\.nn\.Module, got list"):
        steppe.GradientProjectionMemory([model])  # type: ignore[arg-type]
    with pytest.raises(steppe.ModelError, match="no layer that a gradient memory can cover"):
        steppe.GradientProjectionMemory(nn.BatchNorm1d(3))
    memory = steppe.GradientProjectionMemory(model)
    with pytest.raises(steppe.UsageError, match="max_samples = 0 is invalid"):
        memory.update(torch.zeros(3, 10), max_samples=0)
    with pytest.raises(steppe.UsageError, match="forward must be a function"):
        memory.update(torch.zeros(3, 10), 3)  # type: ignore[arg-type]
    with pytest.raises(steppe.DataError, match="max_samples needs batches of tensors"):
        memory.update(["text"], max_samples=2)
