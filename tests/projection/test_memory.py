"""The gradient memory of a network: recording inputs, UpdateGPM, and what passes through unchanged."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from reference import leading_directions, no_hooks, soften, widest_angle, windows
from torch import Tensor, nn

import steppe
from steppe.errors import ModelError
from steppe.fast.factored import FactoredGrad
from steppe.network.network import Network
from steppe.projection.hooks import capture_inputs, find_head_weight
from steppe.projection.importance import ImportanceRule, Ones, Sigmoid, Spectral
from steppe.projection.layers import projected_weights
from steppe.projection.memory import GradientMemory


class Net(nn.Module):
    """A convolution, a hidden layer with BatchNorm and dropout that is used twice, an unused layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1)
        x = torch.relu(self.hidden(x))
        return self.head(self.hidden(input=x))


def pictures(n: int) -> Tensor:
    return torch.randn(n, 2, 3, 3, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [64, 3])
def test_rebuild_equals_svds_of_the_layers_inputs(chunk: int) -> None:
    """In eval mode (no dropout, running statistics unchanged).

    A reused layer contributes the inputs of both calls, keyword arguments too; a layer that the forward does not use
    stays unprotected. Modes are restored and hooks removed.
    """
    model, x = Net(), pictures(7)
    model.norm.eval()
    memory = GradientMemory(Ones(), projected_weights(model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    memory.rebuild(Network(model), x, 0.9, chunk)
    assert no_hooks(model)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        flat = torch.relu(model.norm(model.conv(x))).flatten(1)
        once = torch.relu(model.hidden(flat))
        inputs = {
            "conv.weight": windows(model.conv, x),
            "hidden.weight": torch.cat((flat, once))[None],
            "head.weight": model.hidden(once)[None],
        }
    assert set(memory.projectors) == set(inputs)
    for name, columns in inputs.items():
        projector = memory.projectors[name]
        for vectors, group in zip(projector.basis, columns, strict=True):
            expected, _ = leading_directions(group.T, 0.9)
            assert widest_angle(vectors[:, vectors.any(0)], expected) < 1e-7
        assert torch.equal(projector.importance, torch.ones_like(projector.importance))


def test_rebuild_replaces_the_old_bases_and_restarts_the_importances() -> None:
    model = nn.Linear(6, 2, dtype=torch.float64)
    network = Network(model)
    memory = GradientMemory(Spectral(2.0), projected_weights(model))
    old, new = torch.eye(6, dtype=torch.float64)[:2], torch.eye(6, dtype=torch.float64)[3:4]
    memory.rebuild(network, old, 0.99)
    soften(memory, torch.Generator().manual_seed(0))
    memory.rebuild(network, new, 0.99)
    projector = memory.projectors["weight"]
    assert widest_angle(projector.basis[0], new.T) < 1e-12
    assert projector.importance.tolist() == [[1.0]]
    assert memory.memory_bytes() == {"bases": 8 * 6, "importances": 8}


@pytest.mark.parametrize("rule", [Ones(), Sigmoid(0.01)])
def test_layer_with_all_zero_inputs_has_no_projector(rule: ImportanceRule) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    memory = GradientMemory(rule, projected_weights(model))
    memory.rebuild(Network(model), torch.zeros(5, 3, dtype=torch.float64), 0.99)
    assert not memory


def test_bases_have_the_weights_dtype() -> None:
    model = nn.Linear(6, 2)
    memory = GradientMemory(Ones(), projected_weights(model))
    memory.rebuild(Network(model), torch.randint(0, 255, (9, 6), dtype=torch.uint8), 0.99)
    projector = memory.projectors["weight"]
    assert projector.basis.dtype == projector.importance.dtype == torch.float32
    assert projector.basis.is_contiguous()


def test_gradients_without_a_projector_are_unchanged() -> None:
    """Biases, layers without a rule, and everything in the first task; factored gradients too."""
    model = Net()
    memory = GradientMemory(Ones(), projected_weights(model))
    gradient: dict[str, Tensor | FactoredGrad] = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    factors = FactoredGrad(torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64))
    gradient["head.weight"] = factors
    for part in (memory.project_onto(gradient), memory.project_out(gradient)):
        assert all(part[name] is g for name, g in gradient.items())
    memory.rebuild(Network(model), pictures(3), 0.9)
    for part in (memory.project_onto(gradient), memory.project_out(gradient)):
        unchanged = {name for name, g in gradient.items() if part[name] is g}
        assert unchanged == set(gradient) - {"conv.weight", "hidden.weight", "head.weight"}


def test_hooks_are_removed_after_an_error() -> None:
    model = Net()
    with pytest.raises(RuntimeError), capture_inputs(projected_weights(model), lambda weight, layer, x: None):
        model(torch.zeros(1, 5, 5, 5, dtype=torch.float64))
    assert no_hooks(model)


class Scaled(Net):
    """An operation that is not a layer scales the head's output."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


class Summed(Net):
    """No single layer computes the output, which is narrower than the last layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :2]


