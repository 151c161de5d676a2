"""The source against the table of packages and the rules in docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import architecture
import pytest
import torch
from torch import nn

SOURCE = Path(__file__).parents[2] / "src" / "steppe"
FILES = sorted(SOURCE.rglob("*.py"))
PLAN = architecture.read()
PRIVATE = {
    name
    for kind in (nn.Module(), nn.Parameter(torch.zeros(1)))
    for name in {*dir(kind), *vars(kind)}
    if name.startswith("_") and not name.startswith("__")
} | {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


each_file = pytest.mark.parametrize("path", FILES, ids=relative)


def package(name: str) -> str:
    """The package of a file or of a dotted name relative to steppe; the module's name if it is at the root."""
    return name.replace("/", ".").split(".")[0]


def imports(tree: ast.AST) -> set[str]:
    """The imports from steppe, as dotted names without `steppe.`, also those in functions and for type checkers."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.module and node.module.split(".")[0] == "steppe":
                names |= {f"{node.module}.{alias.name}".removeprefix("steppe.") for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("steppe.") for alias in node.names if alias.name.startswith("steppe.")}
    return names


def import_faults(own: str, tree: ast.AST, plan: architecture.Architecture) -> list[str]:
    """The imports of a file of this package that the page does not allow."""
    faults = []
    for name in sorted({package(name) for name in imports(tree)} - {own}):
        if plan.level[name] >= plan.level[own]:
            faults.append(f"{own} imports {name}, which is not in a row below it")
        if (own, name) in plan.apart:
            faults.append(f"{own} must not import {name}")
    return faults


def torch_internals(tree: ast.AST) -> Iterator[str]:
    """A file's private names of torch: in its namespace, and of modules and tensors that are not `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield str(node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
            yield str(node.module)
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            of_torch = dotted.startswith("torch.") and node.attr.startswith("_") and not node.attr.startswith("__")
            of_others = node.attr in PRIVATE and ast.unparse(node.value) not in ("self", "super()")
            if dotted == "torch.ops" or of_torch or of_others:
                yield dotted


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_page_lists_every_package() -> None:
    packages = {package(relative(path).removesuffix(".py")) for path in FILES}
    listed = [name for row in PLAN.rows for name in row]
    assert sorted(listed) == sorted(packages), "docs/architecture.md: a row for each package, and no others"


@each_file
def test_imports_point_downwards(path: Path) -> None:
    assert import_faults(package(relative(path).removesuffix(".py")), parsed(path), PLAN) == []


def test_no_circular_imports() -> None:
    names = {path: relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in FILES}
    modules = set(names.values())
    graph = {}
    for path, own in names.items():
        imported = {name if name in modules else name.rpartition(".")[0] for name in imports(parsed(path))}
        graph[own] = imported - {own}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_few_modules_at_the_root() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= PLAN.root_modules


@each_file
def test_private_torch_names_only_where_the_page_allows(path: Path) -> None:
    if not any(relative(path) == place or relative(path).startswith(f"{place}/") for place in PLAN.torch_internals):
        assert list(torch_internals(parsed(path))) == []


@pytest.mark.parametrize("place", PLAN.torch_internals)
def test_the_page_allows_private_names_only_where_they_are_used(place: str) -> None:
    paths = [path for path in FILES if relative(path) == place or relative(path).startswith(f"{place}/")]
    assert any(list(torch_internals(parsed(path))) for path in paths), f"take {place} out of the page"


@each_file
def test_nothing_loaded_can_execute_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [word for word in PLAN.forbidden if word in text] == []


@pytest.mark.parametrize("name", sorted(set(PLAN.paths)))
def test_files_the_page_names_exist(name: str) -> None:
    assert (SOURCE / name).is_file()


def test_the_page_is_read_in_full() -> None:
    """A rule worded so that nothing can be parsed from it would check nothing."""
    assert len(PLAN.apart) == 2 + 2 * 4
    assert len(PLAN.forbidden) == 5
    assert all(steps and all(steps) for steps in PLAN.ways.values())
    assert list(PLAN.ways) == ["study", "run", "task", "batch"]
    assert {package(name) for steps in PLAN.ways.values() for step in steps for name in step} <= set(PLAN.level)
    assert "methods/fs_dgpm.py" in PLAN.paths


@pytest.mark.parametrize(
    ("own", "source"),
    [
        ("runtime", "from steppe.network.network import Network"),  # up
        ("data", "from steppe import results"),  # in the same row
        (
            "methods",
            "def late():\n    from steppe.benchmarks import PMNIST",
        ),  # down, but to a package that the page excludes
        ("figures", "import steppe.methods.er"),
    ],
)
def test_a_forbidden_import_is_found(own: str, source: str) -> None:
    assert import_faults(own, ast.parse(source), PLAN) != []


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._len_torch_function_stack()",
        "torch.ops.aten.mm(a, b)",
        "from torch._dynamo import optimize",
        "layer._forward_hooks.clear()",
        "getattr(layer, '_parameters')",
        "weight._backward_hooks",
    ],
)
def test_a_private_name_of_torch_is_found(source: str) -> None:
    assert list(torch_internals(ast.parse(source)))


def test_our_own_private_names_are_allowed() -> None:
    assert list(torch_internals(ast.parse("self._modules = network._heads\ntorch.relu(self._buffers)"))) == []
