"""Tables of docs/performance.md on shares, variance, decoding and moves, from their figures."""

from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]


def shares(figures: Figures) -> list[str]:
    """Lagged shares beside static ones, and the bar."""
    rows = [*figures["recorded"], *figures["generated"]]
    lines = [
        "A placement (`connected`) and its shares are planned on 16 steps; then come 16 steps of "
        "another kind of text, and no weight moves. Imbalance is the mean over those 16; rows are "
        "routed by the engine's own code, and lagged shares renewed by its own rule, from "
        "sub-windows of 1, 2 or 4 steps. *Foreseen* are static shares solved on the very 16 steps "
        "that they are judged on. Last two columns: where the text goes on, and renewing shares "
        "cannot gain much. 32 experts are the shipped model's, on its recorded routing; 64 are the "
        "generator's.",
        "",
        "| experts, slots, ranks | static | lagged, 1 step | 2 steps | 4 steps | foreseen | exact "
        "| lagged (2) below static: bar 10% | least to most | static, same text | lagged (2) |",
        f"|---|{'---|' * 10}",
    ]
    for row in rows:
        switch, steady = row["switch"], row["steady"]["imbalance"]
        names = ("static", "lagged_1", "lagged_2", "lagged_4", "foreseen", "exact")
        below = switch["below_static"]["lagged_2"]
        cells = [
            f"{row['experts']}, {row['slots']}, {row['ranks']}",
            *(f"{switch['imbalance'][name]:.4f}" for name in names),
            f"{below['mean']:.1%}"
            if row in figures["recorded"]
            else f"{below['mean']:.1%}, no bar",
            f"{below['least']:.1%} to {below['most']:.1%}",
            f"{steady['static']:.4f}",
            f"{steady['lagged_2']:.4f}",
        ]
        lines.append(_line(cells))
    worst = min(row["switch"]["below_static"]["lagged_2"]["mean"] for row in figures["recorded"])
    verdict = "met" if worst >= 0.1 else "missed"
    return [*lines, "", f"The bar is {verdict}: {worst:.1%} at least.", ""]


def variance(figures: Figures) -> list[str]:
    """What knowing variance is worth, for level and for even shares."""
    lines = [
        "Imbalance of the batches after a plan, beside that of `connected` with `sigma=0`. *Same*: "
        "16 steps of one kind of text, then 16 more; *mixed*: a whole pass with three kinds, then "
        "the pass of another seed; *generated*: windows of the generator, whose experts vary "
        "independently. *Sigma* is what `plan` ships; the trades below it are those of a prototype "
        "(`benchmarks/risk.py`). Bar for keeping the covariance: 3% below on recorded routing.",
        "",
    ]
    for split in ("level", "even"):
        rows = [row for row in figures["rows"] if row["split"] == split]
        heads = [f"{row['kind']}, {row['ranks']} ranks, {row['slots']} slots" for row in rows]
        lines += [_line([f"{split} shares", *heads]), f"|---|{'---|' * len(heads)}"]
        lines.append(_line(["`sigma=0`", *(f"{r['imbalance']['sigma 0']:.4f}" for r in rows)]))
        for way in list(rows[0]["imbalance"])[1:]:
            change = [r["imbalance"][way] / r["imbalance"]["sigma 0"] - 1.0 for r in rows]
            lines.append(_line([way, *(f"{part:+.1%}" for part in change)]))
        lines.append("")
    return lines


def locality(figures: Figures) -> list[str]:
    """Rows that stay on their rank."""
    lines = [
        "The shipped model's recorded routing, 16 steps behind the window that a placement "
        "(`connected`) was planned on, exact shares; every rank has its even part of each batch. "
        "*At home*: part of the rows whose replica is on their own rank, as exact shares divide "
        "them (`any`) and with `locality: prefer`; imbalance, both as routed, beside it.",
        "",
        "| ranks, slots | batches | 1 / ranks | at home: any | prefer | imbalance: any | prefer |",
        f"|---|{'---|' * 6}",
    ]
    for row in figures["rows"]:
        ways = [row["ways"][name] for name in ("any", "prefer")]
        cells = [
            f"{row['ranks']}, {row['slots']}",
            str(row["batches"]),
            f"{1.0 / row['ranks']:.1%}",
            *(f"{way['home']:.1%}" for way in ways),
            *(f"{way['imbalance']:.4f}" for way in ways),
        ]
        lines.append(_line(cells))
    return [*lines, ""]


def decoding(figures: Figures) -> list[str]:
    """Experts that the fullest rank runs."""
    lines = [
        "Most experts that a rank runs in a batch and layer, mean, while the shipped model decodes "
        "so many sequences: each costs its weights. Slots beyond 32 are second copies. *By "
        "shares*: as an engine with shares sends rows; *any copy*: as one without. *Matched*: in "
        "every batch all rows of an expert to one copy, chosen on the batch itself; not in the "
        "engine yet. *Bound*: experts that run, over ranks, rounded up.",
        "",
        "| sequences | ranks, slots | `tokens`, any copy | by shares | `active_experts`, by shares "
        "| `tokens`, matched | `active_experts`, matched | bound |",
        f"|---|{'---|' * 7}",
    ]
    found = {(r["sequences"], r["ranks"], r["slots"], r["objective"]): r for r in figures["rows"]}
    for (sequences, ranks, slots, goal), row in found.items():
        if goal != "tokens":
            continue
        active = found[sequences, ranks, slots, "active_experts"]
        told = (row["even"], row["split"], active["split"], row["matched"], active["matched"])
        cells = [str(sequences), f"{ranks}, {slots}"]
        lines.append(_line([*cells, *(f"{most:.2f}" for most in (*told, row["bound"]))]))
    return [*lines, ""]


def moving(figures: Figures) -> list[str]:
    """What moving more is worth."""
    lines = [
        "Incremental plans, window after window. *Hysteresis*: how much hotter, by load per copy, "
        "an expert must be than the one whose copy it takes, minus 1; *drip*: copies a layer and "
        "call that change hands for a tenth, where the target is missed. Bars: 1% of slots moved "
        "while traffic goes on, 6% at a switch, the next window within 15% of greedy's (32 ranks).",
        "",
        "| loads, ranks, slots | way | moved | at a switch | planned | next window | over greedy's "
        "| batches |",
        f"|---|{'---|' * 7}",
    ]
    for row in figures["rows"]:
        greedy = row["ways"]["greedy"]["next"]
        for way, told in row["ways"].items():
            cells = [
                f"{row['name']}, {row['ranks']}, {row['slots']}",
                way,
                f"{told['moved_steady']:.2%}",
                f"{told['moved_switch']:.2%}",
                f"{told['plan']:.4f}",
                f"{told['next']:.4f}",
                f"{told['next'] / greedy - 1.0:+.1%}",
                f"{told['iter']:.4f}",
            ]
            lines.append(_line(cells))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
