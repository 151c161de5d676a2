"""Read a module's forward as a straight line of calls, from its source alone: nothing is run, traced or patched.

Running the forward with stand-ins would need `nn.Module.__call__` replaced for the whole process (as `torch.fx` does),
and with it whatever other threads are computing.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Literal, NamedTuple

_SAME = ("co_firstlineno", "co_name", "co_code", "co_consts", "co_names", "co_varnames", "co_argcount", "co_flags")
"""What the source at hand must share with the code that is loaded."""


class Call(NamedTuple):
    """One call on the line. Each is given what the one before it returned, and nothing else."""

    kind: Literal["layer", "function", "method"]
    name: str
    """Of a layer its name in the module, of a function its path (torch.relu), of a method its name."""


def straight_line(forward: object) -> tuple[Call, ...] | None:
    """The calls a forward makes, in order; None if it does anything else, or if its source is not at hand.

    A straight line has no branch, no loop, no second input, and names nothing of the module but layers that it calls.
    """
    if type(forward) is not FunctionType or hasattr(forward, "__wrapped__"):
        return None
    try:
        return _calls_of(forward.__code__)
    except (OSError, SyntaxError, ValueError):  # no source, or not a straight line
        return None


def find_function(path: str, names: Mapping[str, object]) -> object:
    """What a dotted path stands for, from a name through modules; None if there is no such thing."""
    first, *others = path.split(".")
    found = names.get(first)
    for name in others:
        if not isinstance(found, ModuleType):  # anything else may give something different every time it is asked
            return None
        found = getattr(found, name, None)
    return found


@functools.lru_cache(maxsize=64)  # so that every thread and every task reads the same, even if the file is edited
def _calls_of(code: CodeType) -> tuple[Call, ...]:
    source = "".join(inspect.findsource(code)[0])
    tree = ast.parse(source)
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.lineno == code.co_firstlineno
    ]
    if len(found) != 1 or found[0].decorator_list or code.co_freevars:
        raise ValueError("not a plain function")
    if not any(_alike(each, code) for each in _codes_in(compile(tree, code.co_filename, "exec", dont_inherit=True))):
        raise ValueError("the file was edited after it was loaded")
    return _Reader(found[0]).read()


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A piece of code and all that is defined in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes_in(part)


def _alike(one: CodeType, other: CodeType) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _SAME)


class _Reader:
    """Goes through the statements of a forward, with one value in hand: what the last call returned."""

    def __init__(self, function: ast.FunctionDef) -> None:
        given = function.args
        arguments = [*given.posonlyargs, *given.args]
        if len(arguments) != 2 or given.vararg or given.kwonlyargs or given.kwarg:
            raise ValueError("not one input")
        self._own, x = (argument.arg for argument in arguments)
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
            if not isinstance(target, ast.Name) or target.id == self._own:
                raise ValueError("leaves something behind")
            self._ages[target.id] = len(self._calls)

    def _take(self, expression: ast.expr) -> None:
        """Read an expression, which must be the value in hand once it has been evaluated."""
        match expression:
            case ast.Name(name):
                if self._ages.get(name) != len(self._calls):
                    raise ValueError("not what the last call returned")
            case ast.Call(ast.Attribute(ast.Name(own), name), [x], []) if own == self._own:
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
        """The dotted path of a function that is not reached through a variable of the forward."""
        match function:
            case ast.Name(name):
                local = name == self._own or name in self._ages or name in self._local
                return None if local else name
            case ast.Attribute(base, name):
                path = self._path(base)
                return None if path is None else f"{path}.{name}"
        return None


def _check_keywords(keywords: list[ast.keyword]) -> None:
    """Only `inplace` may be given, and only as a constant: the result is the same."""
    if any(keyword.arg != "inplace" or not isinstance(keyword.value, ast.Constant) for keyword in keywords):
        raise ValueError("another input")
