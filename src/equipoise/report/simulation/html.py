"""The HTML report of `equipoise simulate`: one file with tables and plots."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.balancer.requests.policy_comparison import Interval, PolicyResult
from equipoise.report.page import (
    CSS,
    card,
    escape_html,
    facts,
    json_details,
    picture_section,
    section,
)
from equipoise.report.simulation.columns import (
    BY_FIGURE,
    COLUMNS,
    ColumnBest,
    FigureColumn,
    best_of_columns,
    indistinguishable_lines,
)
from equipoise.report.simulation.load_plots import barrier_gantt, worker_load_plot
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
        *(() if comparison.sweep is None else sweep_pictures(comparison.sweep)),
    )
    return tuple(picture for picture in plots if picture is not None)


MORE_CSS = """
td.best { color:var(--good); font-weight:650; } td.alike { color:var(--soft); }
ul { margin:0 0 12px; padding-left:1.2em; } .card table + table { margin-top:26px; }
"""
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
COMPARED = "imbalance", "throughput", "tpot_p95", "ttft_p99", "wait_p99"


def render_html(
    comparison: SimulationResult, about: Mapping[str, Any], figures: Mapping[str, Any]
) -> str:
    """The whole file as text. Raises PlotsMissing without matplotlib."""
    best = best_of_columns(comparison.results)
    body = "\n".join(
        (
            _head(comparison, best),
            _tiles(comparison, best),
            section("The same requests, routed in each way", _tables(comparison, best)),
            *(picture_section(picture) for picture in pictures(comparison)),
            *(
                []
                if comparison.sweep is None
                else [section("The sweep", _sweep_table(comparison.sweep))]
            ),
            *_differences(comparison),
            section("What was simulated", _facts(comparison)),
            section("Command and settings", _about(about)),
            _figures(figures),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Equipoise: routers on {escape_html(comparison.subject.workload)}</title>\n"
        f"<style>{CSS}{MORE_CSS}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(simulation: SimulationResult, best: Sequence[ColumnBest]) -> str:
    return (
        "<header><h1>Which worker serves a request</h1>"
        f'<p class="soft">{escape_html(title(simulation))}. '
        f"{escape_html(capitalised(simulation.subject.arrivals))}. "
        "A simulation, not a measurement.</p>"
        f'<div class="verdict good">{escape_html(_verdict(simulation, best))}</div></header>'
    )


def _verdict(simulation: SimulationResult, best: Sequence[ColumnBest]) -> str:
    most = next((one for one in best if one.column.figure == "throughput"), None)
    if most is None:
        return "no policy makes more tokens a second than another"
    return f"most tokens a second: {most.best}{_doubt(simulation, most)}"


def _doubt(simulation: SimulationResult, most: ColumnBest) -> str:
    if len(simulation.seeds) == 1:
        return "; one seed, so chance is not excluded"
    if not most.indistinguishable:
        return ""
    many = len(most.indistinguishable) > 3
    names = f"{len(most.indistinguishable)} others" if many else ", ".join(most.indistinguishable)
    return f"; cannot be told from it: {names}"


def _tiles(simulation: SimulationResult, best: Sequence[ColumnBest]) -> str:
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
    tiles += _spread(simulation)
    inner = "".join(
        f'<div class="tile"><b>{escape_html(value)}</b><span>{escape_html(words)}</span></div>'
        for value, words in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _spread(simulation: SimulationResult) -> list[tuple[str, str]]:
    """How far the fastest is from the slowest."""
    results = [r for r in simulation.results if r.interval("throughput").mean > 0]
    if len(results) < 2:
        return []
    ranked = sorted(results, key=lambda result: result.interval("throughput").mean)
    gain = ranked[-1].relative_to(ranked[0], "throughput").mean
    names = f"{ranked[-1].named_policy.label} over {ranked[0].named_policy.label}"
    return [(f"{gain:+z.1%}", f"tokens a second, {names}")]


def _tables(simulation: SimulationResult, best: Sequence[ColumnBest]) -> str:
    filled = {one.column.figure: one for one in fill_columns(simulation, best)}
    parts = []
    for name, figures in PARTS:
        columns = [filled[figure] for figure in figures]
        heads = (name, *(f"{one.column.head}, {one.column.unit}" for one in columns))
        rows = [
            [
                (label, ""),
                *((one.texts[row].strip(BEST_MARK + " "), _mark(row, one.best)) for one in columns),
            ]
            for row, label in enumerate(simulation.labels)
        ]
        parts.append(_table(heads, rows))
    return f'{_told_apart(simulation, best)}<div class="card">{"".join(parts)}</div>'


def _mark(row: int, best: int | None) -> str:
    return "best" if row == best else ""


def _told_apart(simulation: SimulationResult, best: Sequence[ColumnBest]) -> str:
    if len(simulation.seeds) == 1:
        return (
            '<p class="soft">One seed: no intervals, and no difference can be told from chance.</p>'
        )
    first, *more = indistinguishable_lines(simulation, best)
    items = "".join(f"<li>{escape_html(line.strip())}</li>" for line in more)
    return (
        f'<p class="soft">Mean and half of the 95 % confidence interval over '
        f"{len(simulation.seeds)} seeds (Student's t); the best of each column is green. "
        f"{escape_html(capitalised(first))}</p>"
        f"{f'<ul class=soft>{items}</ul>' if items else ''}"
    )


def _differences(simulation: SimulationResult) -> list[str]:
    """Paired with the default policy; nothing with one seed or one policy."""
    other_results = [result for result in simulation.results if result is not simulation.reference]
    if not other_results or len(simulation.seeds) == 1:
        return []
    columns = [BY_FIGURE[figure] for figure in COMPARED]
    rows = [
        [(r.named_policy.label, ""), *(_beside(r, simulation, c) for c in columns)]
        for r in other_results
    ]
    name = simulation.reference.named_policy.label
    note = (
        f'<p class="soft">Paired by seed, in per cent of {escape_html(name)}\'s; grey where the '
        "95 % confidence interval includes no difference.</p>"
    )
    table = _table(("", *(column.head for column in columns)), rows)
    return [section(f"Beside {name}", f'{note}<div class="card">{table}</div>')]


def _beside(
    result: PolicyResult, simulation: SimulationResult, column: FigureColumn
) -> tuple[str, str]:
    value: Interval = result.relative_to(simulation.reference, column.figure)
    if value.mean != value.mean:
        return "\u2013", "alike"
    text = f"{value.mean * 100:+z,.1f} \u00b1{value.half * 100:,.1f}"
    return text, "alike" if value.low <= 0 <= value.high else ""


def _sweep_table(sweep: Sweep) -> str:
    tables = []
    for figure in SWEEP_FIGURES[sweep.over]:
        column, cells = BY_FIGURE[figure], sweep_cells(sweep, figure)
        heads = (f"{column.head}, {column.unit}", *(f"{point.value:g}" for point in sweep.points))
        rows = [[(label, ""), *((text, "") for text in row)] for label, row in cells.items()]
        tables.append(_table(heads, rows))
    note = f'<p class="soft">Means over seeds, by {sweep.over}.</p>'
    return f'{note}<div class="card">{"".join(tables)}</div>'


def _facts(simulation: SimulationResult) -> str:
    lines = (*subject_facts(simulation.subject), *simulation.subject.notes)
    items = "".join(f"<li>{escape_html(capitalised(line))}</li>" for line in lines)
    columns = "".join(
        f"<dt>{escape_html(column.head)}</dt><dd>{escape_html(column.about)}</dd>"
        for column in COLUMNS
    )
    return f'<ul>{items}</ul><div class="card"><dl>{columns}</dl></div>'


def _about(about: Mapping[str, Any]) -> str:
    flat = {k: v for k, v in about.items() if not isinstance(v, Mapping)}
    for value in about.values():
        if isinstance(value, Mapping):
            flat |= {k: v for k, v in value.items() if v is not None}
    return card(facts(flat.items()))


def _figures(figures: Mapping[str, Any]) -> str:
    text = json.dumps(figures, indent=1, ensure_ascii=False, allow_nan=False)
    return json_details(text)


def _table(heads: Iterable[str], rows: Iterable[Iterable[tuple[str, str]]]) -> str:
    head = "".join(f"<th>{escape_html(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(_cell(*cell) for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str, mark: str) -> str:
    return (
        f'<td class="{mark}">{escape_html(text)}</td>' if mark else f"<td>{escape_html(text)}</td>"
    )
