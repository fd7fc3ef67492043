"""Parts that several plots share: marks at phase switches and rebalances, scales, labels."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from equipoise.demo.run_record import RunRecord, VariantRecord
from equipoise.report.run.summary import committed_rebalances
from equipoise.report.svg import MUTED, TEXT_COLOUR
from equipoise.report.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

MAX_NAME = 24


def mark_switches(axis: "Axes", record: RunRecord, colour: str) -> None:
    """A line at the first step of every phase but the first."""
    for step in record.switch_steps:
        axis.axvline(step, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))


def label_phases(axis: "Axes", record: RunRecord) -> None:
    """The name of each phase above its steps."""
    edges = [0, *record.switch_steps, record.steps]
    for name, first, last in zip(record.phases, edges, edges[1:], strict=False):
        text = printable(name)
        short = text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "\u2026"
        axis.annotate(
            short,
            ((first + last) / 2, 1.0),
            xycoords=axis.get_xaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=MUTED,
            fontsize=9,
        )


def mark_rebalances(axis: "Axes", variant: VariantRecord | None) -> None:
    """A small mark under the axis where a rebalance took effect."""
    steps = [rebalance.step for rebalance in committed_rebalances(variant)] if variant else []
    axis.plot(
        steps,
        [0.0] * len(steps),
        # The layout would make room for an empty line at the figure's corner.
        in_layout=False,
        linestyle="none",
        marker=6,
        markersize=5,
        color=TEXT_COLOUR,
        clip_on=False,
        transform=axis.get_xaxis_transform(),
        zorder=5,
    )


def colour_map(stops: Sequence[str]) -> "LinearSegmentedColormap":
    """A colour map through `stops` at equal distances."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("equipoise", list(stops), N=256)


def colour_bar(figure: "Figure", axes: "list[Axes]", words: str) -> None:
    """The colour bar of the first image of `axes`."""
    bar = figure.colorbar(axes[0].images[0], ax=axes, aspect=30, pad=0.015, extend="max")
    bar.set_label(words, fontsize=9)
    bar.ax.tick_params(length=0)
    bar.ax.spines[:].set_visible(False)


def hide_spines(axis: "Axes") -> None:
    """No spines: the colours are the frame."""
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, pad=7)


def label_line_ends(axis: "Axes", ends: Mapping[str, tuple[float, str]], least_gap: float) -> None:
    """Names right of the lines, each in its colour, pushed apart to `least_gap` of the height.

    `ends`: name -> (height of the line's end as a fraction of the axis, colour).
    """
    place = -1.0
    for name, (height, colour) in sorted(ends.items(), key=lambda item: item[1][0]):
        place = max(height, place + least_gap)
        axis.text(
            1.008, place, name, color=colour, transform=axis.transAxes, va="center", fontsize=9.5
        )
