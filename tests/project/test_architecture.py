"""Imports go one way: each module may import only from the layers below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "steppe"

# From the bottom up: a layer is a set of modules and packages, by their first name; to it everything below is open, and
# within it imports may not go in a circle.
LAYERS = [
    {
        "errors",
        "warn",
        "stopping",
        "turns",
        "version",
        "machine",
        "allocation",
        "executor",
        "results",
        "result_settings",
        "terminal",
    },
    {"settings", "products", "types", "files", "plugins", "devices", "straight_line"},
    {"state"},
    {"saving"},
    {
        "registry",
        "seeding",
        "session",
        "threads",
        "numerics",
        "protocol",
        "events",
        "published",
        "metrics",
        "linear_calls",
        "linear_chain",
        "standing_in",
        "input_copies",
        "clocks",
        "heads",
        "model_state",
    },
    {"data", "network", "models"},
    {"task", "inputs", "output_checks", "projection", "replay", "rings"},
    {"curriculum", "perturbation", "chain_ascent"},
    {"methods", "benchmarks"},
    {"training", "testing", "workload"},
    {"learner", "learner_checks", "learner_state"},
    {"saved_learner"},
    {"config", "catalogue"},
    {"tables", "runs", "logs", "details"},
    {"experiment", "fewer_tasks", "landscape"},
    {"study", "figures", "report", "reproduction"},
    {"display"},
    {"commands"},
    {"cli"},
    {"api"},
    {"__init__", "__main__"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
APART = {("methods", "benchmarks"), ("benchmarks", "methods")} | {
    (reader, loaded) for reader in ("report", "figures") for loaded in ("methods", "benchmarks", "registry", "learner")
}
FILES = sorted(SOURCE.rglob("*.py"))


def owner(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> set[str]:
    """The first names under `steppe` that a file imports, lazily or not; what only a type checker sees counts too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("steppe."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "steppe":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("steppe."))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    own = owner(path)
    assert own in LEVEL, f"{path.name}: give the module its layer in this test"
    for name in imported(path) - {own}:
        assert LEVEL[name] <= LEVEL[own], f"{own} imports {name}, which lies above it"
        assert (own, name) not in APART, "methods and benchmarks never import each other; pages and figures read files"


def test_layers_of_equal_level_do_not_import_in_circles() -> None:
    edges = {own: set() for own in LEVEL}
    for path in FILES:
        own = owner(path)
        edges[own] |= {name for name in imported(path) - {own} if LEVEL[name] == LEVEL[own]}
    for start in edges:
        seen, todo = set(), list(edges[start])
        while todo:
            name = todo.pop()
            assert name != start, f"{start} imports itself in a circle"
            if name not in seen:
                seen.add(name)
                todo += edges[name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_loaded_can_execute_code(path: Path) -> None:
    """No reader that runs what it reads: pickle, torch.load, eval and their like stay out of the source."""
    text = path.read_text(encoding="utf-8")
    for word in ("import pickle", "torch.load(", "marshal", " eval(", " exec("):
        assert word not in text
