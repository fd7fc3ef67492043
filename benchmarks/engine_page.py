"""What docs/performance.md says about rebalancing while serving, from files of figures."""

from collections.abc import Callable, Sequence
from typing import Any

from emulation import GROUP, SLOT_BYTES

Figures = dict[str, Any]
CENTRE, RAW = "centre", "raw"
OURS = "boundary", "locked"
SLOW, FEWER, PART = 1.05, 20.0, 0.8
"""The bars: P99 at most, times less stall at least, part of the gain at least."""
OUTSIDE, COMMIT = 5.0, 100.0
"""The bars of host cost, microseconds."""
INTRODUCTION = (
    "Four ranks, one process each, on an emulated device: a layer is a timed wait for the fullest "
    f"rank and stands for {GROUP}, whose experts of {SLOT_BYTES / GROUP / 1e6:.0f} MB each travel "
    "together on an emulated link (`benchmarks/emulation.py` has all constants). "
    "Routing, votes, tables, shipments and commits are the shipped code, and outputs are checked. "
    "All systems serve the same tokens and execute the same plans over the same link; *perfect* "
    "has the last placement of each load stage from its first step on. The stall of a step is what "
    "it takes beyond the median of the run without balancing on the same tokens and placement; "
    "*none again* is the A/A pair. A bar is judged by the median of the rounds. P99 is that of the "
    "steps of rebalances from one balanced placement to another: in the one behind a switch of "
    "topic most of a slow step is the old placement. On a device four times as fast, with steps of "
    "20 ms (`--slower 0.25`), what four ranks' hosts do on two cores weighs four times as much, "
    "and none of the bars holds."
)


def text(figures: Figures) -> list[str]:
    """Everything of engine.json."""
    lines = [INTRODUCTION, "", *_bars(figures)]
    if CENTRE in figures:
        lines += _centre(figures[CENTRE])
    if RAW in figures:
        lines += ["Nothing emulated, not judged: what the processes of this machine do, four ranks "
                  "on its cores.", "",
                  *_systems(figures[RAW], list(figures[RAW]["systems"]))]  # fmt: skip
    return lines


def _centre(centre: Figures) -> list[str]:
    """The tables of the centre."""
    judged = [name for name in centre["systems"] if not name.endswith((", own", ", greedy"))]
    own = [name for name in centre["systems"] if name.endswith((", own", ", greedy"))]
    lines = _systems(centre, judged)
    if own:
        lines += ["Every system with its own planner, not judged: `incremental` and lagged shares "
                  "for ours, greedy plans made anew for the others.", "",
                  *_systems(centre, own)]  # fmt: skip
    return lines


def _bars(figures: Figures) -> list[str]:
    """Each bar at each point, for both paths; value, least and most of all rounds."""
    lines = [
        f"| Point | path | P99 in rebalances over the placement held: at most {SLOW} | "
        "the same of all rounds' steps together | "
        f"stall of stop-the-world over ours: at least {FEWER:g} | "
        f"part of the gain of a perfect placement: at least {PART} | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, point in figures.items():
        for path, bars in (point["bars"] or {}).items():
            slow, *others = (_spread(bars[key]) for key in ("p99", "stall", "throughput"))
            cells = [slow, f"{bars['p99_pooled']:.2f}", *others]
            lines.append(f"| {name} | {path} | {' | '.join(cells)} | {_met(bars)} |")
    return [*lines, "", *_verdict(figures)]


def missed(bars: Figures) -> list[str]:
    """Which bars a path misses at a point; a figure that is no number meets none."""
    held: dict[str, bool] = {
        "P99": bars["p99"]["median"] <= SLOW,
        "stall": bars["stall"]["median"] >= FEWER,
        "throughput": bars["throughput"]["median"] >= PART,
    }
    return [name for name, met in held.items() if not met]


def _met(bars: Figures) -> str:
    found = missed(bars)
    return f"**no**: {', '.join(found)}" if found else "yes"


def _verdict(figures: Figures) -> list[str]:
    """One line a path: a bar holds where it holds at all points."""
    lines = []
    for path in OURS:
        judged = {name: point["bars"][path] for name, point in figures.items() if point["bars"]}
        failed = {name: found for name, bars in judged.items() if (found := missed(bars))}
        told = "; ".join(f"{name}: {', '.join(found)}" for name, found in failed.items())
        where = f"missed at {told}" if failed else f"met at all {len(judged)} points"
        lines.append(f"`{path}`: {where}.")
    return [" ".join(lines), ""]


def _systems(point: Figures, names: Sequence[str]) -> list[str]:
    """The table of a point: stall of a rebalance, step times by load stage, rebalances."""
    stages = range(len(next(iter(point["systems"].values()))["stages"]))
    heads = [f"stage {stage + 1}: P50 / P99, ms" for stage in stages]
    lines = [
        "| System | rebalances | copies | steps of one | stall of one, ms: mean | min | max | "
        f"total | {' | '.join(heads)} | rows per second | CPU of a step, ms |",
        f"|---|{'---|' * (9 + len(heads))}",
    ]
    for name in names:
        lines.append(f"| {name} | {' | '.join(_cells(point['systems'][name]))} |")
    return [*lines, ""]


def _cells(row: Figures) -> list[str]:
    stall = row["stall"]
    each = [f"{stall[key]:.1f}" for key in ("mean", "min", "max")] if stall else ["", "", ""]
    return [
        str(row["rebalances"]),
        f"{row['copies']:,}",
        f"{row['steps']:.1f}" if stall else "",
        *each,
        _spread(row["total_stall"], "{:.0f}"),
        *(f"{stage['p50']:.1f} / {stage['p99']:.1f}" for stage in row["stages"]),
        _spread(row["rate"], "{:,.0f}"),
        f"{row['cpu']['median']:.1f}",
    ]


def _spread(found: Figures, form: str = "{:.2f}") -> str:
    low, high = form.format(found["lowest"]), form.format(found["highest"])
    return f"{form.format(found['median'])} ({low} to {high})"


def host(figures: Figures) -> list[str]:
    """Everything of host_cost.json."""
    lines = [
        "Host time on one rank, microseconds, median (least to most of the rounds).",
        "",
        "| What | Bar | Measured | Met |",
        "|---|---|---|---|",
    ]
    for row in figures["rows"]:
        bar, value = row["bar"], row["microseconds"]
        asked = "reported" if bar is None else f"at most {bar:g}"
        met = "" if bar is None else ("yes" if value["median"] <= bar else "**no**")
        lines.append(f"| {row['what']} | {asked} | {_spread(value, '{:,.2f}')} | {met} |")
    return [*lines, ""]


Table = Callable[[Figures], list[str]]
PARTS: dict[str, tuple[str, Table]] = {
    "Rebalancing while serving": ("engine", text),
    "Host cost of the engine": ("host_cost", host),
}
"""By title: the file of figures, and what is said of them."""
