"""The HTML report of `equipoise simulate`: one file with tables and plots."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from equipoise.balancer.requests.policy_comparison import Interval, PolicyResult
from equipoise.report.page import flat_facts, render_page
from equipoise.report.simulation.columns import (
    BY_FIGURE,
    COLUMNS,
    ColumnBest,
    FigureColumn,
    best_of_columns,
    indistinguishable_lines,
)
from equipoise.report.simulation.load_plots import barrier_gantt, worker_load_plot
from equipoise.report.simulation.plot_style import PolicyStyle
from equipoise.report.simulation.policy_plots import (
    balance_curve,
    idle_bars,
    sweep_pictures,
    wait_by_prompt,
)
from equipoise.report.simulation.result import SimulationResult, Sweep
from equipoise.report.simulation.table import (
    BEST_MARK,
    SWEEP_FIGURES,
    FilledColumn,
    capitalised,
    fill_columns,
    subject_facts,
    sweep_cells,
    title,
)
from equipoise.report.svg import Picture


def pictures(comparison: SimulationResult) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    plots = (
        idle_bars(comparison),
        barrier_gantt(comparison),
        worker_load_plot(comparison),
        balance_curve(comparison),
        wait_by_prompt(comparison),
        *_sweep_pictures(comparison),
    )
    return tuple(picture for picture in plots if picture is not None)


def _sweep_pictures(comparison: SimulationResult) -> tuple[Picture, ...]:
    if comparison.sweep is None:
        return ()
    return sweep_pictures(comparison.sweep, PolicyStyle.of(comparison))


PARTS = (
    ("How even, how fast", ("imbalance", "idle", "throughput", "bound", "gap", "occupancy")),
    ("A token", ("tpot_mean", "tpot_p95", "tpot_p99", "ttft_mean", "ttft_p99", "e2e_p99")),
    ("Waiting for a slot", ("wait_mean", "wait_p99", "wait_max", "fairness", "failed")),
)
"""The columns, in tables that fit a page."""
TILES = {
    "throughput": "tokens/s, the most",
    "idle": "least idle at the barrier",
    "wait_p99": "shortest wait P99",
}
RANDOM = "random"
"""The policy that knows nothing: what a gain is worth is said over it."""
MULTIPLE = 10.0
"""Differences from so many times on are multiples, smaller ones per cent."""
Cell: TypeAlias = str | tuple[str, str]
"""A text, or a text and a class of the style sheet."""
Table: TypeAlias = tuple[tuple[str, ...], list[list[Cell]]]
"""Heads and rows."""
COMPARED = "imbalance", "throughput", "tpot_p95", "ttft_p99", "wait_p99"


def render_html(
    comparison: SimulationResult, about: Mapping[str, Any], figures: Mapping[str, Any]
) -> str:
    """The whole file as text. Raises PlotsMissing without matplotlib."""
    best = best_of_columns(comparison.results)
    sweep, subject = comparison.sweep, comparison.subject
    heading, indistinguishable = _indistinguishable(comparison, best)
    verdict, verdict_class = _verdict(comparison, best)
    settings = {name: value for name, value in about.items() if name != "command"}
    return render_page(
        "simulation.html",
        command=str(about.get("command", "")),
        title="Routing policies compared",
        subtitle=title(comparison),
        arrivals=capitalised(subject.arrivals),
        verdict=verdict,
        verdict_class=verdict_class,
        tiles=_tiles(comparison, best),
        seeds=len(comparison.seeds),
        indistinguishable_heading=heading,
        indistinguishable=indistinguishable,
        tables=list(_tables(comparison, best)),
        pictures=pictures(comparison),
        sweep=[] if sweep is None else list(_sweep_tables(sweep)),
        sweep_over="" if sweep is None else sweep.over,
        reference=comparison.reference.named_policy.label,
        difference_heads=("", *(BY_FIGURE[figure].head for figure in COMPARED)),
        differences=list(_differences(comparison)),
        facts=[capitalised(line) for line in (*subject_facts(subject), *subject.notes)],
        columns=[(column.head, column.about) for column in COLUMNS],
        settings=flat_facts(settings),
        figures=json.dumps(figures, indent=1, ensure_ascii=False, allow_nan=False),
    )


def _verdict(simulation: SimulationResult, best: Sequence[ColumnBest]) -> tuple[str, str]:
    """What is best, how sure and by how much; and the colour that says so."""
    most = next((one for one in best if one.column.figure == "throughput"), None)
    if most is None:
        return "no policy makes more tokens a second than another", ""
    by_label = {result.named_policy.label: result for result in simulation.results}
    gain, is_gain = _over_random(by_label, most.best)
    sure = is_gain and len(simulation.seeds) > 1
    text = f"most tokens a second: {most.best}{_doubt(simulation, most)}{gain}"
    return text, "good" if sure else ""


def _over_random(by_label: Mapping[str, PolicyResult], best: str) -> tuple[str, bool]:
    """The best policy's gain over `random`, in words, and whether it is more than chance."""
    if RANDOM not in by_label or best == RANDOM:
        return "", best != RANDOM
    gain = by_label[best].relative_to(by_label[RANDOM], "throughput")
    if gain.half != gain.half:
        return f"; {gain.mean:+z.1%} over {RANDOM}", True
    interval = f"{gain.mean * 100:+z.1f} \u00b1{gain.half * 100:.1f} %"
    if gain.low <= 0 <= gain.high:
        return f"; no gain over {RANDOM} that chance would not give ({interval})", False
    return f"; {interval} over {RANDOM}", True


