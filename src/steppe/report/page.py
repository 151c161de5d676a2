"""The report as one HTML file with its style, script and data; it loads nothing else.

Text from files reaches the page in two ways only: escaped in the tables, or as JSON in a block that browsers do not
execute, from which the script creates text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from steppe.errors import UsageError
from steppe.report import markup
from steppe.report.finished_run import Collection, collect
from steppe.report.sections import Section, build_sections
from steppe.report.series import section_series
from steppe.runtime.files import explain_write_errors, write_atomic
from steppe.version import __version__

# In order of dependency.
_SCRIPTS = ("elements", "lines", "grids", "controls", "parts", "landscapes", "layers", "report")


def write_report(directories: Sequence[Path], out: Path, command: str) -> None:
    """Write the report of all finished runs in some directories.

    Args:
        directories: Directories of runs or studies.
        out: The HTML file.
        command: The command line to name in the report.

    Raises:
        UsageError: A directory contains no finished run, or `out` is a directory.
    """
    write_page(collect(directories), out, command)


def write_page(collected: Collection, out: Path, command: str) -> None:
    """Write the report of collected runs, completely or not at all.

    Args:
        collected: The runs.
        out: The HTML file.
        command: The command line to name in the report.

    Raises:
        UsageError: `out` is a directory.
    """
    if out.is_dir():
        raise UsageError(f"{out} is a directory; pass a file, for example -o {out / 'report.html'}.")
    with explain_write_errors(out):
        write_atomic(
            out, render_page(collected, command).encode(errors="backslashreplace")
        )  # names of files may be no UTF-8


def render_page(collected: Collection, command: str) -> str:
    """Render the report as HTML.

    Args:
        collected: The runs.
        command: The command line to show in it.

    Returns:
        The page.
    """
    found = build_sections(collected)
    style = _asset("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "})();\n"
    unfinished, damaged = (
        [path.name if path.is_absolute() else str(path) for path in paths]
        for paths in (collected.unfinished, collected.damaged)
    )
    return Template(_asset("report.html")).substitute(
        policy=escape(_policy(style, script)),
        title=escape(_title(found)),
        style=style,
        tabs=_tabs(found),
        left_out=markup.left_out(unfinished, damaged),
        sections="\n".join(_section(number, section) for number, section in enumerate(found)),
        command=escape(command),
        version=escape(__version__),
        data=data_block([section_series(section) for section in found]),
        script=script,
    )


def _title(found: Sequence[Section]) -> str:
    names = list(dict.fromkeys(section.benchmark for section in found))
    if len(names) > 3:
        return f"{len(names)} benchmarks"
    methods = [variant.label for variant in found[0].variants]
    if len(found) == 1 and len(methods) == 1:
        return f"{methods[0]} on {found[0].title}"
    return ", ".join(names)


def _tabs(found: Sequence[Section]) -> str:
    """Links to the sections if there are several; the script turns them into tabs."""
    if len(found) < 2:
        return ""
    links = "".join(f"<a href='#section-{number}'>{escape(each.title)}</a>" for number, each in enumerate(found))
    return f"<nav class='tabs' aria-label='Benchmarks'>{links}</nav>"


def _section(number: int, section: Section) -> str:
    """One benchmark; the parts that the script draws are hidden until it does."""
    drawn = "".join(f"<section class='part' data-part='{name}' hidden></section>" for name in _DRAWN)
    return (
        f"<section class='benchmark' id='section-{number}' data-section='{number}' aria-labelledby='title-{number}'>"
        f"<h2 id='title-{number}'>{escape(section.title)}</h2>{markup.lede(section)}"
        f"<section class='part'><h3>Results</h3>{markup.results_table(section)}</section>"
        f"{markup.differences(section)}{drawn}{markup.settings(section)}{markup.provenance(section)}"
        "</section>"
    )


_DRAWN = ("curves", "matrix", "landscape", "costs", "importances", "ranks")


def data_block(data: Any) -> str:
    """JSON that is safe in a script element: it cannot end the element or start a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # as ASCII, which also escapes U+2028 and U+2029
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(style: str, script: str) -> str:
    """The content security policy: no network, and only this style and script."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("steppe.report").joinpath("assets", name).read_text(encoding="utf-8")
