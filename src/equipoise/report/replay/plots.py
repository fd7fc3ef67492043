"""Pictures of the page of `equipoise replay`: imbalance over steps, rows, slots, moves."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from equipoise.report.placement.heat_maps import expert_heat_map, rank_heat_map
from equipoise.report.placement.spread import Reals
from equipoise.report.replay.decision import Decision
from equipoise.report.replay.inputs import OURS
from equipoise.report.replay.replay import Outcome, Replay
from equipoise.report.replay.step_price import DeadZonePrice
from equipoise.report.run.metrics import relative_load
from equipoise.report.svg import MUTED, Picture, draw
from equipoise.report.text import pluralize, printable

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENGINE_COLOURS = {
    "": "#d55e00",
    "vllm": "#c98a00",
    "sglang": "#7a5ba6",
    "vllm-ascend": "#c2699f",
    "trtllm": "#009e73",
    OURS: "#3b78d0",
}
"""By the name of the engine, which is empty without a balancer."""
DASHES = (0, (4, 2))
MAX_LINES = 6
MAX_POINTS = 250
"""Of a line: each is the mean of as many steps as that takes, or a long trace is a carpet."""
CARET_UP = 6
"""matplotlib's triangle with its tip at the point. A vertical tick would look like a peak."""
MAX_TICKS = 60
"""Rebalances that are marked on a line; of more, as many, evenly chosen."""
MAX_NAME = 34
GIB = 2**30
STEPS_SUMMED = "All steps summed."


def pictures(replay: Replay, decision: Decision) -> tuple[Picture, ...]:
    """Those that there are figures for. Raises PlotsMissing without matplotlib."""
    lines = compared(replay, decision)
    plots = (
        imbalance_curves(replay, lines),
        rank_rows(replay, lines),
        expert_rows(replay),
        throughput_by_slots(replay),
        moves(replay, lines),
    )
    return tuple(picture for picture in plots if picture is not None)


def compared(replay: Replay, decision: Decision) -> tuple[Outcome, ...]:
    """No balancer, the best of each engine, then ours with more slots and without; at most six.

    The best of an engine is what the decision names, or what gains most where it says to leave it
    off.
    """
    found = [replay.now]
    for engine, best in decision.by_engine.items():
        of_engine = [one for one in replay.outcomes[1:] if one.engine == engine]
        found.append(best or max(of_engine, key=replay.gain))
    ours = [one for one in replay.outcomes if one.engine == OURS]
    for more_slots in (True, False):
        of_kind = [one for one in ours if (one.slots > replay.now.slots) is more_slots]
        if of_kind:
            found.append(_best_or_shown(of_kind, found, replay))
    return tuple(dict.fromkeys(found))[:MAX_LINES]


def _best_or_shown(of_kind: list[Outcome], found: list[Outcome], replay: Replay) -> Outcome:
    """What is shown already, or else what gains most."""
    shown = [one for one in of_kind if one in found]
    return shown[0] if shown else max(of_kind, key=replay.gain)


def winner(replay: Replay, outcomes: tuple[Outcome, ...]) -> Outcome | None:
    """What gains most of these, whether or not that is enough; None where there is no balancer."""
    return max(outcomes[1:], key=replay.gain, default=None)


def colour(engine: str) -> str:
    """Grey for an engine that this palette does not know."""
    return ENGINE_COLOURS.get(engine, MUTED)


def short_name(name: str) -> str:
    """Without control characters, and no longer than a picture has room for."""
    text = printable(name)
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "\u2026"


def smoothed(steps: "npt.NDArray[np.int64]", values: Reals, width: int) -> tuple[Reals, Reals]:
    """Means of `width` steps each: their middles and values, without those that have no figure."""
    known = ~np.isnan(values)
    places = steps[known] // width
    counts = np.bincount(places)
    sums = np.bincount(places, weights=values[known])
    filled = np.flatnonzero(counts)
    middles: Reals = (filled * width + (width - 1) / 2).astype(np.float64)
    return middles, sums[filled] / counts[filled]


