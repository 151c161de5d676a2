"""How the reference shows settings: of `lr: float = setting(0.01, "step size", above=0)` the default 0.01, and the help
and the limits as its description. Read by mkdocstrings (see mkdocs.yml), which does not import what it documents.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

from steppe.settings import Limits


class SettingsInReference(griffe.Extension):
    """Replaces each call of `setting` by what it says, and lists the settings of a class under its docstring."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give settings their defaults, and the class its list of them."""
        described = {name: self._described(member) for name, member in cls.members.items() if member.is_attribute}
        lines = [f"    {name}: {words}" for name, words in described.items() if words]
        if lines and cls.docstring is not None:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)

    def _described(self, attribute: Any) -> str:
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
