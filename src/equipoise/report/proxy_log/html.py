"""The page of `equipoise route-report`: one HTML file that needs nothing else."""

import json
from collections.abc import Iterator, Mapping

from equipoise.report.page import flat_facts, render_page
from equipoise.report.proxy_log.figures import ProxyLogFigures
from equipoise.report.proxy_log.plots import request_gantt, wait_by_prompt, worker_load_plot
from equipoise.report.proxy_log.requests import COMPLETED, ProxyLog
from equipoise.report.proxy_log.table import (
    HEADS,
    UNITS,
    format_value,
    notes,
    period,
    table_rows,
    title,
)

PARTS = (("Requests and tokens", 0, 4), ("Times", 4, 10))
"""The columns, in tables that fit a page."""


def render_html(log: ProxyLog, figures: ProxyLogFigures, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names the command. Raises PlotsMissing."""
    plots = (request_gantt(log), worker_load_plot(log), wait_by_prompt(log))
    completed, total = figures.outcomes.get(COMPLETED, 0), figures.total.requests
    more = {name: value for name, value in about.items() if name != "command"}
    whole = {**about, **figures.to_json()}
    return render_page(
        "proxy_log.html",
        command=about.get("command", ""),
        title="Requests by worker",
        log=log.log,
        subtitle=f"{title(figures)}, {' '.join(period(figures))}",
        verdict_class="good" if completed == total else "bad",
        verdict=f"{completed:,} of {total:,} requests completed",
        tiles=_tiles(figures),
        pictures=[one for one in plots if one is not None],
        workers=list(_worker_tables(figures)),
        notes=[f"{line[:1].upper()}{line[1:]}." for line in notes(figures)],
        outcomes=[
            (name, f"{count:,}", f"{count / total:.1%}") for name, count in figures.outcomes.items()
        ],
        about=flat_facts(more),
        figures=json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False),
    )


def _tiles(figures: ProxyLogFigures) -> list[tuple[str, str]]:
    total, seconds = figures.total, max(figures.active_seconds, 1e-9)
    idle = f"{format_value(figures.idle, 100.0, 1)} %"
    return [
        (format_value(figures.imbalance, 1.0, 0), "imbalance, tokens"),
        (idle, "idle, if a step waits for the fullest worker"),
        (f"{total.output / seconds:,.0f}", "output tokens/s, pauses left out"),
        (f"{format_value(total.wait.p99, 1.0, 3)} s", "wait at the proxy, P99"),
        (f"{format_value(total.ttft.mean, 1.0, 3)} s", "time to the first token, mean"),
        (f"{format_value(total.tpot.mean, 1e3, 2)} ms", "time per further token, mean"),
    ]


def _worker_tables(
    figures: ProxyLogFigures,
) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    for name, first, last in PARTS:
        columns = zip(HEADS[first:last], UNITS[first:last], strict=True)
        heads = (name, *(f"{head}, {unit}" if unit else head for head, unit in columns))
        yield heads, [(row[0], *row[1 + first : 1 + last]) for row in table_rows(figures)]