def imbalance_curves(replay: Replay, lines: tuple[Outcome, ...]) -> Picture:
    """A line for each, with a mark where a rebalance was complete."""
    width = -(-replay.steps // MAX_POINTS)
    knee = _knee(replay)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        if knee is not None:
            axis.axhspan(0.0, knee, color=MUTED, alpha=0.16, linewidth=0)
        for one in lines:
            _curve(axis, one, _dashes(one, lines), width)
        axis.set_xlim(0, max(replay.steps - 1, 1))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("step")
        axis.set_ylabel("imbalance, max / mean \u2212 1 of the ranks")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _add_grid(axis)
        _label_beside(axis, replay, lines, knee)

    return Picture(
        "Imbalance, step by step",
        " ".join(_curve_caption(lines, width, knee)),
        draw("imbalance", 4.4, paint),
    )


def _knee(replay: Replay) -> float | None:
    """Imbalance up to which a step takes equally long; None where the price is no dead zone."""
    price = replay.inputs.price(1.0)
    return price.dead_zone.knee - 1.0 if isinstance(price, DeadZonePrice) else None


def _curve_caption(lines: tuple[Outcome, ...], width: int, knee: float | None) -> Iterator[str]:
    yield "Mean over layers."
    if width > 1:
        yield f"Each point is the mean of {width:,} steps."
    most = max(len(_effective(one)) for one in lines)
    if most:
        few = f"; of more than {MAX_TICKS} on a line, as many are shown" if most > MAX_TICKS else ""
        yield f"A triangle is a rebalance, where its last layer took effect{few}."
    if knee is not None:
        yield "In the grey band a step takes equally long, so less imbalance gains nothing."


def _effective(one: Outcome) -> list[int]:
    """Steps at which rebalances that changed anything were complete."""
    moves = [move for move in one.rebalances if move.layers and move.committed < one.served]
    return [move.committed for move in moves]


def _dashes(one: Outcome, lines: tuple[Outcome, ...]) -> object:
    """Dashed is the second line of an engine, which has the colour of the first."""
    first = next(other for other in lines if other.engine == one.engine)
    return "-" if one is first else DASHES


def _curve(axis: "Axes", one: Outcome, dashes: object, width: int) -> None:
    tone, ours = colour(one.engine), one.engine == OURS
    across, up = smoothed(one.steps, one.imbalance, width)
    axis.plot(
        across, up, color=tone, linewidth=1.8 if ours else 1.3, linestyle=dashes,
        zorder=5 if ours else 3,
    )  # fmt: skip
    if not len(across):
        return
    steps = _effective(one)
    shown = steps[:: -(-len(steps) // MAX_TICKS) or 1]
    axis.plot(
        shown, np.interp(shown, across, up), color=tone, linestyle="none",
        marker=CARET_UP, markersize=5.5, markeredgewidth=0, zorder=6,
    )  # fmt: skip


def _label_beside(
    axis: "Axes", replay: Replay, lines: tuple[Outcome, ...], knee: float | None
) -> None:
    """Right of the axis, the most uneven above, each in the colour of its line."""
    ranked = sorted(lines, key=lambda one: -one.mean_imbalance)
    best = winner(replay, lines)
    for place, one in enumerate(ranked):
        top = 0.985 - place * 0.145
        second = "  (dashed)" if _dashes(one, lines) == DASHES else ""
        _text(axis, top, short_name(one.name) + second, colour(one.engine), one is best)
        words = f"{one.slots:,} slots, mean {one.mean_imbalance:.4f}"
        _text(axis, top - 0.055, words, MUTED, False)
    if knee is not None:
        _text(axis, 0.985 - len(ranked) * 0.145, f"grey: dead zone, up to {knee:.3f}", MUTED, False)


def _text(axis: "Axes", height: float, words: str, tone: str, bold: bool) -> None:
    axis.text(
        1.02, height, words, color=tone, transform=axis.transAxes, va="top", fontsize=9,
        fontweight="bold" if bold else "normal",
    )  # fmt: skip


def _add_grid(axis: "Axes") -> None:
    axis.grid(color=MUTED, alpha=0.22, linewidth=0.6)
    axis.set_axisbelow(True)


def rank_rows(replay: Replay, lines: tuple[Outcome, ...]) -> Picture | None:
    """Without a balancer and with what gains most; None where no rank had a row."""
    best = winner(replay, lines)
    both = [replay.now] if best is None else [replay.now, best]
    if not all(one.rank_rows.any() for one in both):
        return None
    loads = {
        f"{short_name(one.name)}, {one.slots:,} slots": relative_load(one.rank_rows) for one in both
    }
    return rank_heat_map(
        replay.inputs.source.layers,
        loads,
        f"{STEPS_SUMMED} Sums look more even than the steps that they are of.",
    )


def expert_rows(replay: Replay) -> Picture | None:
    """None where no expert had a row."""
    if not replay.expert_rows.any():
        return None
    load = relative_load(replay.expert_rows)
    return expert_heat_map(replay.inputs.source.layers, load, STEPS_SUMMED)


def throughput_by_slots(replay: Replay) -> Picture | None:
    """The best of each engine in each number of slots; None where none was replayed in several."""
    best = _best_by_slots(replay)
    if not any(len(by_slots) > 1 for by_slots in best.values()):
        return None
    slots = sorted({number for by_slots in best.values() for number in by_slots})
    rooms = {one.slots: one.batch for one in replay.outcomes}
    bound = any(room < 1 for room in rooms.values())

    def paint(figure: "Figure") -> None:
        if bound:
            axis, room = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
            _room(room, {number: rooms[number] for number in slots})
        else:
            axis = room = figure.subplots()
        axis.axhline(0.0, color=colour(""), linewidth=1.1, linestyle=DASHES)
        for place, (engine, by_slots) in enumerate(best.items()):
            gains = [100 * replay.gain(one) for one in by_slots.values()]
            # Thinner above wider: lines that coincide stay visible.
            wide = 1.4 + 0.8 * (len(best) - 1 - place)
            axis.plot(
                list(by_slots), gains, color=colour(engine), label=engine, linewidth=wide,
                marker="o", markersize=wide + 3.5,
            )  # fmt: skip
        axis.set_ylabel("throughput, % more")
        axis.margins(y=0.12)
        room.set_xticks(slots, [f"{number:,}" for number in slots])
        room.set_xlabel("slots of a layer, over all ranks")
        _add_grid(axis)
        figure.legend(
            loc="outside upper right", ncols=len(best), frameon=False, fontsize=9, handlelength=1.4
        )

    more = (
        " Below, the part of the recorded batch that the KV cache has room for: what is red, more "
        "slots have taken from it."
    )
    return Picture(
        "Throughput by slots",
        "Against no balancer, the dashed line, with the best of each engine in each number of "
        f"slots.{more if bound else ''}",
        draw("slots", 4.4 if bound else 3.4, paint),
    )


def _best_by_slots(replay: Replay) -> dict[str, dict[int, Outcome]]:
    """By engine, then by slots, ascending."""
    found: dict[str, dict[int, Outcome]] = {}
    for one in sorted(replay.outcomes[1:], key=lambda one: one.slots):
        by_slots = found.setdefault(one.engine, {})
        by_slots[one.slots] = max(by_slots.get(one.slots, one), one, key=replay.gain)
    return found


def _room(axis: "Axes", rooms: Mapping[int, float]) -> None:
    slots, parts = list(rooms), np.array([100 * room for room in rooms.values()])
    width = 0.5 * min(np.diff(slots), default=1)
    axis.bar(slots, parts, color="#82aedb", width=width, linewidth=0)
    axis.bar(slots, 100 - parts, bottom=parts, color=colour(""), width=width, alpha=0.7)
    for number, part in zip(slots, parts, strict=True):
        axis.annotate(
            f"{part:.0f} %", (number, part), xytext=(0, -3), textcoords="offset points",
            ha="center", va="top", fontsize=9, color="#22304a",
        )  # fmt: skip
    axis.set_ylim(0, 100)
    axis.set_ylabel("batch, %")


def moves(replay: Replay, lines: tuple[Outcome, ...]) -> Picture | None:
    """Weights that moved, and pauses where there were any; None where nothing moved."""
    moving = [one for one in lines if one.cadence is not None]
    if not any(one.copies for one in moving):
        return None
    paused = [one.pauses for one in moving]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(1, 2 if any(paused) else 1, sharey=True, squeeze=False)[0]
        _bars(axes[0], moving, *_moved(replay, moving))
        if any(paused):
            texts = [f"{seconds:,.3g} s" for seconds in paused]
            _bars(axes[1], moving, "serving paused, s", paused, texts)
        names = [f"{short_name(one.name)}, {one.slots:,}" for one in moving]
        axes[0].set_yticks(range(len(moving)), names)
        axes[0].set_ylim(len(moving) - 0.4, -0.6)

    pauses = (
        " Right: seconds that serving stood still for them; moves that are overlapped with the "
        "forward pass do not pause it."
    )
    return Picture(
        "What moves, and what it costs",
        "Over the whole trace, with the number of plans; the number behind a name is of slots."
        f"{pauses if any(paused) else ''}",
        draw("moves", 1.0 + 0.36 * max(len(moving), 2), paint),
    )


def _moved(replay: Replay, moving: list[Outcome]) -> tuple[str, list[float], list[str]]:
    """What the axis says, and the length and text of each bar."""
    expert = replay.inputs.expert
    plans = [pluralize(len(one.rebalances), "plan") for one in moving]
    if expert is None:
        copies = [float(one.copies) for one in moving]
        texts = [f"{one.copies:,}, {text}" for one, text in zip(moving, plans, strict=True)]
        return "copies of experts that moved, of one layer each", copies, texts
    sizes = [one.copies * expert.size / GIB for one in moving]
    texts = [f"{size:,.1f}, {text}" for size, text in zip(sizes, plans, strict=True)]
    return "weights that moved, GiB", sizes, texts


def _bars(
    axis: "Axes", moving: list[Outcome], words: str, lengths: list[float], texts: list[str]
) -> None:
    tones = [colour(one.engine) for one in moving]
    axis.barh(range(len(moving)), lengths, color=tones, height=0.62, linewidth=0)
    for row, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        axis.annotate(
            text, (length, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.set_xlim(0, max([*lengths, 1e-3]) * 1.3)
    axis.set_xlabel(words)
    axis.locator_params(axis="x", nbins=6)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    _add_grid(axis)
    axis.grid(axis="y", visible=False)
