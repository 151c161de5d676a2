"""The examples of docs/integrations.md run, each after the first one, where their library is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import steppe

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
NEEDS = {
    "PyTorch Lightning": "lightning",
    "Hugging Face Trainer": "transformers",
    "Accelerate": "accelerate",
    "Fabric": "lightning",
    "Avalanche": "avalanche",
    "Trackers": "tensorboard",
}


def sections() -> dict[str, str]:
    """The code of each section, by its heading; that of the introduction is first."""
    first, *others = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parts = {"": first} | {text.partition("\n")[0]: text for text in others}
    return {name: "".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)) for name, text in parts.items()}


def test_every_section_has_an_example() -> None:
    assert set(sections()) == {"", *NEEDS}
    assert all(sections().values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heading", NEEDS)
def test_an_example_runs(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS[heading], reason=f"needs {NEEDS[heading]}: pip install 'steppe[{NEEDS[heading]}]'")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space: dict[str, object] = {}
    for code in (sections()[""], sections()[heading]):
        exec(compile(code, PAGE.name, "exec"), space)
    memory = space.get("memory", getattr(space.get("callback", space.get("plugin")), "memory", None))
    if heading == "Trackers":
        assert list((tmp_path / "tensorboard").iterdir())
    else:
        assert isinstance(memory, steppe.GradientProjectionMemory)
        assert memory.num_updates == 2
