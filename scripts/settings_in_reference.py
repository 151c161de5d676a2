"""How the reference shows settings: of `lr: float = setting(0.01, "step size", above=0)` the default 0.01, and the help
and the limits as its description. Read by mkdocstrings (see mkdocs.yml), which does not import what it documents.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

from steppe.settings import Limits


class SettingsInReference(griffe.Extension):
    """Replaces the call of `setting` by what it says."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Give an attribute that is a setting its default and its description."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "setting":
            return
        named = [part for part in call.arguments if isinstance(part, griffe.ExprKeyword)]
        default, words, *_rest = [part for part in call.arguments if part not in named]
        given = {part.name: _literal(part.value) for part in named}
        description = _sentence(ast.literal_eval(str(words)))
        limits = Limits("", **{name: value for name, value in given.items() if value is not None}).describe()
        if limits:
            description += f" {limits[0].upper()}{limits[1:]}."
        attr.value = default
        attr.docstring = griffe.Docstring(description, parent=attr)


def _literal(value: Any) -> Any:
    """What an argument is, where it is written out; None where it is computed."""
    try:
        return ast.literal_eval(str(value))
    except ValueError:
        return None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