@pytest.mark.parametrize(("kind", "head"), [(Net, "head.weight"), (Scaled, "head.weight"), (Summed, None)])
def test_head_is_detected_by_a_forward(kind: type[Net], head: str | None) -> None:
    model = kind().eval()
    assert find_head_weight(model, projected_weights(model), pictures(2)) == head
    assert no_hooks(model)


class TwoTypes(nn.Module):
    """A float32 layer and a float64 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x).double())
        return output


def test_mixed_weight_dtypes_have_separate_importances() -> None:
    network = Network(TwoTypes())
    for rule in (Ones(), Sigmoid(0.01)):
        with nullcontext() if rule.dynamic is False else pytest.raises(ModelError, match="several types"):
            memory = GradientMemory(rule, projected_weights(network.model))
            memory.rebuild(network, torch.randn(8, 6), 0.9)
            assert {p.importance.dtype for p in memory.projectors.values()} == {torch.float32, torch.float64}


class Third(Spectral):
    """λ = 1/3 for every column, padding included."""

    def initial(self, singular_values: Tensor) -> Tensor:
        return torch.full_like(singular_values, 1 / 3)


def test_new_direction_does_not_inherit_the_importance_of_padding() -> None:
    """Groups may have different numbers of directions; λ accumulates only for existing ones."""
    network = Network(nn.Conv1d(6, 2, 1, groups=2, bias=False).double())
    memory = GradientMemory(Third(1.0), projected_weights(network.model))
    for first, energies in ((True, [8, 8, 1, 9, 1, 0]), (False, [8, 8, 0, 8, 8, 0])):  # two and one, then two and two
        x = torch.diag(torch.tensor(energies, dtype=torch.float64)).sqrt().unsqueeze(2)
        memory.extend(network, x, dict.fromkeys(memory.covered, 0.95), first=first)
        assert memory.ranks()["weight"]["rank"] == (3 if first else 4)
    found = memory.projectors["weight"]
    for group, held in enumerate(({0: 2 / 3, 1: 2 / 3}, {0: 2 / 3, 1: 1 / 3})):
        matrix = found.basis[group] @ torch.diag(found.importance[group]) @ found.basis[group].T
        expected = torch.diag(torch.tensor([held.get(place, 0.0) for place in range(3)], dtype=torch.float64))
        torch.testing.assert_close(matrix, expected)


def faint(task: int) -> steppe.Task:
    """Two strong directions, and noise in all others with a hundred-thousandth of the energy."""
    generator = torch.Generator().manual_seed(task)
    y = torch.arange(80) % 2
    return steppe.Task((nn.functional.one_hot(y, 6) + 2e-3 * torch.randn(80, 6, generator=generator), y))


@pytest.mark.parametrize("kind", [steppe.FSDGPM, steppe.GPM])
def test_thresholds_near_1_fill_the_bases_and_give_a_remark(
    kind: type[steppe.FSDGPM] | type[steppe.GPM],
) -> None:
    named = "threshold" if kind is steppe.FSDGPM else "thresholds"
    for step, rank in ((0.005, 6), (0.0, 2)):
        learner = steppe.Learner(nn.Linear(6, 2), kind.from_mapping({named: "0.99", "threshold_step": str(step)}))
        with pytest.warns(UserWarning, match="no longer learn") if step else nullcontext():
            results = [learner.learn(faint(task)) for task in range(4)]
        assert [each.diagnostics["ranks"]["weight"]["rank"] for each in results[1:]] == [2, rank, rank]
        remarked = [any("can no longer learn" in remark for remark in each.remarks) for each in results]
        assert remarked == [False, False, step > 0, False]


def saturated_slow(memory: GradientMemory) -> set[str]:
    """The slow reference: almost nothing of an arbitrary gradient is left outside."""
    found = set()
    for name, projector in memory.projectors.items():
        g = torch.randn(3 * projector.basis.shape[0], projector.basis.shape[1], dtype=projector.basis.dtype)
        left = projector.project_out(g)
        assert isinstance(left, Tensor)
        if left.norm() <= 0.01 * g.norm():
            found.add(name)
    return found


@pytest.mark.parametrize("rule", [Ones(), Sigmoid(0.01), Spectral(3.0), Spectral(1e9)], ids=repr)
@pytest.mark.parametrize("grows", [False, True])
def test_saturated_weight_gives_one_remark(rule: ImportanceRule, grows: bool) -> None:
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2)).double())
    memory = GradientMemory(rule, projected_weights(network.model))
    remarks = []
    for task in range(4):
        x = torch.randn(50, 6, dtype=torch.float64)
        x[:, 5] *= task > 1  # until the third task, one direction of six is free
        threshold = 1 - 1e-9
        if grows:
            found = memory.extend(network, x, dict.fromkeys(memory.covered, threshold), first=task == 0)
        else:
            found = memory.rebuild(network, x, threshold)
        remarks += [(task, remark) for remark in found]
        assert memory.saturated() == saturated_slow(memory)
    about = [task for task, remark in remarks if "'0.weight' holds all 6 directions" in remark]
    held_softly = rule == Spectral(3.0) and not grows
    assert about == [] if held_softly else len(about) == 1 and about[0] >= 2
    assert all("lower the threshold" in remark for _, remark in remarks)


@pytest.mark.parametrize(("rule", "open_again"), [(Sigmoid(0.01), False), (Ones(), True), (Spectral(1e9), True)])
def test_dynamic_importances_do_not_unfreeze_a_weight(rule: ImportanceRule, open_again: bool) -> None:
    """They start every task at 1: their current values do not count, and no remark is repeated."""
    network = Network(nn.Linear(5, 3, bias=False).double())
    memory = GradientMemory(rule, projected_weights(network.model))
    x = torch.randn(30, 5, dtype=torch.float64)
    assert len(memory.rebuild(network, x, 1 - 1e-9)) == 1
    assert memory.saturated() == {"weight"}
    memory.importance.fill_(0.5)
    assert memory.saturated() == (set() if open_again else {"weight"})
    assert len(memory.rebuild(network, x, 1 - 1e-9)) == (1 if open_again else 0)


def test_saved_learner_does_not_repeat_remarks_on_saturated_weights(tmp_path: Path) -> None:
    x, y = torch.randn(80, 6), torch.arange(80) % 4
    full = [f"the basis of {name!r} holds all" for name in ("0.weight", "2.weight")]
    learner = steppe.Learner(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), steppe.FSDGPM(threshold=1.0))
    with pytest.warns(UserWarning, match="no longer learn"):
        remarks = learner.learn(steppe.Task((x, y))).remarks
    assert [start for start in full if any(remark.startswith(start) for remark in remarks)] == full
    learner.save(tmp_path / "learner.safetensors")
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    again = steppe.load(tmp_path / "learner.safetensors", model).learn(steppe.Task((x, y)))
    assert {name: rank["rank"] for name, rank in again.diagnostics["ranks"].items()} == {"0.weight": 6, "2.weight": 5}
    assert not any("holds all" in remark for remark in again.remarks)


def full_layers(found: list[warnings.WarningMessage]) -> list[str]:
    assert all(issubclass(each.category, UserWarning) for each in found)
    return [str(each.message).split("'")[1] for each in found if "can no longer learn" in str(each.message)]


@pytest.mark.parametrize("method", [steppe.FSDGPM(threshold=1.0), steppe.GPM(thresholds="1")])
def test_a_layer_that_can_no_longer_learn_is_warned_of_once_at_the_users_line(method: steppe.MethodConfig) -> None:
    x, y = torch.randn(80, 6), torch.arange(80) % 4
    learner = steppe.Learner(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), method)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = [learner.learn(steppe.Task((x, y))) for _ in range(3)]
    assert sorted(full_layers(found)) == ["0.weight", "2.weight"]
    assert {each.filename for each in found} == {__file__}
    remarks = [remark for result in results for remark in result.remarks]
    for each in found:
        assert str(each.message) in remarks
        assert "lower the threshold" in str(each.message)
        assert f"exclude=({full_layers([each])[0]!r},)" in str(each.message)


def test_a_warning_that_is_made_an_error_loses_nothing() -> None:
    x, y = torch.randn(80, 6), torch.arange(80) % 4
    learner, twin = (steppe.Learner(nn.Linear(6, 4), steppe.FSDGPM(threshold=1.0)) for _ in range(2))
    twin.model.load_state_dict(learner.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="'weight' holds all 6 directions"):
            learner.learn(steppe.Task((x, y)))
    with pytest.warns(UserWarning, match="'weight' holds all"):
        twin.learn(steppe.Task((x, y)))
    assert learner.num_tasks == 1
    for each in (learner, twin):
        each.learn(steppe.Task((x.flip(0), y)))
    assert all(map(torch.equal, learner.model.parameters(), twin.model.parameters()))


def test_a_task_that_is_ended_later_warns_then() -> None:
    x, y = torch.randn(80, 6), torch.arange(80) % 4
    learner = steppe.Learner(nn.Linear(6, 4), steppe.FSDGPM(threshold=1.0))

    def stop(event: object) -> None:
        if isinstance(event, steppe.EpochEnded):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(steppe.Task((x, y)), callback=stop)
    with pytest.warns(UserWarning, match="'weight' holds all"):
        learner.predict(x)
