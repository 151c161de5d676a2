"""Reading forwards from their source: what is a straight line of calls, what is not, and that no model code runs."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import relu

from steppe.fast.chain_recognition import find_linear_chain
from steppe.fast.read_forward import find_function, straight_line


class Plain(nn.Module):
    """A model with some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(9, 9), nn.Linear(9, 5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Logits,
        over two lines.
        """
        x = y = torch.relu(self.a(x))
        z: Tensor = self.b(y)
        return z.tanh()


class Nested(Plain):
    def forward(self, input: Tensor, /) -> Tensor:
        return self.b(self.act(self.a(input)))


class InPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.b(relu(self.a(x), inplace=True)), inplace=False)


# fmt: off
class Oddly(Plain):
    def forward(self,
                x
                ):
# an unusual place for a comment
        return self.b(
            self.a(x)
        )
# fmt: on


CHAINS = {
    "plain": (Plain, "relu tanh"),
    "nested": (Nested, "relu -"),
    "in place": (InPlace, "relu relu"),
    "oddly": (Oddly, "- -"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_straight_line_models_are_chains(name: str) -> None:
    kind, activations = CHAINS[name]
    chain = find_linear_chain(kind().double())
    assert chain is not None
    assert [link.weight for link in chain.links] == ["a.weight", "b.weight"]
    found = ["-" if link.activation is None else link.activation.forward.__name__ for link in chain.links]
    assert " ".join(found) == activations
    model, x = kind().double(), torch.randn(4, 9, dtype=torch.float64)
    chain = find_linear_chain(model)
    assert chain is not None
    torch.testing.assert_close(chain.outputs(x), model(x))


def test_calls_read_from_the_source() -> None:
    found = straight_line(Plain.forward)
    assert found == (("layer", "a"), ("function", "torch.relu"), ("layer", "b"), ("method", "tanh"))


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def twice(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * function(self, x)

    return twice


class Decorated(Plain):
    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Wrapped(Plain):
    forward = doubled(Plain.forward)  # type: ignore[assignment]


class Silent(Plain):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Dead(Plain):
    """A call whose result is not used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.relu_()
        return self.b(h)


class Skipping(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        return self.b(x)


class Early(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.b(h)
        return h


class Optional(Plain):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.b(self.a(x))


class Many(Plain):
    def forward(self, *x: Tensor) -> Tensor:
        return self.b(self.a(*x))


class Keyword(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=self.a(x))


class Rebound(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self = other
        return self.b(self.a(x))


other = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 5)})


class Shadowed(Plain):
    """A local variable with the name of a module."""

    def forward(self, x: Tensor) -> Tensor:
        functional = self.a(x)
        return self.b(functional.relu(functional))


class Hidden(Plain):
    """The forward gets another object under a layer's name."""

    def __getattr__(self, name: str) -> Any:
        return nn.Tanh() if name == "act" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Covered(Nested):
    """The same, through a class attribute."""


class Space:
    relu = staticmethod(torch.relu)


class Spaced(Plain):
    """A function in a custom namespace, which may return another object each time."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Space.relu(self.a(x)))


class Walrus(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(h := self.a(x)) + h[:, :5]


class Asynchronous(Plain):
    async def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def enclosed() -> nn.Module:
    act = torch.relu

    class Enclosed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(act(self.a(x)))

    return Enclosed()


def covered() -> nn.Module:
    model = Covered()
    Covered.act = nn.Tanh()  # type: ignore[assignment]
    return model


def by_hand(text: str) -> Callable[[], nn.Module]:
    """A forward without source code."""

    def build() -> nn.Module:
        space: dict[str, Any] = {}
        exec(text, space)
        return type("ByHand", (Plain,), {"forward": space["forward"]})()

    return build


OTHERS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (Decorated, Wrapped, Silent, Dead, Skipping, Early, Optional, Many, Keyword)},
    **{kind.__name__: kind for kind in (Rebound, Shadowed, Hidden, Spaced, Walrus, Asynchronous)},
    "enclosed": enclosed,
    "covered": covered,
    "lambda": lambda: type("Lambda", (Plain,), {"forward": lambda self, x: self.b(self.a(x))})(),
    "no source": by_hand("def forward(self, x):\n    return self.b(self.a(x))\n"),
    "of an instance": lambda: nn.Sequential(nn.Linear(9, 9), Plain()),
    "a lone layer": lambda: nn.Linear(9, 5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forwards_give_none(name: str) -> None:
    assert find_linear_chain(OTHERS[name]()) is None


TEXT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
"""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("edited", ["torch.tanh(self.a(one))", "self.a(one)", None, "torch.relu(self.a(one))"])
def test_file_edited_after_import_is_not_used(edited: str | None, tmp_path: Path) -> None:
    text = TEXT.replace("x)", "one)")
    path = tmp_path / "theirs.py"
    path.write_text(text, encoding="utf-8")  # a separate one: results are cached for equal code
    model = loaded(path).Model()
    if edited is None:
        path.unlink()
    else:
        path.write_text(text.replace("torch.relu(self.a(one))", edited), encoding="utf-8")
        os.utime(path, (1, 1))
    assert (find_linear_chain(model) is not None) == (edited == "torch.relu(self.a(one))")


def test_source_is_read_once(tmp_path: Path) -> None:
    """A chain at the first task is one at the second, even if the file is edited meanwhile."""
    path = tmp_path / "ours.py"
    path.write_text(TEXT, encoding="utf-8")
    model = loaded(path).Model()
    assert find_linear_chain(model) is not None
    path.write_text("", encoding="utf-8")
    os.utime(path, (1, 1))
    assert find_linear_chain(model) is not None


def test_functions_are_found_only_through_modules() -> None:
    names = {"torch": torch, "Space": Space, "relu": relu}
    assert find_function("torch.nn.functional.relu", names) is relu
    assert find_function("relu", names) is relu
    for path in ("Space.relu", "torch.nothing", "nothing.relu", "torch.relu.relu"):
        assert find_function(path, names) is None


def test_no_model_code_runs() -> None:
    class Loud(Plain):
        def __deepcopy__(self, memo: object) -> Loud:
            raise AssertionError

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.act(self.a(x)))

    model = Loud()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", lambda self, x: pytest.fail("ran"))
        patch.setattr(nn.Linear, "forward", lambda self, x: pytest.fail("ran"))
        assert find_linear_chain(model) is not None


def test_the_library_does_not_load_torchs_tracer() -> None:
    """It patches torch for the whole process; parts of torch load it, but do not use it."""
    source = Path(str(sys.modules["steppe"].__file__)).parent
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "torch.fx" not in text.replace("(as `torch.fx` does)", ""), path
        assert "import fx" not in text
        assert ", fx" not in text


def test_reading_does_not_depend_on_how_python_was_started(tmp_path: Path) -> None:
    path = tmp_path / "started.py"
    path.write_text(
        TEXT.replace("def forward(self, x):", 'def forward(self, x):\n        """Logits."""')
        + "\nfrom steppe.fast.chain_recognition import find_linear_chain\n"
        + "assert 1 / (find_linear_chain(Model()) is not None)\n",
        encoding="utf-8",
    )
    for option in ("-B", "-O", "-OO"):
        subprocess.run(
            [sys.executable, option, str(path)], check=True, timeout=120, env={**os.environ, "STEPPE_FAST": "1"}
        )
