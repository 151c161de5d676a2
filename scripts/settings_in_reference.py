"""How the reference shows settings: `lr: float = setting(0.01, "step size", above=0)` becomes the default 0.01, with the
help and the limits as its description. Read by mkdocstrings (see mkdocs.yml), which does not import what it documents.
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
        given = {str(part.name): _literal(part.value) for part in call.arguments if isinstance(part, griffe.ExprKeyword)}
        default, help, *_rest = [part for part in call.arguments if not isinstance(part, griffe.ExprKeyword)]
        words = _sentence(ast.literal_eval(str(help)))
        limits = Limits("", **{name: value for name, value in given.items() if value is not None}).describe()
        if limits:
            words += f" {limits[0].upper()}{limits[1:]}."
        attr.value = default
        attr.docstring = griffe.Docstring(words, parent=attr)


def _literal(value: Any) -> Any:
    """What an argument is, where it is written out; None where it is computed."""
    try:
        return ast.literal_eval(str(value))
    except ValueError:
        return None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
