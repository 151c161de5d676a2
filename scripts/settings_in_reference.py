"""How the reference shows settings: of `lr: float = setting(0.01, "step size", above=0)` the default 0.01, and the help
and the limits as its description. Read by mkdocstrings (see mkdocs.yml), which does not import what it documents.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import griffe

from steppe.settings import Limits


class SettingsInReference(griffe.Extension):
    """Replaces each call of `setting` by its default, and lists a class's settings, inherited ones too, under its
    docstring.
    """

    def __init__(self) -> None:
        self._described: dict[str, str] = {}  # by the full name of the setting

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give settings their defaults, and note what else they say."""
        for member in cls.members.values():
            if isinstance(member, griffe.Attribute) and (words := _take_description(member)):
                self._described[member.path] = words

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """List the settings of every class, once all base classes are known."""
        for cls in _classes(pkg):
            settings: dict[str, str] = {}
            for owner in (*reversed(cls.mro()), cls):
                settings |= {
                    name: self._described[member.path]
                    for name, member in owner.members.items()
                    if member.path in self._described
                }
            if settings and cls.docstring is not None:
                lines = [f"    {name}: {words}" for name, words in settings.items()]
                cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)


def _classes(owner: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    """The classes defined in a module or class, at any depth."""
    for member in owner.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, (griffe.Module, griffe.Class)):
            yield from _classes(member)


def _take_description(attribute: griffe.Attribute) -> str:
    """A setting's help and limits, empty if it is none; its value becomes the default alone."""
    call = attribute.value
    if not isinstance(call, griffe.ExprCall) or str(call.function) != "setting":
        return ""
    named = [part for part in call.arguments if isinstance(part, griffe.ExprKeyword)]
    attribute.value, words, *_ = [part for part in call.arguments if part not in named]
    given = {part.name: _literal(part.value) for part in named}
    limits = Limits("", **{name: value for name, value in given.items() if value is not None}).describe()
    return " ".join(_sentence(text) for text in (ast.literal_eval(str(words)), limits) if text)


def _literal(value: Any) -> Any:
    """What an argument is, where it is written out; None where it is computed."""
    try:
        return ast.literal_eval(str(value))
    except ValueError:
        return None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
