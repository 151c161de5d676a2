"""What the command line and `import steppe` load, and that generated files are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files

import pytest

import steppe
from steppe import api
from steppe.cli.catalogue import render_all


def test_public_names_are_those_of_the_api() -> None:
    assert steppe.__all__ == api.__all__
    assert all(getattr(steppe, name) is getattr(api, name) for name in steppe.__all__)
    assert set(steppe.__all__) <= set(dir(steppe))
    with pytest.raises(AttributeError, match="module 'steppe' has no attribute 'nothing'"):
        steppe.nothing  # noqa: B018


def test_catalogue_is_up_to_date() -> None:
    """If not, run python scripts/write_catalogue.py."""
    assert json.loads(files("steppe").joinpath("catalogue.json").read_text(encoding="utf-8")) == render_all()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["list"], ["list", "fs-dgpm"], ["--version"]),
        *([command, "--help"] for command in ("run", "report", "landscape")),
    ],
)
def test_help_and_list_do_not_import_torch(arguments: list[str]) -> None:
    look = (
        "import sys\nfrom steppe.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert len(done.stdout.splitlines()) > 1
