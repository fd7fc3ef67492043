"""Writes docs/performance.md and docs/performance/, and parts of README and docs/closed-loop.md.

    python benchmarks/report.py            write the pages
    python benchmarks/report.py --check    write nothing; exit code 1 where a page differs

A `Section` declares what one command measures: a title, the file in benchmarks/results/ that holds
the figures, bars and tables. `PAGES` divides the sections among pages, and `HEADLINES` are the
figures on the first one. A figure that nobody has measured is OWED.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.results import ROOT, load, source

OWED = "OWED"
Results = Mapping[str, Any]
"""Contents of a file of figures: `figures` by name, and `tables`, lists of rows by name."""
Load = Callable[[str], Results | None]


@dataclass(frozen=True)
class Bar:
    """A figure, and what it has to be.

    Attributes:
        what: the figure in words.
        figure: its name in the file. Its value is a number, `[median, least, most]`, words, or
            `{"value": ..., "note": words behind it, "met": whether it is enough}`.
        at_most: the bar; None where there is none, or another.
        at_least: likewise.
        form: the format of a number.
        index: which of `[median, least, most]` the bar is for.
        bar: the bar in words, where the file says whether it is met.
    """

    what: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None
    form: str = ".2f"
    index: int = 0
    bar: str = "reported"

    def cells(self, figures: Mapping[str, Any] | None) -> list[str]:
        """Of its line: figure, bar, measured, met."""
        bar = self.bar
        if self.at_most is not None:
            bar = f"at most {self.at_most:{self.form}}"
        if self.at_least is not None:
            bar = f"at least {self.at_least:{self.form}}"
        if figures is None or self.figure not in figures:
            return [self.what, bar, OWED, OWED]
        figure = figures[self.figure]
        entry = figure if isinstance(figure, dict) else {"value": figure}
        note = f", {entry['note']}" if entry.get("note") else ""
        return [self.what, bar, self._text(entry["value"]) + note, self._verdict(entry)]

    def _text(self, value: Any) -> str:
        if isinstance(value, list):
            middle, least, most = (format(each, self.form) for each in value)
            return f"{middle} ({least} to {most})"
        return value if isinstance(value, str) else format(value, self.form)

    def _verdict(self, entry: Mapping[str, Any]) -> str:
        passed = entry.get("met")
        value = entry["value"][self.index] if isinstance(entry["value"], list) else entry["value"]
        if self.at_most is not None:
            passed = value <= self.at_most
        if self.at_least is not None:
            passed = value >= self.at_least
        return "" if passed is None else "yes" if passed else "**no**"


@dataclass(frozen=True)
class Table:
    """Rows of a file.

    Attributes:
        rows: the name of the table in the file.
        columns: head, and a `str.format` template of the row; empty where the row lacks a key. A
            column that is empty in all rows is left out.
        by: a key of rows: rows are divided into one table for each of its values.
        title: a line above it.
    """

    rows: str
    columns: tuple[tuple[str, str], ...]
    by: str = ""
    title: str = ""

    def lines(self, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """In Markdown."""
        rows = tables.get(self.rows, ())
        lines = [self.title, ""] if self.title and rows else []
        for value in dict.fromkeys(row.get(self.by, "") for row in rows):
            of_value = [row for row in rows if row.get(self.by, "") == value]
            lines += [f"**{value}**", ""] if value else []
            lines += [*self._one(of_value), ""]
        return lines

    def _one(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        filled = [[_filled(template, row) for row in rows] for _, template in self.columns]
        filled_columns = [place for place, cells in enumerate(filled) if any(cells)]
        heads = [self.columns[place][0] for place in filled_columns]
        return [
            _line(heads),
            f"|{'---|' * len(filled_columns)}",
            *(
                _line([filled[place][number] for place in filled_columns])
                for number in range(len(rows))
            ),
        ]


@dataclass(frozen=True)
class Section:
    """Part of the page: what a command measures.

    Attributes:
        title: its heading.
        file: of figures, in benchmarks/results/.
        command: that writes the file.
        text: what is measured.
        bars: figures with their bars.
        tables: everything else.
    """

    title: str
    file: str
    command: str
    text: str
    bars: tuple[Bar, ...] = ()
    tables: tuple[Table, ...] = ()

    def lines(self, results: Results | None) -> list[str]:
        """In Markdown."""
        lines = [f"## {self.title}", "", self.text, ""]
        if self.bars:
            figures = None if results is None else results["figures"]
            lines += [_line(["Figure", "Bar", "Measured", "Met"]), "|---|---|---|---|"]
            lines += [*(_line(bar.cells(figures)) for bar in self.bars), ""]
        if results is None:
            return [*lines, f"{OWED}: `{self.command}`", ""]
        for table in self.tables:
            lines += table.lines(results["tables"])
        return [*lines, source(results), ""] if "commit" in results else lines


def spread(key: str, form: str = ".2f") -> str:
    """Template of `[median, least, most]`."""
    return f"{{{key}[0]:{form}}} ({{{key}[1]:{form}}} to {{{key}[2]:{form}}})"


def half(key: str, form: str = ".2f") -> str:
    """Template of `[mean, half width of its confidence interval]`."""
    return f"{{{key}[0]:{form}}} ± {{{key}[1]:{form}}}"


def _filled(template: str, row: Mapping[str, Any]) -> str:
    try:
        return template.format(**row)
    except (KeyError, TypeError, IndexError):
        return ""


def _anchor(title: str) -> str:
    """Of a heading, as Markdown makes it."""
    return re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


MAIN_JOB = Section(
    "The main job",
    "main_job",
    "python benchmarks/run.py",
    "`equipoise run` with its defaults, 4 ranks.",
    bars=(
        Bar("imbalance without balancing over that with `local` shares (32 + 8 slots)",
            "times_smaller", at_least=4, form=".1f"),
        Bar("imbalance with `static` shares", "imbalance_static", form=".4f"),
        Bar("imbalance with `lagged` shares", "imbalance_lagged", form=".4f"),
        Bar("sampling-noise floor", "noise_floor", form=".4f"),
        Bar("rebalances that moved experts", "rebalances", form="d", bar="at least 1 a phase"),
        Bar("copies moved in all of them", "copies", form="d"),
        Bar("outputs identical to one process without exchange", "outputs", bar="yes"),
        Bar("wall time of `equipoise run` after installation, s", "wall_seconds", at_most=180,
            form=".0f"),
        Bar("stall after the first rebalance, s", "stall_seconds"),
        Bar("the same without balancing, s", "stall_noise_seconds"),
    ),
    tables=(
        Table("variants", (
            ("4 ranks, 32 experts, three kinds of text", "{words}"),
            ("imbalance", "{imbalance}"),
            ("times smaller", "{smaller:.1f}"),
            ("outputs", "{outputs}"),
        )),
    ),
)  # fmt: skip

PLACEMENT = Section(
    "Placement",
    "placement",
    "python benchmarks/placement.py",
    "Synthetic loads (`benchmarks/lib/loads.py`), twelve windows, every fourth of another domain, "
    "mean over three seeds that were drawn for this run. A batch of a window is served by the plan "
    "made on the window before. Imbalance is max/mean - 1 over ranks, mean over layers; moved is "
    "copies that their rank did not hold, as part of all slots. Rules of others are written again "
    "in our words: greedy is the published rule of DeepSeek and TensorRT-LLM; hierarchical is "
    "DeepSeek's, which ties groups of experts to nodes; snake deals copies by size to ranks, "
    "forwards and backwards; swift-like keeps first copies and swaps single ones, as "
    "vllm-ascend's default. Times are CPU seconds of one thread as ratios to greedy in the same "
    "run. Bars are for 58 layers x 256 experts, 288 slots, 32 ranks unless said. At 576 ranks two "
    "rules are left out: swift-like, which takes two seconds a layer there, and hierarchical, "
    "whose 8 groups do not fit 72 nodes.",
    bars=(
        Bar("imbalance that `connected` plans", "connected_plan", at_most=0.001, form=".4f"),
        Bar("time of `connected` over greedy's", "connected_time", at_most=2.0),
        Bar("time of `incremental` over greedy's, steady", "steady_time", at_most=0.5),
        Bar("time of `incremental` over greedy's, at a switch", "switch_time", at_most=4.0),
        Bar("copies that `incremental` moves where the same load is planned on twice and the "
            "target holds: the most", "moved_again", at_most=0, form=".0f"),
        Bar("imbalance that `incremental` plans, window with the highest", "incremental_plan",
            at_most=0.02, form=".4f"),
        Bar("slots that `incremental` moves, steady (stretch 0.40%)", "moved_steady",
            at_most=0.01, form=".2%"),
        Bar("slots that `incremental` moves, at a switch (stretch 4.00%)", "moved_switch",
            at_most=0.06, form=".2%"),
        Bar("imbalance of the next window above greedy's, `incremental` (stretch 5.0%)",
            "next_above_greedy", at_most=0.15, form=".1%"),
        Bar("imbalance of a batch with exact shares, `connected`, 32 ranks: optimum of the linear "
            "program, rows divided", "exact_32", at_most=0.01, form=".4f"),
        Bar("the same, 64 ranks, 320 slots", "exact_64", at_most=0.02, form=".4f"),
        Bar("the same, 128 ranks, 61 x 384, 512 slots", "exact_128", at_most=0.035, form=".4f"),
        Bar("imbalance of a batch with exact shares as the engine routes it, in whole rows "
            "(1,024 a rank), `connected`, 32 ranks", "routed_32", at_most=0.01, form=".4f"),
        Bar("the same, 64 ranks, 320 slots", "routed_64", at_most=0.02, form=".4f"),
        Bar("the same, 128 ranks, 61 x 384, 512 slots", "routed_128", at_most=0.035,
            form=".4f"),
        Bar("seconds for placement and shares, 576 ranks, 1,152 slots: the slowest",
            "seconds_576", at_most=2.0),
        Bar("seconds of `connected` there from what is installed: the slowest",
            "installed_seconds_576", at_most=0.3),
        Bar("seconds of `incremental` there: the slowest", "incremental_seconds_576",
            at_most=0.5),
        Bar("shares above the optimum of the linear program: the worst layer of all shapes",
            "shares_gap", at_most=0.001, form=".5f"),
    ),
    tables=(
        Table("planners", (
            ("planner", "{planner}"),
            ("on the load planned on", "{plan:.4f}"),
            ("worst layer", "{worst:.4f}"),
            ("next window", "{next:.4f}"),
            ("next window, another domain", "{next_at_switch:.4f}"),
            ("batches", "{iter:.4f}"),
            ("batches, exact shares", "{exact:.4f}"),
            ("moved, steady", "{moved_steady:.1%}"),
            ("moved at a switch", "{moved_switch:.1%}"),
        ), by="shape"),
        Table("times", (
            ("shape", "{shape}"),
            ("`connected` over greedy", spread("connected")),
            ("the same from what is installed", spread("connected_installed")),
            ("`incremental`, steady", spread("steady")),
            ("`incremental`, at a switch", spread("switch")),
            ("greedy, CPU ms for all layers", "{greedy_ms:.1f}"),
        ), title="Times:"),
        Table("shares", (
            ("shape", "{shape}"),
            ("`connected`", "{connected:.5f}"),
            ("`connected`, a batch", "{batches:.5f}"),
            ("`incremental`", "{incremental:.5f}"),
            ("1/65536 of the hottest expert", "{step:.5f}"),
            ("copies moved on the same load again", "{moved}"),
            ("where the target was met", "{moved_held}"),
            ("plans that met it", "{held} of {plans}"),
        ), title="Shares above the optimum of the linear program, worst layer, in means of a rank; "
              "and what moves when the same load is planned on twice:"),
    ),
)  # fmt: skip

ROUTING = Section(
    "The native core",
    "routing",
    "python benchmarks/routing.py",
    "1,024 tokens x top-8 of 256 experts, 288 slots, 32 ranks, one thread; median of 5.",
    tables=(
        Table("operations", (
            ("Operation", "`{operation}`"),
            ("Native, microseconds", "{microseconds:.1f}"),
            ("Other / native time", spread("ratio")),
            ("Other", "{against}"),
        )),
    ),
)  # fmt: skip

MODE_COLUMNS = {
    mode: (words, half(mode, ".4f"))
    for mode, words in (
        ("static", "`static`"), ("lagged", "`lagged`"), ("local", "`local`"),
        ("node_4", "`node`, of 4"), ("node_8", "`node`, of 8"), ("exact", "`exact`"),
    )
}  # fmt: skip
SHARE_MODES = (("tokens of a rank", "{tokens}"), *MODE_COLUMNS.values())
SHARES = Section(
    "Share modes",
    "shares",
    "python benchmarks/shares.py",
    "Imbalance, max/mean - 1, of the rows that ranks get from all source ranks in a layer of a "
    "batch: whole rows, as the native kernels route them, all modes on the same rows; mean over "
    "48 layers and 20 batches of each, with the half width of its 95 % confidence interval over "
    "layers. Bars compare means. "
    "Multinomial rows: each source rank draws tokens x 8 rows from a lognormal popularity (sigma "
    "1.05), on a `connected` placement planned on 1,024 tokens of every rank. Calibrated: "
    "`benchmarks/lib/loads.py`. What it means: [local shares](design/local-shares.md).",
    bars=(
        *(
            Bar(f"{words}, 288 slots on 32 ranks, {tokens} tokens", f"{name}_{tokens}",
                at_most=most, form=".4f")
            for words, name, at_mosts in (
                ("`local` shares", "local", (0.010, 0.018, 0.030, 0.060)),
                ("`node` shares, 8 ranks of a node", "node", (0.006, 0.009, 0.014, 0.030)),
            )
            for tokens, most in zip((256, 128, 64, 32), at_mosts, strict=True)
        ),
        Bar("`local` shares, 320 slots on 32 ranks, 128 tokens", "local_320", at_most=0.015,
            form=".4f"),
        Bar("`local` over `static`, 384 experts, 512 slots, 128 ranks, 128 tokens and more: the "
            "most", "large_ratio", at_most=0.5),
        Bar("calibrated loads, 288 slots on 32 ranks, 128 tokens: `static`", "calibrated_static",
            form=".4f"),
        Bar("the same: `local`", "calibrated_local", at_most=0.025, form=".4f"),
        Bar("the same: `node`, 8 ranks of a node", "calibrated_node", at_most=0.011, form=".4f"),
        Bar("recorded windows in which `local` is below `lagged`", "recorded_below_lagged",
            bar="all"),
        Bar("`local` below `static` in the 16 steps after a switch of the kind of text: the least",
            "recorded_switch", at_least=0.35, form=".1%"),
    ),
    tables=(
        Table("multinomial", SHARE_MODES, by="shape"),
        Table("calibrated", (("calibrated loads", "{shape}"), *SHARE_MODES)),
        Table("recorded", (
            ("32 experts", "{shape}"),
            ("text", "{kind}"),
            ("`static`", spread("static", ".3f")),
            ("`lagged`", spread("lagged", ".3f")),
            ("`local`", spread("local", ".3f")),
            ("`exact`", spread("exact", ".3f")),
            ("experts with one replica alone", spread("singles", ".3f")),
            ("`local` below `static`", spread("below", ".0%")),
        ), title="Recorded routing of the shipped model, windows of 16 steps (median, least and "
                 "most): the window behind the one that was planned on, of the same kind of text "
                 "or of another:"),
        Table("since", (
            ("32 experts", "{shape}"),
            ("steps since the switch", "{steps}"),
            ("`static`", "{static:.3f}"),
            ("`lagged`", "{lagged:.3f}"),
            ("`local`", "{local:.3f}"),
            ("`exact`", "{exact:.3f}"),
            ("experts with one replica alone", "{singles:.3f}"),
        ), title="The first steps of another kind of text, mean over switches:"),
        Table("placements", (
            ("slots", "{slots}"),
            ("planned by", "{rule}"),
            ("moved at a switch", "{moved:.1%}"),
            *(MODE_COLUMNS[mode] for mode in ("static", "local", "node_8", "exact")),
        ), title="What shares make of other placements, 256 experts on 32 ranks, calibrated loads "
                 "of 128 tokens a rank, planned on the first window of another domain, from what "
                 "is installed, and served in the second:"),
    ),
)  # fmt: skip

SHARES_BOUND = Section(
    "How level any rule without communication can be",
    "shares_bound",
    "python benchmarks/shares.py --bound",
    "Rows of every rank drawn alike, on `connected` placements, as above. *No rule*: root mean "
    "square of the ranks' deviations, in means, below which no rule comes by which sources divide "
    "their own rows ([why](design/local-shares.md#the-bound)). *Leaning*: sources that "
    "level towards targets which lean against the mean deviation of the others: the best rule. "
    "*Levelling*: each levels its own rows; both divide rows at will. *Routed*: levelled by the "
    "kernel, in whole rows. Mean with the half width of its 95 % confidence interval over layers.",
    tables=(
        Table("bounds", (
            ("tokens of a rank", "{tokens}"),
            ("sources", "{mode}"),
            ("no rule", half("least", ".4f")),
            ("leaning", half("leaned", ".4f")),
            ("levelling", half("levelled", ".4f")),
            ("routed", half("ours", ".4f")),
            ("routed above no rule", half("above", ".1%")),
            ("imbalance: leaning", half("leaned_imbalance", ".4f")),
            ("levelling", half("levelled_imbalance", ".4f")),
            ("routed", half("ours_imbalance", ".4f")),
            ("leaning below levelling", half("leaning_gains", ".1%")),
        ), by="shape"),
    ),
)  # fmt: skip

SHARES_SPEED = Section(
    "What local shares cost",
    "shares_speed",
    "python benchmarks/shares.py --speed",
    "CPU microseconds of the native kernels a layer, on one thread; ratios are of pairs, one after "
    "the other. Below them the wall time of an all-reduce of int64 counts over gloo between two "
    "processes of this machine: what `exact` pays beside its kernels, with no network in between.",
    tables=(
        Table("kernels", (
            ("tokens x top-8", "{tokens:,}"),
            ("`route_levelled`", spread("levelled", ".1f")),
            ("`route_hashed`", spread("hashed", ".1f")),
            ("ratio", spread("ratio")),
        ), by="shape"),
        Table("reduces", (
            ("counts", "{experts}"),
            ("processes", "{ranks}"),
            ("microseconds of an all-reduce", spread("microseconds", ".0f")),
        )),
    ),
)  # fmt: skip

SHARES_EXCHANGE = Section(
    "What gathered counts save an exchange",
    "shares_exchange",
    "python benchmarks/shares.py --exchange",
    "Wall microseconds of a layer with `exact` shares on rank 0, 256 experts in 288 slots, top-8, "
    "rows of 1 KiB, the portable exchange over gloo between processes of this machine with 2 "
    "cores: sizes follow from the gathered counts (*known*), or a second collective tells them "
    "(*told*). Up to the sizes, and the layer as a whole without its experts. Both take turns from "
    "layer to layer; a figure is the median of 41 rounds, each the median of 40 layers, and in "
    "brackets the least and the most of them: the machine had other work.",
    tables=(
        Table("exchanges", (
            ("processes", "{ranks}"),
            ("tokens of each", "{tokens:,}"),
            ("sizes known", spread("known", ",.0f")),
            ("told", spread("told", ",.0f")),
            ("ratio", spread("ratio")),
            ("layer: sizes known", spread("known_layer", ",.0f")),
            ("told", spread("told_layer", ",.0f")),
            ("ratio", spread("ratio_layer")),
        )),
    ),
)  # fmt: skip

SYSTEMS = (
    ("System", "{system}"),
    ("rebalances", "{rebalances}"),
    ("copies", "{copies:,}"),
    ("steps of one", "{steps:.1f}"),
    ("stall of one, ms: mean (min to max)", spread("stall", ".1f")),
    ("total", spread("total", ".0f")),
    ("stage 1: P50 / P99, ms", "{stage_1[0]:.1f} / {stage_1[1]:.1f}"),
    ("stage 2: P50 / P99, ms", "{stage_2[0]:.1f} / {stage_2[1]:.1f}"),
    ("rows per second", spread("rate", ",.0f")),
    ("CPU of a step, ms", "{cpu:.1f}"),
)

ENGINE = Section(
    "Rebalancing while serving",
    "engine_stall",
    "python benchmarks/engine_stall.py",
    "Four ranks, one process each, on an emulated device: a layer is a timed wait for the fullest "
    "rank and stands for 4, whose experts of 44 MB each travel together on an emulated link "
    "(`benchmarks/lib/emulated_device.py` has all constants). Routing, votes, tables, migration "
    "plans and commits are the shipped code, and outputs are checked. All systems serve the same "
    "tokens and execute the same plans over the same link; *perfect* has the last placement of "
    "each load stage from its first step on. The stall of a step is what it takes beyond the "
    "median of the "
    "run without balancing on the same tokens and placement; *none again* is the A/A pair. A bar "
    "is judged by the median of the rounds. P99 is that of the steps of rebalances from one "
    "balanced placement to another: in the one after a switch of topic most of a slow step is the "
    "old placement. On a device four times as fast, with steps of 20 ms (`--slower 0.25`), what "
    "four ranks' hosts do on two cores weighs four times as much, and none of the bars holds.",
    bars=(
        Bar("bars that `staged` misses", "staged", bar="none"),
        Bar("bars that `in_place` misses", "in_place", bar="none"),
    ),
    tables=(
        Table("points", (
            ("Point", "{point}"),
            ("path", "{path}"),
            ("P99 in rebalances over the placement held: at most 1.05", spread("p99")),
            ("the same of all rounds' steps together", "{p99_pooled:.2f}"),
            ("stall of stop-the-world over ours: at least 20", spread("stall")),
            ("part of the gain of a perfect placement: at least 0.8", spread("gain")),
            ("met", "{met}"),
        )),
        Table("systems", SYSTEMS, by="plans"),
    ),
)  # fmt: skip

PLACEMENT_COLUMNS = (
    ("placed by", "{placed_by}"),
    ("moved by the first plan", spread("first", ".2%")),
    ("moved", spread("moved", ".2%")),
    ("layers touched", spread("layers", ".0f")),
    ("balancedness planned", "{plan:.4f}"),
    ("of the next window", spread("next", ".4f")),
    ("over stock's", spread("of_stock", ".2%")),
    ("with shares best for that window", "{exact:.4f}"),
    ("CPU ms a call", spread("milliseconds", ".1f")),
    ("moved at a switch", spread("switch", ".2%")),
)

VLLM = Section(
    "Placement in vLLM",
    "vllm_policy",
    "python benchmarks/vllm_policy.py",
    "vLLM 0.32.0's own functions, and ours in their place, in one run: 58 layers x 256 experts, "
    "288 slots, 32 ranks where nothing else is said. *Steady* windows are fresh samples of one "
    "log-normal popularity, a million rows a layer; with *drift* each expert's popularity "
    "wanders by 5% a window. On smaller windows, or where popularity varies around one mean, (a) "
    "moves 4 to 11% "
    "([the placement policy](design/vllm.md#eplb_policy-the-placement-policy)). Plans are "
    "judged on the window after the one they were made on. "
    "*Moved*: copies that ranks fetch, as part of all slots. *Balancedness*: mean by largest rank, "
    "both summed over layers, as vLLM's log has it. (a) and stock divide an expert evenly; (b) by "
    "shares. Median, and in brackets least to most, of 7 rebalances of each of 5 seeds; the first "
    "plan of each, from vLLM's first map, is told apart. A bar has to be met by the worst. *Cold* "
    "is the first of eight layers, after the other's turn, as after a forward. On a device vLLM's "
    "commit also waits for the forward that is queued; that is not here.",
    bars=(
        Bar("slots that stock moves, steady", "stock_moved", at_least=0.4, form=".2%", index=1),
        Bar("slots that (a) moves, steady", "policy_moved", at_most=0.05, form=".2%", index=2),
        Bar("balancedness of (a)'s next window over stock's, steady", "policy_of_stock",
            at_least=0.99, form=".2%", index=1),
        Bar("slots that (b) moves, steady", "engine_moved", at_most=0.01, form=".2%", index=2),
        Bar("host time of a layer's commit, stock over (b)", "commit", at_least=20, form=".0f",
            index=1),
        Bar("the same, cold", "commit_cold", at_least=20, form=".0f", index=1),
        Bar("that and what the stream runs", "commit_with_stream", form=".0f"),
        Bar("what holds up the thread that steps", "commit_at_boundary", form=".0f"),
    ),
    tables=(
        Table("traffic", PLACEMENT_COLUMNS, by="traffic"),
        Table("elsewhere", (
            ("layers x experts, slots, ranks; sigma", "{shape}"),
            ("steady: stock moves", spread("steady_stock", ".2%")),
            ("steady: (a) moves", spread("steady_moved", ".2%")),
            ("steady: (a)'s next window over stock's", spread("steady_of_stock", ".2%")),
            ("drift: stock moves", spread("drift_stock", ".2%")),
            ("drift: (a) moves", spread("drift_moved", ".2%")),
            ("drift: (a)'s next window over stock's", spread("drift_of_stock", ".2%")),
        ), title="Other shapes, and other skew (sigma, of the logarithm of popularity):"),
        Table("settings", (
            ("target", "{target:g}"),
            ("gain", "{gain:g}"),
            ("steady: moved", spread("steady_moved", ".2%")),
            ("steady: next window over stock's", spread("steady_of_stock", ".2%")),
            ("drift: moved", spread("drift_moved", ".2%")),
            ("drift: next window over stock's", spread("drift_of_stock", ".2%")),
        ), title="What (a) moves for what it gains, by its settings (0.02 and 0.01 are the "
              "defaults):"),
        Table("commit", (
            ("To put one layer's new map in force", "{what}"),
            ("microseconds", spread("microseconds", ",.0f")),
        )),
    ),
)  # fmt: skip

STAGING = Section(
    "Staging at real sizes",
    "staging",
    "python benchmarks/staging.py",
    "The vLLM part with its defaults, at the shapes and dtypes of real models: a steady load is "
    "planned on six times. Imbalance is max/mean - 1 over ranks, mean over layers, with the "
    "plan's shares; median of three seeds. By default a rank stages as many slots as it has of a "
    "layer; *unlimited* is all its slots. With *one buffer*, the least that can move anything, "
    "*layers short of staging* are those that more of it would bring lower in the sixth.",
    bars=(
        Bar("imbalance by default over that with unlimited staging, worst of all lines",
            "most_apart", at_most=1.1),
    ),
    tables=(
        Table("models", (
            ("model", "{model}"),
            ("ranks", "{ranks}"),
            ("redundant", "{redundant}"),
            ("slots a rank", "{slots}"),
            ("start", "{start:.3f}"),
            ("after six, default", "{default:.3f}"),
            ("unlimited", "{unlimited:.3f}"),
            ("staging of a rank, MiB", "{mib:,.0f}"),
            ("unlimited, MiB", "{all_mib:,.0f}"),
            ("after six, one buffer", "{single:.3f}"),
            ("its MiB", "{single_mib:,.0f}"),
            ("layers short of staging", "{short:.0f}"),
        )),
    ),
)  # fmt: skip

PIPELINE = Section(
    "Stages that overlap",
    "pipeline",
    "python benchmarks/pipeline.py",
    "Stages, one process each, on an emulated device: a stage is a timed wait, so long that a "
    "transfer on the idle link takes the given part of it, but no shorter than 16 ms; in the first "
    "10% of it the host prepares inputs and needs no activations. Messages and links are real; "
    "every message's stamps are looked at. *blocking*: rendezvous, a message per tensor, shapes "
    "known (2 messages a step). *coordinator*: pickled metadata that the receiver's host waits "
    "for, then a message per tensor into fresh tensors (4), the host of a stage computing itself. "
    "*host ahead*: the same with a host that runs ahead of its device, as on a GPU, and messages "
    "ordered as NCCL orders them. *channel*: ours (1). All take turns in "
    "one run, on the same processes; a figure is the median of the rounds. *Compute-bound* is the "
    "rate of a pipeline whose transfers take no time. How it is measured: "
    "[Measuring the pipeline](design/measuring-the-pipeline.md). Bars, of two stages. Where a "
    "transfer takes half of compute or more: 95% of the compute-bound rate, and 1.3 times "
    "blocking if bytes take half of the transfer or more. Elsewhere 0.97 of blocking: there is "
    "less to gain. More than both coordinators everywhere.",
    bars=(
        Bar("points with a miss, loopback", "loopback", at_most=0, form=".0f"),
        Bar("points with a miss, emulated link", "emulated link", at_most=0, form=".0f"),
    ),
    tables=(
        Table("links", (
            ("link", "{link}"),
            ("one way for 8 bytes, ms", "{latency_ms:.3f}"),
            ("MB/s for 16 MiB", "{rate:,.0f}"),
            ("asked for", "{asked}"),
        )),
        Table("points", (
            ("hidden x tokens", "{hidden} x {tokens}"),
            ("MB", "{megabytes:.2f}"),
            ("transfer, ms", "{transfer_ms:.2f}"),
            ("transfer / compute (asked)", "{ratio:.2f} ({asked:g})"),
            ("compute-bound, per second", "{bound:.1f}"),
            ("blocking: per second, part of it", "{blocking[0]:.1f}, {blocking[1]:.0%}"),
            ("coordinator", "{coordinator[0]:.1f}, {coordinator[1]:.0%}"),
            ("host ahead", "{host_ahead[0]:.1f}, {host_ahead[1]:.0%}"),
            ("channel", "{channel[0]:.1f}, {channel[1]:.0%}"),
            ("channel over blocking", spread("over_blocking")),
            ("channel over coordinator", spread("over_coordinator")),
            ("over host ahead", spread("over_host_ahead")),
            ("met", "{met}"),
        ), by="link"),
    ),
)  # fmt: skip

BALANCE = Section(
    "Request balance",
    "request_routing",
    "python benchmarks/request_routing.py",
    "Simulated ([request balance](design/request-balance.md)), 5 seeds, half of a step fixed. "
    "*Imbalance*: G times the largest load less the sum, thousand KV tokens; *idle*: of the "
    "load-dependent time; *gap*: throughput below that of the same steps perfectly balanced. Last "
    "two columns: what `fit` is beside the policy, seed by seed; a bar is missed where that "
    "interval lies on its wrong side.",
    bars=(
        Bar("the replication of published figures: off by", "replication", at_most=0.3,
            form=".0%"),
        *(
            Bar(f"{case}: `fit` at or below every imbalance, at or above every throughput",
                f"{case}: fit", bar="all") for case in (
                "Mooncake conversation, 8 x 16", "prop, 8 x 32",
                "Azure 2023 conversation, 16 x 64", "reason, 16 x 32",
                "reason, 16 x 32, three times as long")
        ),
        *(
            Bar(f"{case}: wait P99 of `fit` over that of `br0`", f"{case}: wait", at_most=1.6)
            for case in (
                "Mooncake conversation, 8 x 16", "prop, 8 x 32",
                "Azure 2023 conversation, 16 x 64", "reason, 16 x 32",
                "reason, 16 x 32, three times as long")
        ),
        Bar("below saturation, imbalance of `fit` over that of `jsq_load`: the most", "below",
            at_most=1.15),
    ),
    tables=(
        Table("replication", (
            ("prop, 8 workers x 72 slots", "`{policy}`"),
            ("imbalance", half("imbalance", ".1f")),
            ("of round_robin's", "{part:.3f}"),
            ("published", "{published:g}"),
            ("off by", "{off:+.0%}"),
        )),
        Table("saturated", (
            ("policy", "`{policy}`"),
            ("imbalance", half("imbalance", ".1f")),
            ("idle", "{idle:.1%}"),
            ("tokens/s", half("throughput", ",.0f")),
            ("gap", "{gap:.1%}"),
            ("TPOT P95, ms", "{tpot_p95_ms:.1f}"),
            ("wait P99, s", "{wait_p99:.2f}"),
            ("fairness", "{fairness:.2f}"),
            ("`fit`: imbalance", "{fit_imbalance[0]:+.1%} ± {fit_imbalance[1]:.1%}"),
            ("`fit`: tokens/s", "{fit_throughput[0]:+.1%} ± {fit_throughput[1]:.1%}"),
        ), by="case"),
        Table("below", (
            ("below saturation, Poisson", "{case}"),
            ("load", "{load:.0%}"),
            *((f"`{name}`", half(name, ".1f")) for name in ("jsq", "jsq_load", "br0", "fit")),
            ("`fit` / `jsq_load`", "{part:.2f}"),
        )),
    ),
)  # fmt: skip

GRID_LOADS = {"at_50": "50 %", "at_80": "80 %", "at_100": "100 %", "at_120": "120 %"}
GRID = Section(
    "Requests: where `fit` is behind",
    "request_grid",
    "python benchmarks/request_grid.py",
    "Five seeds; workers x slots of each; part of the capacity, or always requests that wait. "
    "Tokens a second beside `br0`; and the logarithm of the mean time to the first token over that "
    "of the best published policy of the cell (0.1: 1.1 times as long), with 95 % intervals.",
    bars=(
        Bar("cells", "cells", form=".0f"),
        Bar("tokens a second beside `br0`, mean", "throughput", form="+.1%"),
        Bar("imbalance over that of `br0`, geometric mean", "imbalance"),
        Bar("time to the first token over the best published, geometric mean", "ttft"),
        Bar("cells more than 1 % behind `br0` in tokens a second", "behind", at_most=0, form=".0f"),
        Bar("those beyond doubt", "behind_beyond_doubt", at_most=0, form=".0f"),
        Bar("cells above 1.1 times the best published in mean time to the first token", "late",
            at_most=0, form=".0f"),
        Bar("those beyond doubt", "late_beyond_doubt", at_most=0, form=".0f"),
        Bar("workers with different slots: cells", "mixed_cells", form=".0f"),
        Bar("there, tokens a second beside `br0`, mean", "mixed_throughput", form="+.1%"),
        Bar("there, imbalance over that of `br0`, geometric mean", "mixed_imbalance"),
        Bar("there, cells more than 1 % behind `br0`", "mixed_behind", form=".0f"),
        Bar("there, cells above 1.1 times the best published", "mixed_late", form=".0f"),
    ),
    tables=(
        Table("cells", (
            ("tokens a second beside `br0`", "{case}"),
            *(
                (head, f"{{{load}[throughput][0]:+.1%}} ± {{{load}[throughput][1]:.1%}}")
                for load, head in {**GRID_LOADS, "saturated": "saturated"}.items()
            ),
        )),
        Table("cells", (
            ("time to the first token", "{case}"),
            *(
                (head, f"{{{load}[ttft][0]:+.2f}} ± {{{load}[ttft][1]:.2f}}, `{{{load}[best]}}`")
                for load, head in GRID_LOADS.items()
            ),
        )),
    ),
)  # fmt: skip

ABLATED = (
    ("policy", "`{policy}`"),
    ("imbalance", half("imbalance", ".1f")),
    ("tokens/s", half("throughput", ",.0f")),
    ("wait P99", half("wait_p99")),
)
PROMPTS = (*ABLATED, ("TTFT mean, s", "{ttft:.2f}"), ("TPOT mean, ms", "{tpot_ms:.1f}"))

ABLATIONS = Section(
    "What request balance depends on",
    "request_ablations",
    "python benchmarks/request_ablations.py",
    "5 seeds; imbalance in thousand KV tokens, tokens a second, and P99 of the wait in seconds.",
    tables=(
        Table("scaling", (("workers", "{workers}"), *ABLATED),
              title="**prop, 32 slots a worker, saturated**"),
        Table("loads", (("load", "{load:g}"), *ABLATED),
              title="**prop, 8 x 32, Poisson, part of the capacity**"),
        Table("staleness", (("seconds", "{seconds:g}"), *ABLATED),
              title="**prop, 8 x 32, saturated; seconds by which tokens and ends are told late**"),
        Table("front_ends", (("front_ends", "{front_ends}"), *ABLATED),
              title="**prop, 8 x 32, saturated; reports every 0.1 s**"),
        Table("step_times", (("fixed", "{fixed:g}"), ("noise", "{noise:g}"), *ABLATED),
              title="**prop, 8 x 32, saturated; fixed part of a step, sigma of the work's noise**"),
        Table("drafting", (("drafts", "{drafts}"), ("acceptance", "{acceptance:g}"), *ABLATED),
              title="**prop, 8 x 32, saturated; tokens drafted a step, accepted each**"),
        Table("prompts", (("case", "{case}"), ("weight", "{weight:g}"), *PROMPTS),
              title="**prompts computed beside decoding, up to 8,192 tokens a step, saturated; "
              "weight: KV tokens that are read in the time that a prompt token takes**"),
        Table("alignments", (("case", "{case}"), ("alignment", "{alignment}"), *PROMPTS),
              title="**prompts computed beside decoding, weight 200, saturated; what the engine "
              "does itself to compute them in the same steps, and for how many at most**"),
        Table("prefixes", (("load", "{load:g}"), *PROMPTS),
              title="**Mooncake in its order, 8 x 16, parts of the capacity of decoding; prompts "
              "computed beside decoding (weight 200), 4,000 blocks cached a worker**"),
        Table("knobs", (("case", "{case}"), *ABLATED),
              title="**Settings of `fit`, one at a time (window 1024, wait_bonus 0.0125, slack "
              "1.5, overshoot 0.1 otherwise)**"),
    ),
)  # fmt: skip

DECISION = "{{workers_{0}[0]:.2f}} ({{workers_{0}[1]:.2f}})"

DECISIONS = Section(
    "The cost of routing a request",
    "request_speed",
    "python benchmarks/request_routing.py --speed",
    "A decision: one request ended and one arrived, 64 slots a worker, 4 waiting requests for "
    "each; the native router called from Python, in microseconds; the P99 in brackets. Simulated "
    "steps are those of 8 workers x 72 slots, one thread.",
    bars=(
        Bar("decision of `fit`, 8 workers, microseconds", "fit_8", at_most=2),
        Bar("decision of `fit`, 128 workers, microseconds", "fit_128", at_most=20),
        Bar("simulated steps a second, `br0`", "steps_br0", at_least=100_000, form=",.0f"),
        Bar("simulated steps a second, `fit`", "steps_fit", form=",.0f"),
    ),
    tables=(
        Table("decisions", (
            ("policy", "`{policy}`"),
            *((f"{count} workers", DECISION.format(count)) for count in (8, 32, 128)),
        )),
    ),
)  # fmt: skip

PROXY = Section(
    "What the proxy adds",
    "proxy",
    "python benchmarks/proxy.py",
    "One client, one connection, one worker that answers at once, on loopback, each a process; "
    "pairs of a request straight to the worker and one through the proxy. Milliseconds, median of "
    "the rounds.",
    bars=(Bar("added until the whole answer or the first token, P50: the more", "added",
              at_most=2.0),),
    tables=(
        Table("kinds", (
            ("until", "{until}"),
            ("straight, P50", spread("direct_p50_ms")),
            ("through the proxy, P50", spread("proxy_p50_ms")),
            ("added, P50", spread("added_p50_ms")),
            ("added, P99", spread("added_p99_ms")),
        )),
    ),
)  # fmt: skip

START = Section(
    "Memory and start",
    "start",
    "python benchmarks/start.py",
    "Commands that need no torch, and `doctor`, with torch installed and without: each is a "
    "process that starts, does something small (8 layers of 256 experts on 32 ranks; 400 "
    "requests; a server ends as soon as it serves) and ends. CPU seconds, user and system, and "
    "the most MB that were resident; median, least and most of 5 runs.",
    tables=(
        Table("starts", (
            ("what", "{words}"),
            ("CPU s with torch installed", spread("cpu_with")),
            ("CPU s without", spread("cpu_without")),
            ("MB with torch installed", spread("mb_with", ".0f")),
            ("MB without", spread("mb_without", ".0f")),
        )),
    ),
)  # fmt: skip

PICKER = Section(
    "The endpoint picker",
    "picker",
    "python benchmarks/picker.py",
    "`equipoise picker`, a process of its own, and a made-up Envoy in a closed loop: 5,000 "
    "requests a round, 8 workers of 32 slots, 32 requests that wait, answers of 50 tokens and "
    "of 2. CPU of the picker's process per request; median, least and most of the rounds. Then "
    "5,000 requests while workers are killed, one after another, and others are added: what had"
    " a token breaks off with its worker, and nothing else may.",
    bars=(
        Bar("CPU per request, milliseconds, where Envoy sends the end of an answer only", "cpu_ms",
            at_most=1.0),
        Bar("requests that were lost without a token", "lost", at_most=0, form=".0f"),
    ),
    tables=(
        Table("answers", (
            ("Envoy sends of answers", "{answers}"),
            ("CPU, ms", spread("cpu_ms")),
            ("CPU with 2 tokens, ms", spread("cpu_ms_short")),
            ("a token more, microseconds", "{cpu_us_per_token:.1f}"),
            ("most requests at a worker", "{most_at_a_worker}"),
            ("workers killed", "{killed}"),
            ("complete", "{complete:,}"),
            ("broken off", "{broken:,}"),
            ("lost", "{lost}"),
        )),
    ),
)  # fmt: skip

PROXY_CPU = Section(
    "What a token costs the proxy",
    "proxy_cpu",
    "python benchmarks/proxy.py --cpu",
    "64 streams at once, a token of each in a step of 40 ms, chat; worker, proxy and client are a "
    "process each. CPU time of the proxy's process, and tokens a second of one core at that cost; "
    "beside it one of aiohttp, nginx and Envoy, which pass bytes on unread, in a thread each.",
    bars=(Bar("tokens a second and core", "per_core", at_least=5000, form=",.0f"),),
    tables=(
        Table("proxies", (
            ("proxy", "{proxy}"),
            ("CPU a token, microseconds", spread("cpu_us", ".0f")),
            ("tokens a second and core", spread("tokens_per_core", ",.0f")),
            ("over plain aiohttp", spread("ratio")),
        )),
    ),
)  # fmt: skip

LIVE = Section(
    "Simulated and live",
    "live_routing",
    "python benchmarks/live_routing.py",
    "`equipoise route` in front of eight workers in lockstep, 16 slots each, in a closed loop; "
    "every request a stream, the tokens of a step spread over half of it, worker by worker. "
    "`equipoise simulate` serves the same requests (`prop` with a twentieth of its output tokens). "
    "Imbalance in thousand KV tokens, mean over steps with nine of ten slots taken; median, least "
    "and most of three seeds.",
    bars=(
        Bar("imbalance of `fit` behind the proxy, over that simulated, of all seeds", "fit",
            at_most=1.1),
        Bar("of `br0`", "br0", at_most=1.1),
    ),
    tables=(
        Table("policies", (
            ("policy", "`{policy}`"),
            ("live", spread("live", ".1f")),
            ("simulated", spread("simulated", ".1f")),
            ("ratio", "{ratio:.2f}"),
        )),
    ),
)  # fmt: skip

SHARED = Section(
    "Several front ends, one policy",
    "shared_policy",
    "python benchmarks/shared_policy.py",
    "Eight front ends, each a dispatcher, route a closed loop of clients to eight workers in "
    "lockstep with 16 slots each, by `fit`; on a clock wound by hand, so that figures are the same "
    "everywhere. `shared`: one policy for all; `reports`: a policy each, and reports of the "
    "workers every 100 ms; `late`: one front end and eight where every message to and from the "
    "policy takes a whole step of the engine; `uneven`: seven are so late, and one is not. "
    "Imbalance in thousand KV tokens, mean over steps with nine of ten slots taken; median, least "
    "and most of three seeds. Ratios are of the sums.",
    bars=(
        Bar("imbalance with one policy for eight front ends over that with one, worst workload",
            "shared", at_most=1.2),
        Bar("with a policy each", "reports"),
        Bar("with one policy, both where messages take a step", "late_shared", at_most=1.2),
        Bar("where those of all but one of the eight do", "uneven"),
        Bar("CPU of a step of 1,024 requests at the process that has the policy, milliseconds",
            "step_cost"),
    ),
    tables=(
        Table("workloads", (
            ("workload", "{workload}"),
            ("one front end", spread("one", ".1f")),
            ("shared", spread("shared", ".1f")),
            ("ratio", "{shared_ratio:.2f}"),
            ("reports", spread("reports", ".1f")),
            ("ratio", "{reports_ratio:.2f}"),
            ("late, one", spread("late_one", ".1f")),
            ("late, shared", spread("late_shared", ".1f")),
            ("ratio", "{late_shared_ratio:.2f}"),
            ("uneven", spread("uneven", ".1f")),
            ("ratio", "{uneven_ratio:.2f}"),
        )),
    ),
)  # fmt: skip

GPU = Section(
    "CUDA",
    "gpu_speed",
    "python benchmarks/gpu_speed.py",
    "One device, one process. Kernels are captured in graphs of many launches and timed by the "
    "device's events, with all that a launch reads in its cache; copies are queued before the "
    "device begins, and stand beside one plain copy of one block of as many bytes; a decode step "
    "is four layers of experts at the dimensions of DeepSeek-V3 (9 slots of one of 32 ranks), with "
    "dense work up to 5 ms, and a rebalance of the shipped engine beside it in a group of one. "
    "Contestants take turns; figures are medians of the rounds.",
    bars=(
        Bar("routing and counting over hash and count, 4,096 tokens and more: the slowest",
            "routing_ratio", at_most=1.1),
        Bar("the same below 4,096 tokens, microseconds above it: the most", "routing_above",
            at_most=1.0),
        Bar("exact shares, microseconds a layer (288 slots, 32 ranks)", "shares_microseconds",
            at_most=60, form=".1f"),
        Bar("their imbalance above the optimum: the worst layer", "shares_gap", at_most=0.01,
            form=".5f"),
        *(
            Bar(f"copies, {way}, over one plain copy, slots of 8 MiB and more: the slowest",
                f"copies, {way}", at_least=0.9)
            for way in ("host to device", "staging to slot", "slot to slot")
        ),
        *(
            Bar(f"decode step with a rebalance over without, {dtype}, {path}, captured: {part}",
                f"decode, {dtype}, {path}, {part}", at_most=1.05, form=".3f")
            for dtype in ("bfloat16", "float8")
            for path in ("staged", "in_place")
            for part in ("median", "p99")
        ),
        Bar("the rebalance's part of a step's memory traffic: the most", "traffic", at_most=0.01,
            form=".2%"),
        Bar("decode steps: the shortest, ms", "shortest_step", at_least=5.0),
        Bar("pairs of runs", "pairs", at_least=5, form="d"),
        Bar("the baseline beside vLLM's own kernel", "vllm",
            bar="the same slots and counts"),
        Bar("device, driver, versions", "device", bar="told"),
    ),
    tables=(
        Table("routing", (
            ("tokens x top-8", "{tokens:,}"),
            ("ours, microseconds a launch", spread("ours")),
            ("hash and count", spread("theirs")),
            ("torch", spread("torch")),
            ("ours over hash and count", spread("ratio")),
        )),
        Table("kernels", (
            ("kernel", "`{what}`"),
            ("of", "{of}"),
            ("microseconds", spread("microseconds")),
            ("GB per second", spread("rate", ",.0f")),
        )),
        Table("copies", (
            ("copies", "{way}"),
            ("MiB a slot", "{mebibytes:g}"),
            ("GB per second", spread("rate", ",.1f")),
            ("one plain copy", spread("ceiling", ",.1f")),
            ("part of it", spread("part")),
            ("host, microseconds a call", "{host:,.0f}"),
        )),
        Table("decode", (
            ("experts", "{dtype}, {experts}"),
            ("path", "{path}"),
            ("steps", "{mode}"),
            ("median without, ms", spread("median_without")),
            ("with", spread("median_with")),
            ("ratio", spread("median_ratio", ".3f")),
            ("P99 without, ms", spread("p99_without")),
            ("with", spread("p99_with")),
            ("ratio", spread("p99_ratio", ".3f")),
            ("moved", "{share:.2%}"),
            ("rebalances", "{rebalances}"),
        )),
    ),
)  # fmt: skip

GPU_SUITES = Section(
    "CUDA: conformance and tests at full strength",
    "gpu_suites",
    "python benchmarks/gpu_suites.py",
    "No figure here is a speed.",
    bars=(
        Bar("conformance: clauses", "conformance", bar="none violated"),
        Bar("the engine's fault matrix: tests", "faults", bar="all pass"),
        Bar("channel programs between stages: tests", "channels", bar="all pass"),
    ),
)

POLICY_COLUMNS = (
    ("policy", "{policy}"),
    ("moved by the first plan", spread("first", ".1%")),
    ("in a steady window", spread("steady", ".2%")),
    ("at a switch", spread("switch", ".1%")),
    ("layers changed in a steady window", spread("layers", ".1f")),
    ("imbalance planned", spread("planned", ".3f")),
)
"""Of a policy's row, as `lib/policy_trials.py` makes it."""
NEXT_WINDOW = ("of the next window", spread("next", ".3f"))
SGLANG = Section(
    "SGLang",
    "sglang_policy",
    "PYTHONPATH=tests:tests/simulators .tox/engines/bin/python benchmarks/sglang_policy.py",
    "SGLang 0.5.23's own algorithm (`--eplb-algorithm auto`) and the plugin's "
    "[`eplb_policy`](sglang.md), in one run: 58 layers x 256 experts, 288 slots, 32 ranks; twelve "
    "rebalances, each on a window of its own, and the kind of traffic switches twice. *Moved*: "
    "copies that ranks fetch, as part of all slots. Imbalance is max/mean - 1 of the ranks, mean "
    "over layers: on the window of the plan with an expert's tokens divided evenly, and on the "
    "next one, where that is of the same kind, by SGLang's dispatch `dynamic` and `static`, with "
    "SGLang's own tables or those that the plugin fills by the load. Median, least and most of "
    "five seeds, others than those with which the default target was chosen. The last table is of "
    "a recorded load: what the shipped model routed over three texts (two switches), 6 layers of "
    "32 experts in 40 slots; each figure is the plugin's over SGLang's. SGLang moves experts at "
    "every rebalance, the plugin at the first and after a switch, so with fewer rebalances the "
    "ratio is larger.",
    bars=(
        Bar("copies that `eplb_policy` moves in all, over SGLang's", "moved", at_most=0.1,
            index=2),
        Bar("the same on the recorded load in thirty windows, on 2, 4 and 8 ranks", "recorded",
            at_most=0.1, index=2),
        Bar("imbalance of the next window by dispatch `dynamic`, over SGLang's", "dynamic",
            at_most=1.0, index=2),
        Bar("the same by dispatch `static`", "static", at_most=1.0, index=2),
    ),
    tables=(
        Table("policies", (
            *POLICY_COLUMNS,
            ("of the next window, `dynamic`", spread("dynamic", ".3f")),
            ("`static`", spread("static", ".3f")),
            ("CPU s a plan", spread("seconds", ".2f")),
        )),
        Table("recorded", (
            ("recorded load: ranks", "{ranks}"),
            ("steps of a window", "{steps}"),
            ("rebalances", "{rebalances}"),
            ("copies", "{moved:.3f}"),
            ("imbalance of the next window, `dynamic`", "{dynamic:.3f}"),
            ("`static`", "{static:.3f}"),
        )),
    ),
)  # fmt: skip

