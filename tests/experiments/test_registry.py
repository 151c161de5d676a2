"""What can be registered, and the errors that a plugin's author gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from steppe.cli.main import main
from steppe.errors import UsageError
from steppe.methods import ER
from steppe.registry import BENCHMARKS, METHODS, register_method

HEAD = (
    "from dataclasses import dataclass\nimport torch\nfrom torch import nn\nimport steppe\n\n@dataclass(frozen=True)\n"
)
METHOD = HEAD + "class Mine(steppe.Finetune):\n    {field}\nsteppe.register_method('{name}', Mine, '')\n"
BARE = (
    HEAD
    + "class Bare(steppe.MethodConfig):\n    def start(self, *given): ...\nsteppe.register_method('bare', Bare, '')\n"
)
POINTS = """
from dataclasses import dataclass
import torch
from torch import nn
import steppe

@steppe.register_benchmark("points", "Points.")
@dataclass(frozen=True)
class Points(steppe.Benchmark):
    def stream(self, seed):
        x = torch.rand(20, 4, generator=torch.Generator().manual_seed(seed))
        y = (x[:, 0] > 0.5).long()
        return [steppe.Task((x, y), (x, y))]
"""
NETWORK = "    def network(self):\n        return nn.Linear(4, 2)\n"


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the test's registrations."""
    monkeypatch.chdir(tmp_path)
    methods, benchmarks = dict(METHODS), dict(BENCHMARKS)
    yield
    METHODS.clear()
    METHODS.update(methods)
    BENCHMARKS.clear()
    BENCHMARKS.update(benchmarks)


def plugin(text: str) -> list[str]:
    Path("p.py").write_text(text, encoding="utf-8")
    return ["--plugin", "p.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            METHOD.format(field="pass", name="er"),
            "the method name 'er' is already taken by steppe.methods.er.ER; choose another",
        ),
        (
            "import steppe\nsteppe.register_method('er', steppe.ER, '', variant={'lr': 1})",
            "the method name 'er' is already taken",
        ),
        (METHOD.format(field="pass", name="../esc"), "invalid method name '../esc'"),
        (METHOD.format(field="pass", name="a b"), "invalid method name 'a b'"),
        (METHOD.format(field="pass", name=""), "invalid method name ''"),
        (POINTS.replace('"points"', '"points:v2"') + NETWORK, "invalid benchmark name 'points:v2'"),
        (POINTS.replace('"points"', '"pmnist"') + NETWORK, "the benchmark name 'pmnist' is already taken"),
        (POINTS, "benchmark 'points' lacks network; implement it in Points"),
        (
            METHOD.format(field="pull: float = 0.5", name="mine"),
            "Mine.pull: declare it with steppe.setting(default, help)",
        ),
        (
            METHOD.format(field="pull: float | None = steppe.setting(None, 'how much')", name="mine"),
            "Mine.pull: expected type bool, int, float or str",
        ),
    ],
)
def test_invalid_registrations(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(METHODS), dict(BENCHMARKS)
    assert main(["list", *plugin(text)]) == 2
    assert message in capsys.readouterr().err
    assert (dict(METHODS), dict(BENCHMARKS)) == before


def test_registering_again_from_the_same_module_replaces_the_entry() -> None:
    """As in a notebook, where a cell is run again."""

    def cell(lr: float) -> None:
        made = type("Mine", (ER,), {"__module__": "__main__", "__qualname__": "Mine"})
        register_method("mine", made, "", variant={"lr": lr})

    cell(0.25)
    cell(0.5)
    assert METHODS["mine"].variant == {"lr": 0.5}
    register_method("er", METHODS["er"].settings, METHODS["er"].summary, presets=METHODS["er"].presets)  # the same
    with pytest.raises(UsageError, match="the method name 'mine' is already taken"):
        register_method("mine", ER, "")


def test_a_benchmark_needs_only_two_methods(capsys: pytest.CaptureFixture[str]) -> None:
    """Training settings have defaults, and it need not have settings of its own."""
    given = plugin(POINTS + NETWORK)
    assert main(["run", "points", "finetune", "--out", "r", *given]) == 0
    assert main(["list", "points", *given]) == 0
    assert "Settings (--set benchmark.KEY=VALUE)\n  none" in capsys.readouterr().out


def test_a_method_without_settings_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "bare", *plugin(BARE)]) == 0
    assert "  none\n" in capsys.readouterr().out + "\n"


def test_a_network_that_cannot_be_saved_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """Its extra state cannot be saved, and the run says so."""
    network = """
    def network(self):
        return Counting(4, 2)

class Counting(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state): ...
"""
    assert main(["run", "points", "er", "--out", "r", *plugin(POINTS + network)]) == 0
    assert "er, or its network, cannot be saved: if interrupted, this run cannot be resumed." in capsys.readouterr().err
