"""An epoch as a Gantt chart: what every rank did while weights moved and the model went on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.observe.spans import Traced
from equipoise.demo.record import Epoch, RunRecord
from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import INK, MUTED, PHASES, WORK
from equipoise.report.summary import committed, main_variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 8
"""Ranks that are drawn: more would be a carpet."""
LANES = (Track.REBALANCE, Track.COMPUTE, Track.TRANSFER, Track.COPY, Track.PLANNER, Track.VOTE)
NAMES = {
    Track.REBALANCE: "phase",
    Track.COMPUTE: "steps",
    Track.TRANSFER: "transfer",
    Track.COPY: "rounds",
}
MARGIN = 0.06
"""Of the epoch's length, shown before and behind it."""
SHORTEST = 0.0015
"""Of the width: shorter work is drawn so long, to be seen at all."""


@dataclass(frozen=True)
class Extent:
    """Wall-clock seconds from which to which the picture goes, and the epoch within."""

    begin: float
    end: float
    first: float
    last: float


def epoch_gantt(record: RunRecord) -> Picture | None:
    """The committed epoch that moved most; None where nothing was moved under observation."""
    epoch = telling_epoch(record)
    extent = None if epoch is None else extent_of(epoch, record.spans)
    if epoch is None or extent is None:
        return None
    ranks = sorted({span.rank for span in record.spans})[:MOST_RANKS]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
        for axis, rank in zip(axes, ranks, strict=True):
            _rank(axis, rank, _within(record.spans, rank, extent), extent)
        _legend(axes[0], {span.name for span in record.spans if span.track == Track.REBALANCE})
        axes[-1].set_xlabel("milliseconds since the epoch was opened")

    return Picture(
        f"Epoch {epoch.number}, rank by rank",
        f"Opened before step {epoch.planned_at}, installed before step {epoch.step}: "
        f"{epoch.slots_moved} copies. The steps of the model go on above the work that is done "
        "beside them: a plan, votes, and rounds in which weights travel. A phase changes only "
        "between two steps. As the host sees it; ranks that share processor cores take turns.",
        draw("gantt", 0.9 + 1.25 * len(ranks), paint),
    )


def telling_epoch(record: RunRecord) -> Epoch | None:
    """The committed epoch with most copies, the first of several; none without a copy."""
    main = main_variant(record)
    moved = [epoch for epoch in committed(main) if epoch.slots_moved] if main else []
    return max(moved, key=lambda epoch: epoch.slots_moved, default=None)


def extent_of(epoch: Epoch, spans: Sequence[Traced]) -> Extent | None:
    """When it was, over all ranks; None where its spans were not kept."""
    own = [
        span
        for span in spans
        if span.track == Track.REBALANCE and span.details.get("epoch") == epoch.number
    ]
    if not own:
        return None
    first, last = min(span.begin for span in own), max(span.end for span in own)
    margin = (last - first) * MARGIN
    return Extent(first - margin, last + margin, first, last)


def _within(spans: Sequence[Traced], rank: int, extent: Extent) -> list[Traced]:
    """Of one rank, cut to the extent."""
    return [
        span
        for span in spans
        if span.rank == rank and span.end > extent.begin and span.begin < extent.end
    ]


def _rank(axis: "Axes", rank: int, spans: Sequence[Traced], extent: Extent) -> None:
    for lane, track in enumerate(LANES):
        for span in spans:
            if span.track == track and not span.name.startswith("epoch"):
                _bar(axis, lane, span, extent)
    axis.set_ylim(len(LANES) - 0.4, -0.6)
    axis.set_yticks(range(len(LANES)), [NAMES.get(track, str(track)) for track in LANES])
    axis.tick_params(axis="y", length=0, labelsize=7.5)
    axis.set_xlim((extent.begin - extent.first) * 1e3, (extent.end - extent.first) * 1e3)
    axis.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", labelpad=26)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=MUTED, alpha=0.2, linewidth=0.6)
    axis.set_axisbelow(True)
    for edge in (0.0, (extent.last - extent.first) * 1e3):
        axis.axvline(edge, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))


def _bar(axis: "Axes", lane: int, span: Traced, extent: Extent) -> None:
    begin, end = max(span.begin, extent.begin), min(span.end, extent.end)
    width = max(end - begin, (extent.end - extent.begin) * SHORTEST)
    axis.barh(
        lane,
        width * 1e3,
        left=(begin - extent.first) * 1e3,
        height=0.78,
        color=_colour(span),
        linewidth=0,
    )


def _colour(span: Traced) -> str:
    return (PHASES if span.track == Track.REBALANCE else WORK).get(
        span.name if span.track == Track.REBALANCE else span.track, MUTED
    )


def _legend(axis: "Axes", present: set[str]) -> None:
    """The colours of the phases; every other lane has one colour and its name beside it."""
    from matplotlib.patches import Patch

    shown = [name for name in PHASES if name in present]
    axis.legend(
        handles=[Patch(color=PHASES[name], label=name) for name in shown],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(shown),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        columnspacing=1.4,
    )
