"""What docs/performance.md says about placement in vLLM, from its file of figures."""

from collections.abc import Callable, Sequence
from typing import Any

Figures = dict[str, Any]
STOCK, POLICY, ENGINE = "stock", "(a) policy", "(b) engine"
MOVES, STOCK_MOVES, BALANCE, ENGINE_MOVES, COMMIT = 0.05, 0.40, 0.99, 0.01, 20.0
"""The bars."""


def text(figures: Figures) -> list[str]:
    """The whole section."""
    lines = [
        f"vLLM {figures['vllm']}'s own functions, and ours in their place, in one run "
        "(`benchmarks/vllm_policy.py`): 58 layers x 256 experts, 288 slots, 32 ranks where nothing "
        "else is said. *Steady* windows are fresh samples of one log-normal popularity, a million "
        "tokens a layer; with *drift* each expert's popularity wanders by 5% a window. Plans are "
        "judged on the window behind the one they were made on. *Moved*: copies that ranks fetch, "
        "as part of all slots. *Balancedness*: mean by largest rank, both summed over layers, as "
        "vLLM's log has it. (a) and stock divide an expert evenly; (b) by shares. Median, and in "
        f"brackets least to most, of {figures['rebalances']} rebalances of each of "
        f"{figures['seeds']} seeds; the first plan of each, from vLLM's first map, is told apart.",
        "",
        *_bars(figures),
    ]
    for row in figures["traffic"]:
        lines += _traffic(row)
    return [*lines, *_elsewhere(figures["elsewhere"]), *_curve(figures["curve"]),
            *_commit(figures["commit"])]  # fmt: skip


def _bars(figures: Figures) -> list[str]:
    steady = figures["traffic"][0]["rivals"]
    ours, stock, engine = (steady[name] for name in (POLICY, STOCK, ENGINE))
    ratio, cold = (figures["commit"][name] for name in ("ratio", "ratio_cold"))
    rows = (
        ("slots that stock moves, steady", f"over {STOCK_MOVES:.0%}", _part(stock["moved"]),
         stock["moved"]["lowest"] > STOCK_MOVES),
        ("slots that (a) moves, steady", f"at most {MOVES:.0%}", _part(ours["moved"]),
         ours["moved"]["highest"] <= MOVES),
        ("balancedness of (a)'s next window over stock's, steady", f"at least {BALANCE:.0%}",
         _part(ours["of_stock"]), ours["of_stock"]["lowest"] >= BALANCE),
        ("slots that (b) moves, steady", f"at most {ENGINE_MOVES:.0%}", _part(engine["moved"]),
         engine["moved"]["highest"] <= ENGINE_MOVES),
        ("host time of a layer's commit, stock over (b)", f"at least {COMMIT:.0f}",
         _plain(ratio, "{:.0f}"), ratio["lowest"] >= COMMIT),
        ("the same, cold", f"at least {COMMIT:.0f}",
         _plain(cold, "{:.0f}"), cold["lowest"] >= COMMIT),
    )  # fmt: skip
    lines = ["| Figure | Bar | Measured | Met by the worst |", "|---|---|---|---|"]
    for what, bar, told, met in rows:
        lines.append(_line([what, bar, told, "yes" if met else "**no**"]))
    return [*lines, ""]


def _traffic(row: Figures) -> list[str]:
    shape = "{layers} layers x {experts} experts, {slots} slots, {ranks} ranks"
    switches = any("switch" in rival for rival in row["rivals"].values())
    heads = ["moved by the first plan", "moved", "layers touched", "balancedness planned",
             "of the next window", "over stock's", "CPU ms a call"]  # fmt: skip
    heads += ["moved at a switch"] if switches else []
    lines = [f"**{row['name'].capitalize()}**, {shape.format(**row['shape'])}.", ""]
    lines += [_line(["placed by", *heads]), f"|---|{'---|' * len(heads)}"]
    for name, rival in row["rivals"].items():
        cells = [name, _part(rival["first"]), _part(rival["moved"]),
                 _plain(rival["layers"], "{:.0f}"), f"{rival['plan']['median']:.4f}",
                 _plain(rival["next"], "{:.4f}"), _part(rival["of_stock"]),
                 _plain(rival["milliseconds"], "{:.1f}")]  # fmt: skip
        lines.append(_line([*cells, *([_part(rival["switch"])] if switches else [])]))
    best = row["rivals"][ENGINE]["exact"]
    return [
        *lines,
        "",
        f"With the shares that are best for the next window itself, (b)'s is at "
        f"{_plain(best, '{:.4f}')}.",
        "",
    ]


