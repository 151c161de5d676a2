"""Read a module's forward as a straight line of calls from its source code, without running or patching anything.

Tracing would replace `nn.Module.__call__` for the whole process (as `torch.fx` does), also for other threads.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Literal, NamedTuple

_SAME = ("co_firstlineno", "co_name", "co_code", "co_consts", "co_names", "co_varnames", "co_argcount", "co_flags")
"""What the source must have in common with the loaded code."""


class Call(NamedTuple):
    """One call on the line. Its only input is what the call before it returned."""

    kind: Literal["layer", "function", "method"]
    name: str
    """A layer's name in the module, a function's dotted path (torch.relu), or a method's name."""


def straight_line(forward: object) -> tuple[Call, ...] | None:
    """Read the calls that a forward makes.

    A straight line has no branch, no loop and no second input, and uses no attribute of the module but layers it calls.

    Args:
        forward: The function, as found in the class.

    Returns:
        The calls in order; None if the function does anything else or its source is not available.
    """
    if type(forward) is not FunctionType or hasattr(forward, "__wrapped__"):
        return None
    try:
        return _calls_of(forward.__code__)
    except (OSError, SyntaxError, ValueError):  # no source, or not a straight line
        return None


def find_function(path: str, names: Mapping[str, object]) -> object:
    """Look up a dotted path, from a global name through modules; None if it does not exist."""
    first, *others = path.split(".")
    value = names.get(first)
    for name in others:
        if not isinstance(value, ModuleType):  # anything else may return a different object each time
            return None
        value = getattr(value, name, None)
    return value


@functools.lru_cache(maxsize=64)  # every thread and task reads the same, even if the file is edited
def _calls_of(code: CodeType) -> tuple[Call, ...]:
    source = "".join(inspect.findsource(code)[0])
    tree = ast.parse(source)
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.lineno == code.co_firstlineno
    ]
    if len(found) != 1 or found[0].decorator_list or code.co_freevars:
        raise ValueError("not a plain function")
    if not any(
        _same_code(each, code) for each in _codes_in(compile(tree, code.co_filename, "exec", dont_inherit=True))
    ):
        raise ValueError("the file was edited after it was loaded")
    return _Reader(found[0]).read()


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those defined in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes_in(part)


def _same_code(one: CodeType, other: CodeType) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _SAME)


class _Reader:
    """Walks through the statements of a forward, tracking one value: what the last call returned."""

    def __init__(self, function: ast.FunctionDef) -> None:
        args = function.args
        arguments = [*args.posonlyargs, *args.args]
        if len(arguments) != 2 or args.vararg or args.kwonlyargs or args.kwarg:
            raise ValueError("not one input")
        self._self, x = (argument.arg for argument in arguments)
        self._statements = function.body
        self._calls: list[Call] = []
        self._ages = {x: 0}  # of each local variable: how many calls had been made when it was assigned
        self._local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    def read(self) -> tuple[Call, ...]:
        *before, last = self._statements
        for statement in before:
            self._read(statement)
        if not isinstance(last, ast.Return) or last.value is None:
            raise ValueError("does not end with its result")
        self._take(last.value)
        return tuple(self._calls)

    def _read(self, statement: ast.stmt) -> None:
        targets: list[ast.expr] = []
        match statement:
            case ast.Expr(ast.Constant(str())):  # a docstring
                return
            case ast.Expr(value):
                pass
            case ast.Assign(targets, value):
                pass
            case ast.AnnAssign(named, _, ast.expr() as value):
                targets = [named]
            case _:
                raise ValueError("not a straight line")
        self._take(value)
        for target in targets:
            if not isinstance(target, ast.Name) or target.id == self._self:
                raise ValueError("assigns to something other than a local variable")
            self._ages[target.id] = len(self._calls)

    def _take(self, expression: ast.expr) -> None:
        """Read an expression, which must evaluate to the tracked value."""
        match expression:
            case ast.Name(name):
                if self._ages.get(name) != len(self._calls):
                    raise ValueError("not what the last call returned")
            case ast.Call(ast.Attribute(ast.Name(receiver), name), [x], []) if receiver == self._self:
                self._take(x)
                self._calls.append(Call("layer", name))
            case ast.Call(function, [x], keywords) if (path := self._path(function)) is not None:
                _check_keywords(keywords)
                self._take(x)
                self._calls.append(Call("function", path))
            case ast.Call(ast.Attribute(x, name), [], keywords):
                _check_keywords(keywords)
                self._take(x)
                self._calls.append(Call("method", name))
            case _:
                raise ValueError("neither a variable nor a call of one input")

    def _path(self, function: ast.expr) -> str | None:
        """The dotted path of a function that does not start at a local variable."""
        match function:
            case ast.Name(name):
                local = name == self._self or name in self._ages or name in self._local
                return None if local else name
            case ast.Attribute(base, name):
                path = self._path(base)
                return None if path is None else f"{path}.{name}"
        return None


def _check_keywords(keywords: list[ast.keyword]) -> None:
    """Allow only `inplace` with a constant: the result is the same."""
    if any(keyword.arg != "inplace" or not isinstance(keyword.value, ast.Constant) for keyword in keywords):
        raise ValueError("another input")