VLLM_ASCEND = Section(
    "vllm-ascend",
    "vllm_ascend_policy",
    "PYTHONPATH=tests:tests/simulators .tox/engines/bin/python benchmarks/vllm_ascend_policy.py",
    "vllm-ascend 0.23.0's own policies and the [`eplb_policy`](vllm-ascend.md) that takes their "
    "place, in one run: 58 layers x 256 experts, 288 slots, 32 ranks; twelve rebalances, each on a "
    "window of its own, and the kind of traffic switches twice. *Moved*: copies that ranks fetch, "
    "as part of all slots. Imbalance is max/mean - 1 of the ranks, mean over layers, with an "
    "expert's tokens divided evenly among its slots: on the window of the plan, and on the next "
    "one where that is of the same kind. Median, least and most of three seeds; on some loads of "
    "others type 1 ends with an IndexError.",
    bars=(
        Bar("copies that `eplb_policy` moves in all, over those of the default", "moved",
            at_most=1.0, index=2),
        Bar("imbalance of the next window, over the default's", "next", at_most=1.0, index=2),
        Bar("processor time of a plan, over the default's", "seconds", at_most=1.0, index=2),
    ),
    tables=(
        Table("policies", (
            *POLICY_COLUMNS,
            NEXT_WINDOW,
            ("CPU s a plan", spread("seconds", ".2f")),
        )),
    ),
)  # fmt: skip

