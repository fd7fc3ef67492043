"""What docs/performance.md and docs/compat.md say about placement, from files of figures.

`performance.py` puts it on the pages.
"""

from collections.abc import Callable
from typing import Any

import bars

Figures = dict[str, Any]
Load = Callable[[str], Figures | None]
SHAPE = "{layers} x {experts}, {slots:,}, {ranks}"
PUBLISHED = {
    "first layout, log-normal 0.02": "Swift 1.071 with 3,573; default 1.007 with 16,025",
    "first layout, Zipf 0.8": "Swift 1.571 with 2,813; default 1.001 with 16,011",
}
"""What vllm-ascend's own policies were measured to do from like starts; not measured here."""


def asked(load: Load) -> list[str]:
    """Every bar of the planner."""
    return [
        "## Placement: what was asked, and what is",
        "",
        "58 layers x 256 experts, 288 slots, 32 ranks unless said, one thread; the tables are "
        "below. Where two figures are asked for, the second is the stretch.",
        "",
        *bars.table(load),
    ]


def beside(figures: Figures) -> list[str]:
    """What is said below the table of a shape."""
    gaps = ", ".join(f"{name} {gap:.5f}" for name, gap in figures["gaps"].items())
    same = figures["unchanged"]
    lines = [
        f"Shares above the optimum of the linear program, worst layer: {gaps}; 1/65536 of the "
        f"hottest expert is {figures['step']:.5f} of a rank's mean. Where the same load was "
        f"planned on twice, at most {same['moved']} copies moved the second time, "
        f"{same['moved_held']} where the target was met ({same['held']} of {same['plans']} plans).",
        "",
    ]
    if figures["left_out"]:
        why = "; ".join(f"{name}: {why}" for name, why in figures["left_out"].items())
        lines += [f"Left out: {why}.", ""]
    return lines


def windows(load: Load) -> list[str]:
    """The picture of twelve windows."""
    if load("planner") is None:
        return ["OWED", ""]
    return [
        "![What four planners serve, plan and move, window by window](images/planner-windows.svg)",
        "",
        "The first shape, mean over seeds. A batch of a window is served by the plan made "
        "on the window before: after a switch, one window long, no plan fits. `greedy` and "
        "`connected` move nearly all copies every time, `incremental` those that pay.",
        "",
    ]


def even_split(load: Load) -> list[str]:
    """Engines that know no shares: the tables, and the picture of moves against balance."""
    found = load("even_split")
    lines = ["## An even split", ""]
    if found is None:
        return [*lines, "OWED", ""]
    return [
        *lines,
        "Engines that divide an expert evenly among its copies, in the shape that vllm-ascend's "
        "policies are compared on; seeds 0 to 4. `drop-in` is what the engine calls.",
        "",
        *starts(found["figures"], ("drop-in", "swift-like", "greedy")),
        "![Copies moved against imbalance for Zipf 0.8](images/moves-and-balance.svg)",
        "",
        "Zipf 0.8 from the first layout, mean over seeds. Each curve is plans for targets from "
        "0.005 to 0.3.",
        "",
        *curve(found["figures"]["curve"]),
    ]


def curve(figures: Figures) -> list[str]:
    """The points of the picture."""
    lines = [
        "| target | even split: imbalance | moves | shares: imbalance | moves |",
        "|---|---|---|---|---|",
    ]
    for even, level in zip(figures["even"], figures["level"], strict=True):
        cells = [
            f"{even['target']:g}",
            *(
                cell
                for row in (even, level)
                for cell in (f"{row['imbalance']:.4f}", f"{row['moves']:,.0f}")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def starts(figures: Figures, policies: tuple[str, ...]) -> list[str]:
    """max/mean and moves, by start layout and policy."""
    lines = [
        "| Start | policy | max/mean before | after | worst layer | moves |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in figures["starts"].items():
        for policy in policies:
            lines.append(f"| {name} | {policy} | {_ranges(found[policy])} |")
    return [*lines, ""]


def compat(load: Load) -> list[str]:
    """The figures of docs/compat.md."""
    found = load("even_split")
    if found is None:
        return ["OWED", ""]
    figures = found["figures"]
    lines = [
        "| Start | max/mean before | after | worst layer | moves | their own policies |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in figures["starts"].items():
        lines.append(f"| {name} | {_ranges(rows['drop-in'])} | {PUBLISHED.get(name, '')} |")
    for name, row in figures["later"].items():
        lines.append(f"| Zipf 0.8, seed 0: {name} | {_ranges([row])} | |")
    seconds = [rows["seconds"] for rows in figures["starts"].values()]
    return [
        *lines,
        "",
        f"It takes {_range(seconds, '{:.2f}')} s of CPU, one thread.",
        "",
        *_anew(figures["anew"]),
    ]


def _anew(rows: list[Figures]) -> list[str]:
    lines = [
        "A new plan, imbalance (max/mean - 1) under an even split, log-normal 1.05, one draw:",
        "",
        "| Layers x experts, slots, ranks | greedy | best |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {SHAPE.format(**row['shape'])} | {row['greedy']:.4f} | {row['best']:.4f} |"
        )
    behind = [SHAPE.format(**row["shape"]) for row in rows if row["best"] > row["greedy"]]
    if behind:
        lines += ["", f"`greedy` is ahead in {'; '.join(behind)}: it may put two copies on a rank, "
                  "`best` never does."]  # fmt: skip
    return [*lines, ""]


def _ranges(rows: list[Figures]) -> str:
    forms = {"before": "{:.3f}", "after": "{:.3f}", "worst": "{:.3f}", "moves": "{:,.0f}"}
    return " | ".join(_range([row[key] for row in rows], form) for key, form in forms.items())


def _range(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
