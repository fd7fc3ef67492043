"""Colours and fonts of plots, and the conversion of a matplotlib figure to SVG for a page."""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise import install_command
from equipoise.hal.errors import EquipoiseError

TEXT_COLOUR = "#1b2a41"
"""Stands for the text colour of the page: the report replaces it by `currentColor`."""

HEAT_MAP_LINES = "#22304a"
"""Lines across a heat map, which is as light on dark paper as on light."""

MUTED = "#8a93a3"
"""Readable on light and on dark paper."""

VARIANT_COLOURS = {
    "unbalanced": "#d55e00",
    "placement": "#c2699f",
    "static": "#c98a00",
    "lagged": "#3f9fd6",
    "local": "#009e73",
    "node": "#8a6d3b",
    "exact": "#3b78d0",
}
"""After Okabe and Ito: also colour-blind eyes tell them apart."""

DIVERGING = ("#2456a4", "#82aedb", "#f3f0e8", "#eda268", "#b3331d")
"""Below the mean, the mean, above it."""

SEQUENTIAL = ("#f3f0e8", "#f0c987", "#e08e4f", "#b3441f", "#5c1a1b")

PHASE_COLOURS = {
    "planning": "#c99a2e",
    "proposed": "#d9c08a",
    "transferring": "#3d6fb6",
    "staged": "#009e73",
    "updating": "#3f9fd6",
    "draining": "#d55e00",
    "failed": "#b3331d",
}
"""What a rebalance is in."""

WORK_COLOURS = {
    "compute stream": "#9aa7ba",
    "transfer": "#82aedb",
    "copy stream": "#2456a4",
    "planner": "#c99a2e",
    "vote": "#7a5ba6",
}
"""Work by the thread or stream that does it."""

STYLE: dict[str, object] = {
    "font.size": 10.0,
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
    # File names become labels: a dollar sign in one must not start a formula.
    "text.parse_math": False,
    "text.color": TEXT_COLOUR,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT_COLOUR,
    "ytick.labelcolor": TEXT_COLOUR,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def variant_colour(name: str) -> str:
    """The colour of a variant; grey for one that this palette does not know."""
    return VARIANT_COLOURS.get(name, MUTED)


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


STANDALONE_STYLE = (
    "<style>svg{background:#fff;color:#1f2933}"
    "@media (prefers-color-scheme:dark){svg{background:#0d1117;color:#e6edf3}}</style>"
)
"""Of a picture in a file, which no page gives colours: both schemes, each on its own paper."""


def standalone_svg(svg: str) -> str:
    """A picture of `draw` as a file of its own, readable in light and in dark surroundings."""
    opening, rest = svg.split(">", 1)
    if " xmlns=" not in opening:
        opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{opening}>{STANDALONE_STYLE}{rest}\n"


def _for_a_page(svg: str) -> str:
    """Without prologue, metadata and unused identifiers; sized by the page, in its ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used_ids = set(re.findall(r"(?:url\(|href=\")#([\w.-]+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used_ids else "", svg)
    opening, rest = svg[: svg.index(">")], svg[svg.index(">") :]
    svg = re.sub(r'\s(?:width|height)="[^"]*"', "", opening) + rest
    return svg.replace(TEXT_COLOUR, "currentColor")