def _doubt(simulation: SimulationResult, most: ColumnBest) -> str:
    if len(simulation.seeds) == 1:
        return "; one seed, so chance is not excluded"
    if not most.indistinguishable:
        return ""
    many = len(most.indistinguishable) > 3
    names = f"{len(most.indistinguishable)} others" if many else ", ".join(most.indistinguishable)
    return f"; cannot be told from it: {names}"


def _tiles(simulation: SimulationResult, best: Sequence[ColumnBest]) -> list[tuple[str, str]]:
    winner = {one.column.figure: one.best for one in best}
    by_label = {result.named_policy.label: result for result in simulation.results}
    tiles = []
    for figure, words in TILES.items():
        column = BY_FIGURE[figure].fitted(simulation.results)
        if figure in winner:
            value = by_label[winner[figure]].interval(figure).mean * column.scale
            unit = "" if figure == "throughput" else f" {column.unit}"
            text = f"{value:,.{column.decimals(simulation.results)}f}{unit}"
            tiles.append((text, f"{words}: {winner[figure]}"))
    return tiles + _spread(simulation)


def _spread(simulation: SimulationResult) -> list[tuple[str, str]]:
    """How far the fastest is from the slowest."""
    results = [r for r in simulation.results if r.interval("throughput").mean > 0]
    if len(results) < 2:
        return []
    ranked = sorted(results, key=lambda result: result.interval("throughput").mean)
    gain = ranked[-1].relative_to(ranked[0], "throughput").mean
    names = f"{ranked[-1].named_policy.label} over {ranked[0].named_policy.label}"
    return [(relative_text(gain, " %"), f"tokens a second, {names}")]


def _tables(simulation: SimulationResult, best: Sequence[ColumnBest]) -> Iterator[Table]:
    filled = {one.column.figure: one for one in fill_columns(simulation, best)}
    for name, figures in PARTS:
        columns = [filled[figure] for figure in figures]
        heads = (name, *(f"{one.column.head}, {one.column.unit}" for one in columns))
        yield (
            heads,
            [
                [label, *(_marked(one, row) for one in columns)]
                for row, label in enumerate(simulation.labels)
            ],
        )


def _marked(column: FilledColumn, row: int) -> Cell:
    text = column.texts[row].strip(BEST_MARK + " ")
    return (text, "best") if row == column.best else text


def _indistinguishable(
    simulation: SimulationResult, best: Sequence[ColumnBest]
) -> tuple[str, list[str]]:
    """What cannot be told from the best: a sentence, and a line for each column."""
    first, *more = indistinguishable_lines(simulation, best)
    return capitalised(first), [line.strip() for line in more]


def _differences(simulation: SimulationResult) -> Iterator[list[Cell]]:
    """Paired with the default policy; nothing with one seed or one policy."""
    if len(simulation.seeds) == 1:
        return
    columns = [BY_FIGURE[figure] for figure in COMPARED]
    for result in simulation.results:
        if result is not simulation.reference:
            cells = (_beside(result, simulation, column) for column in columns)
            yield [result.named_policy.label, *cells]


def _beside(result: PolicyResult, simulation: SimulationResult, column: FigureColumn) -> Cell:
    value: Interval = result.relative_to(simulation.reference, column.figure)
    if value.mean != value.mean:
        return "\u2013", "alike"
    half = f" \u00b1{value.half * 100:z,.1f}" if 1 + value.mean < MULTIPLE else ""
    return relative_text(value.mean) + half, "alike" if value.low <= 0 <= value.high else ""


def relative_text(difference: float, unit: str = "") -> str:
    """A relative difference in per cent; as a multiple where nobody reads per cent any more."""
    multiple = 1 + difference
    if multiple >= MULTIPLE:
        return f"\u00d7{multiple:,.0f}"
    return f"{difference * 100:+z,.1f}{unit}"


def _sweep_tables(sweep: Sweep) -> Iterator[Table]:
    for figure in SWEEP_FIGURES[sweep.over]:
        column, cells = BY_FIGURE[figure], sweep_cells(sweep, figure)
        heads = (f"{column.head}, {column.unit}", *(f"{point.value:g}" for point in sweep.points))
        yield heads, [[label, *row] for label, row in cells.items()]
