"""The style of all figures: one set of matplotlib settings, and one color, marker and line for each method.

Colors are from Okabe and Ito's color-blind-safe palette. No two methods share both marker and line, so that they differ
in grayscale too; methods that are usually drawn together do not share a color. Sizes fit a two-column paper.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from typing import Any

from steppe.errors import RunError
from steppe.runtime.environment import printable

PAGE = 7.0
"""Width of the text on a page, in inches."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"),
)
COLORMAP = "cividis"
"""For heat maps: perceptually uniform and safe for color-blind readers."""

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # bundled with matplotlib: the same on every machine
    "mathtext.fontset": "dejavusans",
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "figure.titlesize": 8.0,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.35,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.0,
    "patch.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # TrueType: text in PDFs stays searchable and editable
    "svg.fonttype": "path",  # outlines, since an SVG does not embed its font
    "svg.hashsalt": "steppe",  # for reproducible ids, which are random otherwise
}


@dataclass(frozen=True)
class MethodStyle:
    """Color, marker and line of a method in all figures."""

    color: str
    marker: str
    line: str


METHOD_STYLES = {
    "fs-dgpm": MethodStyle(BLUE, "o", "-"),
    "fs-sgpm": MethodStyle(ORANGE, "D", "-"),
    "fs-rgpm": MethodStyle(BLACK, "D", "--"),
    "fs-gpm": MethodStyle(SKY, "v", "--"),
    "dgpm": MethodStyle(PURPLE, "^", "-."),
    "la-dgpm": MethodStyle(VERMILLION, "<", ":"),
    "gpm": MethodStyle(GREEN, "s", "--"),
    "sgp": MethodStyle(BLUE, "P", ":"),
    "er": MethodStyle(VERMILLION, "s", "-"),
    "fs-er": MethodStyle(SKY, "^", "-"),
    "sam-er": MethodStyle(ORANGE, "X", "--"),
    "der++": MethodStyle(BLACK, "P", "-."),
    "la-maml": MethodStyle(PURPLE, "X", "-"),
    "gem": MethodStyle(SKY, "v", "-"),
    "a-gem": MethodStyle(SKY, ">", "-."),
    "icarl": MethodStyle(BLUE, ">", "--"),
    "ewc": MethodStyle(PURPLE, "D", ":"),
    "finetune": MethodStyle(BLACK, "o", ":"),
    "multitask": MethodStyle(BLACK, "*", "--"),
    "oracle": MethodStyle(BLACK, "*", "-"),
}
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # no yellow: thin yellow lines are invisible on white
_FREE = [
    pair
    for pair in product("osD^v<>PX*", ("-", "--", "-.", ":"))
    if pair not in {(look.marker, look.line) for look in METHOD_STYLES.values()}
]
_NAMES = {
    "la-maml": "La-MAML",
    "la-dgpm": "La-DGPM",
    "icarl": "iCaRL",
    "finetune": "Finetune",
    "multitask": "Multitask",
    "oracle": "Oracle",
}


_drawn: ContextVar[Mapping[str, MethodStyle]] = ContextVar("styles of the methods in the figure being drawn")


def style_of(method: str) -> MethodStyle:
    """The style of a method. If it is not built in, the style is derived from its name.

    Args:
        method: The method's name.

    Returns:
        The style, which is the same in all figures unless another method in the figure has it.
    """
    return _drawn.get({}).get(method) or assign_styles([method])[method]


def assign_styles(methods: Iterable[str]) -> dict[str, MethodStyle]:
    """Assign different styles to methods that are drawn together; their order does not matter.

    Args:
        methods: The names of the methods.

    Returns:
        The style of each method. No two have the same marker and line until these pairs run out; then they differ in
        color.
    """
    names = sorted(set(methods))
    found = {method: METHOD_STYLES[method] for method in names if method in METHOD_STYLES}
    for method in names:
        if method not in found:
            pairs, taken = {_pair(each) for each in found.values()}, set(found.values())
            own = list(_own(method))
            free = [each for each in own if _pair(each) not in pairs] or [each for each in own if each not in taken]
            found[method] = (free or own)[0]
    return found


def _pair(own: MethodStyle) -> tuple[str, str]:
    return own.marker, own.line


def _own(method: str) -> Iterator[MethodStyle]:
    """All styles that no built-in method has, starting at one that depends on the name."""
    number = zlib.crc32(method.encode())
    start, hue = number % len(_FREE), number // len(_FREE)
    for turn, place in product(range(len(_COLOURS)), range(len(_FREE))):
        yield MethodStyle(_COLOURS[(hue + turn) % len(_COLOURS)], *_FREE[(start + place) % len(_FREE)])


def display_name(method: str) -> str:
    """A method's name as the paper writes it; the plain name of a method that is not built in."""
    return _NAMES.get(method, method.upper()) if method in METHOD_STYLES else escape_text(method)


def escape_text(text: str) -> str:
    """Escape a name from a file so that matplotlib draws it literally.

    `$` would start a formula, and legends skip labels with a leading underscore.

    Args:
        text: The name.

    Returns:
        The escaped name.
    """
    escaped = printable(text).replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped


@contextmanager
def matplotlib_style(methods: Iterable[str] = ()) -> Iterator[None]:
    """Draw or save within this context in our style; matplotlib's settings are restored afterwards.

    Args:
        methods: Methods drawn together, which get different styles.

    Raises:
        RunError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RunError("figures need matplotlib; run: pip install matplotlib.") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's matplotlibrc must not change the bytes
        settings: Any = matplotlib.rcParams
        settings.update(_SETTINGS)
        before = _drawn.set(assign_styles(methods))
        try:
            yield
        finally:
            _drawn.reset(before)


def new_figure(width: float, height: float, *, square: bool = False) -> Any:
    """Create an empty figure without opening a window.

    Args:
        width: In inches.
        height: In inches.
        square: Whether its panels are square, so that they can be packed closer together.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="compressed" if square else "constrained")
    FigureCanvasAgg(figure)
    return figure