REPLAY = Section(
    "What replay predicts",
    "replay",
    "python benchmarks/replay.py",
    "`equipoise run` serves the shipped model and records the rows of every expert by step; replay "
    "plays that record with the same slots and cadence. Both are means over the steps after the "
    "first plan took effect. Step time is emulated: as long as the rows of the slowest rank. What "
    "it means: [Replay](replay.md#predictions-and-measurements).",
    bars=(
        Bar("imbalance predicted beside served, in points: the worst", "points", at_most=3.0),
        Bar("emulated step time predicted beside served: the worst", "step_time", at_most=0.05,
            form=".2%"),
        Bar("runs whose plans (step and copies) replay did not make alike", "plans",
            bar="0", form="d"),
    ),
    tables=(
        Table("served", (
            ("ranks", "{ranks}"),
            ("served", "{how}"),
            ("imbalance predicted", "{predicted:.4f}"),
            ("served", "{served:.4f}"),
            ("points", "{points:+.2f}"),
            ("step time", "{time:+.2%}"),
            ("plans that moved experts", "{rebalances}"),
        )),
    ),
)  # fmt: skip
REPLAY_SPEED = Section(
    "How long replay takes",
    "replay_speed",
    "python benchmarks/replay.py --speed",
    "`equipoise replay` of one engine's balancer, or of ours in all share modes, over counts of "
    "100,000 steps of 58 layers of 256 experts, 8,192 tokens of 8 experts a step, in 288 slots on "
    "32 ranks: a file of 5.9 GB. Wall seconds, and the most memory of the process.",
    bars=(
        Bar("seconds for vLLM's balancer", "seconds", at_most=600.0, form=".0f"),
        Bar("GiB of memory", "memory", at_most=2.0),
    ),
    tables=(
        Table("replayed", (
            ("balancer", "{engine}"), ("seconds", "{seconds:.0f}"), ("GiB", "{memory:.2f}"),
        )),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page of docs/performance/.

    Attributes:
        name: of its file.
        title: its heading.
        sections: what is on it.
    """

    name: str
    title: str
    sections: tuple[Section, ...]

    def text(self, load_results: Load) -> str:
        """In Markdown."""
        parts = [
            line for section in self.sections for line in section.lines(load_results(section.file))
        ]
        # Sections name pages as seen from docs/.
        body = re.sub(r"\]\((?=\w)", "](../", "\n".join(parts))
        return f"# {self.title}\n\n{PAGE_HEAD}\n\n{body.rstrip()}\n"


PAGE_HEAD = (
    "Generated by `python benchmarks/report.py`. "
    "[How to read these figures](../performance.md#how-to-read-them)."
)
PAGES = (
    Page("planning", "Performance: planning and routing", (MAIN_JOB, PLACEMENT, ROUTING)),
    Page("shares", "Performance: share modes",
         (SHARES, SHARES_BOUND, SHARES_SPEED, SHARES_EXCHANGE)),
    Page("rebalancing", "Performance: rebalancing while serving", (ENGINE, STAGING)),
    Page("engines", "Performance: inside vLLM, SGLang and vllm-ascend",
         (VLLM, SGLANG, VLLM_ASCEND)),
    Page("replay", "Performance: replay", (REPLAY, REPLAY_SPEED)),
    Page("pipeline", "Performance: pipeline stages", (PIPELINE,)),
    Page("requests", "Performance: request routing policies",
         (BALANCE, GRID, ABLATIONS, DECISIONS)),
    Page("proxy", "Performance: proxy, picker and shared policies",
         (LIVE, SHARED, PICKER, PROXY, PROXY_CPU)),
    Page("start", "Performance: what commands take to start", (START,)),
    Page("gpu", "Performance: on a GPU", (GPU, GPU_SUITES)),
)  # fmt: skip


@dataclass(frozen=True)
class Headline:
    """A figure of the first page.

    Attributes:
        what: the figure in words that need no other page.
        section: that has it.
        figure: its name there.
        in_readme: whether README shows it, too.
    """

    what: str
    section: Section
    figure: str
    in_readme: bool = False

    def cells(self, load_results: Load, pages: str) -> list[str]:
        """Of its line: figure, measured, bar, met, where; `pages` is the way to the pages."""
        results = load_results(self.section.file)
        bar = next(bar for bar in self.section.bars if bar.figure == self.figure)
        _, wanted, measured, met = bar.cells(None if results is None else results["figures"])
        page = next(page for page in PAGES if self.section in page.sections)
        link = f"[{self.section.title}]({pages}{page.name}.md#{_anchor(self.section.title)})"
        return [self.what, measured, wanted, met, link]


HEADLINES = (
    Headline("`equipoise run`, four ranks: times smaller imbalance with `local` shares",
             MAIN_JOB, "times_smaller", in_readme=True),
    Headline("the same: outputs equal, bit for bit, to one process that balances nothing",
             MAIN_JOB, "outputs", in_readme=True),
    Headline("imbalance that `connected` plans for DeepSeek-V3's 58 layers x 256 experts, 288 "
             "slots, 32 ranks", PLACEMENT, "connected_plan"),
    Headline("the same shape: slots that a rebalance moves while the load is steady",
             PLACEMENT, "moved_steady"),
    Headline("imbalance of a batch of 128 tokens per rank there, `local` shares, no collective",
             SHARES, "local_128"),
    Headline("slots that a rebalance of vLLM's own EPLB moves while a generated load is steady, a "
             "million rows of a layer per window",
             VLLM, "stock_moved", in_readme=True),
    Headline("the same with Equipoise's policy in vLLM (small windows, or a popularity that "
             "varies: 4 % to 11 %)",
             VLLM, "policy_moved", in_readme=True),
    Headline("experts that Equipoise's policy copies in SGLang, over SGLang's own, recorded load",
             SGLANG, "recorded", in_readme=True),
    Headline("time of a plan in vllm-ascend over its default planner's", VLLM_ASCEND, "seconds"),
    Headline("a captured decode step of one H100 while experts move, over one without: median",
             GPU, "decode, bfloat16, staged, median", in_readme=True),
    Headline("the same, in place", GPU, "decode, bfloat16, in_place, median"),
    Headline("imbalance that `equipoise replay` predicts beside what was served: worst, in points",
             REPLAY, "points"),
    Headline("request routing, simulated: of 280 workloads, those in which `fit` serves over 1 % "
             "fewer tokens than BR-0",
             GRID, "behind"),
    Headline("`fit` on 280 simulated workloads: time to the first token over the best published "
             "policy's",
             GRID, "ttft",
             in_readme=True),
    Headline("eight front ends that share a policy, over one: imbalance", SHARED, "shared"),
    Headline("endpoint picker: CPU milliseconds per request", PICKER, "cpu_ms"),
)  # fmt: skip
HEAD = """# Performance

The figures that decide whether Equipoise is for you, each with a bar that was set before the
measurement; **no** means that the bar was not reached. All other figures are on the linked pages.

"""
MEANING = """
## How to read them

`python benchmarks/report.py` generates the figures from `benchmarks/results/`. Machines are shared
and noisy, and four ranks on two cores take turns. So figures are ratios within one run, and no
test asserts a time. `a (b to c)` is a median with minimum and maximum, `a ± b` a mean with the half
width of its 95 % confidence interval. Every section names its command, its commit and its machine.
Most were measured on two CPU cores; those of [the page on a GPU](performance/gpu.md) on one H100.
OWED is a figure that nobody has measured yet. Studies that led to a default are on the
pages that explain it: [planning](design/planning.md), [shares](design/routing-and-shares.md),
[the engine](design/measuring-the-engine.md), [the host pool](design/host-pool.md),
[drop-ins](compat.md).

## All figures

"""

CLOSED_LOOP = Section(
    "",
    "closed_loop",
    "python benchmarks/run.py --closed-loop",
    "",
    tables=(
        Table("traffic", (
            ("traffic", "{words}"),
            ("before", "{before:.4f}"),
            ("planned for the sum, as reported", "{by_sum:.4f}"),
            ("with `--sigma 1`, as reported", "{reported:.4f}"),
            ("as served", "{served:.4f}"),
            ("times smaller", "{smaller:.1f}"),
            ("noise floor", "{floor:.4f}"),
            ("outputs identical", "{outputs}"),
        )),
    ),
)  # fmt: skip
BEGIN, END = "<!-- generated by benchmarks/report.py -->", "<!-- end of the generated part -->"
"""Marks around the generated part of a page that is otherwise written by hand."""


def first_page(load_results: Load = load) -> str:
    """docs/performance.md."""
    lines = [_line(["Figure", "Measured", "Bar", "Met", "More"]), "|---|---|---|---|---|"]
    lines += [_line(headline.cells(load_results, "performance/")) for headline in HEADLINES]
    contents = [
        f"- [{page.title.removeprefix('Performance: ')}](performance/{page.name}.md): "
        + ", ".join(section.title for section in page.sections)
        for page in PAGES
    ]
    return HEAD + "\n".join(lines) + "\n" + MEANING + "\n".join(contents) + "\n"


def evidence(load_results: Load = load) -> list[str]:
    """The table of README."""
    chosen = [headline for headline in HEADLINES if headline.in_readme]
    rows = [headline.cells(load_results, "docs/performance/") for headline in chosen]
    lines = [_line(["Figure", "Measured"]), "|---|---|"]
    return [*lines, *(_line([what, measured]) for what, measured, *_ in rows), ""]


def closed_loop(load_results: Load = load) -> list[str]:
    """The table of docs/closed-loop.md, without the heading of its section."""
    return CLOSED_LOOP.lines(load_results(CLOSED_LOOP.file))[4:]


def with_generated_part(text: str, lines: Sequence[str]) -> str:
    """A page with its generated part brought up to date."""
    before, begin, remainder = text.partition(BEGIN)
    _, end, after = remainder.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no part between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{chr(10).join(lines)}\n{END}{after}"


def pages() -> dict[Path, str]:
    """What every page has to be."""
    docs = ROOT / "docs"
    contents = {docs / "performance.md": first_page()}
    contents |= {docs / "performance" / f"{page.name}.md": page.text(load) for page in PAGES}
    for path, lines in ((ROOT / "README.md", evidence()), (docs / "closed-loop.md", closed_loop())):
        contents[path] = with_generated_part(path.read_text(), lines)
    return contents


def show(
    file: str, figures: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Print what a command has measured, as the page would have it."""
    for section in (section for page in PAGES for section in page.sections):
        if section.file == file:
            results = {"figures": figures, "tables": tables}
            sys.stdout.write("\n".join(section.lines(results)) + "\n")


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    differing = 0
    for path, expected in pages().items():
        current = path.read_text() if path.exists() else ""
        if current == expected:
            continue
        differing += 1
        if check:
            lines = difflib.unified_diff(
                current.splitlines(), expected.splitlines(), lineterm="", n=0
            )
            sys.stderr.write(f"{path.relative_to(ROOT)} differs:\n")
            sys.stderr.writelines(f"{line}\n" for line in list(lines)[:20])
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(expected)
    return int(check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
