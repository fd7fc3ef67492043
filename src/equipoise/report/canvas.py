"""From a matplotlib figure to SVG that can stand inside a page."""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise import install_command
from equipoise.hal.errors import EquipoiseError
from equipoise.report.palette import INK, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 10.0
"""Inches of every picture; heights differ."""


class PlotsMissing(EquipoiseError):
    """matplotlib, which is optional, is not installed."""


@dataclass(frozen=True)
class Picture:
    """An `<svg>` element and what to see in it."""

    title: str
    caption: str
    svg: str


def draw(name: str, height: float, paint: Callable[["Figure"], None]) -> str:
    """An `<svg>` element of `WIDTH` x `height` inches that `paint` filled; same in, same out.

    `name` keeps the identifiers of several pictures on one page apart. Raises PlotsMissing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsMissing(f"matplotlib is missing: {install_command('plots')}") from error

    with rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():  # type: ignore[arg-type]
        # The browser brings the glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(WIDTH, height), layout="constrained", dpi=144)
        paint(figure)
        buffer = io.StringIO()
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _for_a_page(buffer.getvalue())


def _for_a_page(svg: str) -> str:
    """Without prologue, metadata and unused identifiers; sized by the page, in its ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(|href=\")#([\w.-]+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    opening, rest = svg[: svg.index(">")], svg[svg.index(">") :]
    svg = re.sub(r'\s(?:width|height)="[^"]*"', "", opening) + rest
    return svg.replace(INK, "currentColor")
