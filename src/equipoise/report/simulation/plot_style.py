"""Colours and line styles of policies: one family for each way to decide; `fit` is emphasised."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.report.simulation.result import REFERENCE_POLICY
from equipoise.report.svg import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COUNTING = ("#b9a79a", "#c8553d", "#d9906f", "#b8472a", "#8f7a70", "#ab6650")
"""Those that count requests, or nothing."""
WEIGHING = ("#c99a2e",)
CACHING = ("#c77f9f", "#a8547c", "#d9a3bb", "#86405f")
"""Those that look at what is cached of a prompt."""
LOADED = ("#a67c1a",)
POOLING = ("#4f8f8b", "#7ab08a")
IN_ORDER = (*COUNTING, *WEIGHING, *CACHING, *LOADED, *POOLING, "#dcb968", "#3b78d0")
SHADES = dict(zip(POLICIES, IN_ORDER, strict=True))
"""In the order of `POLICIES`."""
ORACLE = "#7a5ba6"


def policy_colour(label: str) -> str:
    """Grey for one that this palette does not know."""
    if label in SHADES:
        return SHADES[label]
    return ORACLE if label.endswith("oracle") else MUTED


def line_width(label: str) -> float:
    """Of its line."""
    return 2.4 if label == REFERENCE_POLICY else 1.3


def z_order(label: str) -> int:
    """The default above the others."""
    return 5 if label == REFERENCE_POLICY else 3


def label_beside(axis: "Axes", rows: Sequence[tuple[str, str]]) -> None:
    """Right of the axis, from the top: (label, words after it), each in its colour."""
    step = min(0.075, 1.0 / max(len(rows), 1))
    for place, (label, words) in enumerate(rows):
        axis.text(
            1.02,
            0.985 - place * step,
            f"{label}  {words}".rstrip(),
            color=policy_colour(label),
            transform=axis.transAxes,
            va="top",
            fontsize=9,
            fontweight="bold" if label == REFERENCE_POLICY else "normal",
        )


def legend_below(figure: "Figure", labels: Sequence[str]) -> None:
    """A legend of all, below all axes."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=policy_colour(name), linewidth=2.4) for name in labels]
    figure.legend(
        lines,
        list(labels),
        loc="outside lower center",
        ncols=min(7, len(labels)),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )


def add_grid(axis: "Axes") -> None:
    """Thin grid lines, drawn below everything else."""
    axis.grid(color=MUTED, alpha=0.22, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.minorticks_off()