def _elsewhere(rows: Sequence[Figures]) -> list[str]:
    heads = [f"{name}: {what}" for name in ("steady", "drift") for what in
             ("stock moves", "(a) moves", "(a)'s next window over stock's")]  # fmt: skip
    lines = ["Other shapes, and other skew (sigma, of the logarithm of popularity):", ""]
    lines += [_line(["layers x experts, slots, ranks; sigma", *heads]), f"|---|{'---|' * 6}"]
    for row in rows:
        shape = "{layers} x {experts}, {slots}, {ranks}".format(**row["shape"])
        cells = [f"{shape}; {row['sigma']:g}"]
        for name in ("steady", "drift"):
            rivals = row[name]
            cells += [_part(rivals[STOCK]["moved"]), _part(rivals[POLICY]["moved"]),
                      _part(rivals[POLICY]["of_stock"])]  # fmt: skip
        lines.append(_line(cells))
    return [*lines, ""]


def _curve(rows: Sequence[Figures]) -> list[str]:
    heads = [f"{name}: {what}" for name in ("steady", "drift") for what in
             ("moved", "next window over stock's")]  # fmt: skip
    lines = ["What (a) moves for what it gains, by its settings (0.02 and 0.01 are the defaults):",
             "", _line(["target", "gain", *heads]), f"|---|{'---|' * 5}"]  # fmt: skip
    for row in rows:
        cells = [f"{row['target']:g}", f"{row['gain']:g}"]
        for name in ("steady", "drift"):
            cells += [_part(row[name]["moved"]), _part(row[name]["of_stock"])]
        lines.append(_line(cells))
    return [*lines, ""]


def _commit(parts: Figures) -> list[str]:
    names = {
        "stock": "vLLM's `_commit_eplb_maps_for_layer`, on CPU tensors",
        "stock maps": "of it: `compute_logical_maps`",
        "stock, cold": "the same, cold",
        "all": "(b), all that the host does",
        "all, cold": "the same, cold",
        "tables": "of it: tables, beside the forward",
        "digest": "of it: their digest, beside the forward",
        "host": "of it: the thread that steps, at the boundary, nine slots' copies among it",
        "host, cold": "the same, cold",
        "stream": "not in it: what the stream runs, nine copies of a byte among it",
    }
    lines = ["| To put one layer's new map in force | microseconds |", "|---|---|"]
    lines += [_line([words, _plain(parts[name], "{:,.0f}")]) for name, words in names.items()]
    ratios = {
        "ratio": "all that the host does",
        "ratio_cold": "the same, cold",
        "ratio_with_stream": "that and what the stream runs",
        "ratio_of_boundary": "what holds up the thread that steps",
    }
    told = [f"{words}: {_plain(parts[name], '{:.0f}')}" for name, words in ratios.items()]
    held_up = parts["stock, cold"]["median"] / parts["host, cold"]["median"]
    return [
        *lines,
        "",
        "*Cold* is the first of eight layers, behind the other's turn, as behind a forward. vLLM's "
        f"over ours, round by round, {'; '.join(told)}; cold, by the medians: {held_up:.0f}. On a "
        "device vLLM's commit also waits for the forward that is queued; that is not here.",
        "",
    ]


def _part(found: Figures) -> str:
    return _told(found, lambda value: f"{value:.2%}")


def _plain(found: Figures, form: str) -> str:
    return _told(found, form.format)


def _told(found: Figures, form: Callable[[float], str]) -> str:
    return f"{form(found['median'])} ({form(found['lowest'])} to {form(found['highest'])})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
