"""Colours and line styles of policies: the best three and the reference; all others are grey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.report.simulation.result import SimulationResult
from equipoise.report.svg import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE_COLOUR = "#3b78d0"
BEST_COLOURS = ("#d55e00", "#009e73", "#c2699f")
"""Apart from each other and from the reference also for colour-blind eyes (Okabe and Ito)."""


@dataclass(frozen=True)
class PolicyStyle:
    """How policies are drawn: so many lines cannot all be told apart, and few matter.

    Attributes:
        colours: by label, of those that are not grey.
        reference: label of the policy that others are compared with.
    """

    colours: Mapping[str, str]
    reference: str

    @classmethod
    def of(cls, comparison: SimulationResult) -> "PolicyStyle":
        """Colours for the reference and the three others with most tokens a second."""
        reference = comparison.reference
        others = [
            result
            for result in comparison.results
            if result is not reference and result.interval("throughput").mean > 0
        ]
        others.sort(key=lambda result: -result.interval("throughput").mean)
        best = (result.named_policy.label for result in others)
        colours = dict(zip(best, BEST_COLOURS, strict=False))
        label = reference.named_policy.label
        return cls({label: REFERENCE_COLOUR, **colours}, label)

    def colour(self, label: str) -> str:
        """Grey for all but a few."""
        return self.colours.get(label, MUTED)

    def line_width(self, label: str) -> float:
        """Of its line."""
        if label == self.reference:
            return 2.4
        return 1.7 if label in self.colours else 0.9

    def z_order(self, label: str) -> int:
        """The reference above the others, grey below all."""
        if label == self.reference:
            return 5
        return 4 if label in self.colours else 3

    def label_beside(self, axis: "Axes", rows: Sequence[tuple[str, str]]) -> None:
        """Right of the axis, from the top: (label, words after it), each in its colour."""
        step = min(0.075, 1.0 / max(len(rows), 1))
        for place, (label, words) in enumerate(rows):
            axis.text(
                1.02,
                0.985 - place * step,
                f"{label}  {words}".rstrip(),
                color=self.colour(label),
                transform=axis.transAxes,
                va="top",
                fontsize=9,
                fontweight="bold" if label in self.colours else "normal",
            )

    def legend_below(self, figure: "Figure", labels: Sequence[str]) -> None:
        """A legend of those in colour, and one entry for the others, below all axes."""
        from matplotlib.lines import Line2D

        named = [label for label in labels if label in self.colours]
        names = named + ["the others"] * (len(named) < len(labels))
        lines = [Line2D([], [], color=self.colour(name), linewidth=2.4) for name in names]
        figure.legend(
            lines,
            names,
            loc="outside lower center",
            ncols=len(names),
            frameon=False,
            fontsize=9,
            handlelength=1.2,
        )


def add_grid(axis: "Axes") -> None:
    """Thin grid lines, drawn below everything else."""
    axis.grid(color=MUTED, alpha=0.22, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.minorticks_off()
