"""How every figure looks: one set of matplotlib's settings, and one look for each method.

Colours are Okabe and Ito's, which people see apart whatever their colour vision. No two methods share both marker and
line, so that they can be told apart in grey as well; no two of the family, nor of those mostly drawn together, share a
colour. Sizes are those of a paper of two columns.
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
"""Inches: the width of a page's text."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"),
)
COLORMAP = "cividis"
"""For values over a plane: rises evenly in lightness, and looks the same to all."""

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
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
    "pdf.fonttype": 42,  # TrueType: text in a PDF can be searched and edited
    "svg.fonttype": "path",  # an SVG does not carry its font: as outlines, letters stay in their places everywhere
    "svg.hashsalt": "steppe",  # names within the file, else drawn at random
}


@dataclass(frozen=True)
class MethodStyle:
    """What a method looks like in every figure."""

    color: str
    marker: str
    line: str


METHOD_STYLES = {
    "fs-dgpm": MethodStyle(BLUE, "o", "-"),
    "fs-sgpm": MethodStyle(ORANGE, "D", "-"),
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
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # no yellow: a thin line of it is lost on white
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


_drawn: ContextVar[Mapping[str, MethodStyle]] = ContextVar("looks of the methods in the figure being drawn")


def style_of(method: str) -> MethodStyle:
    """A method's look; one of somebody's own gets it from its name, so that it too is the same everywhere, unless
    another one in the same figure has it.
    """
    return _drawn.get({}).get(method) or assign_styles([method])[method]


def assign_styles(methods: Iterable[str]) -> dict[str, MethodStyle]:
    """The looks of methods that are drawn together: no two share marker and line while there are pairs left, nor the
    whole look after that. The order in which they are given does not matter.
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
    """Every look that no method of ours has, beginning at a place that the name says."""
    number = zlib.crc32(method.encode())
    start, hue = number % len(_FREE), number // len(_FREE)
    for turn, place in product(range(len(_COLOURS)), range(len(_FREE))):
        yield MethodStyle(_COLOURS[(hue + turn) % len(_COLOURS)], *_FREE[(start + place) % len(_FREE)])


def display_name(method: str) -> str:
    """A method's name as the paper writes it; somebody's own as it is."""
    return _NAMES.get(method, method.upper()) if method in METHOD_STYLES else escape_text(method)


def escape_text(text: str) -> str:
    """A name from a file as matplotlib draws it sign by sign: $ begins no formula, and an underscore in front, for
    which a legend would pass it over, stands behind a space of no width.
    """
    escaped = printable(text).replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped


@contextmanager
def matplotlib_style(methods: Iterable[str] = ()) -> Iterator[None]:
    """Drawing and saving in our style, these methods told apart; matplotlib's own settings are as before afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise RunError("figures need matplotlib: pip install matplotlib.") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own matplotlibrc must not change the bytes
        settings: Any = matplotlib.rcParams
        settings.update(_SETTINGS)
        before = _drawn.set(assign_styles(methods))
        try:
            yield
        finally:
            _drawn.reset(before)


def new_figure(width: float, height: float, *, square: bool = False) -> Any:
    """An empty figure of this size in inches, whose panels (square ones closer together) arrange themselves; no window
    is opened for it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="compressed" if square else "constrained")
    FigureCanvasAgg(figure)
    return figure
