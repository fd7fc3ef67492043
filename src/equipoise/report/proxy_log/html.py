"""The page of `equipoise route-report`: one HTML file that needs nothing else."""

import json
from collections.abc import Mapping
from typing import Any

from equipoise import __version__
from equipoise.report.page import (
    CSS,
    card,
    escape_html,
    facts,
    json_details,
    picture_section,
    section,
    table,
)
from equipoise.report.proxy_log.figures import ProxyLogFigures
from equipoise.report.proxy_log.plots import request_gantt, wait_by_prompt, worker_load_plot
from equipoise.report.proxy_log.requests import COMPLETED, ProxyLog
from equipoise.report.proxy_log.table import HEADS, UNITS, format_value, notes, table_rows, title

PARTS = (("Requests and tokens", 0, 4), ("Times", 4, 10))
"""The columns, in tables that fit a page."""


def render_html(log: ProxyLog, figures: ProxyLogFigures, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names the command. Raises PlotsMissing."""
    plots = (request_gantt(log), worker_load_plot(log), wait_by_prompt(log))
    body = "\n".join(
        (
            _head(log, figures),
            _tiles(figures),
            *(picture_section(picture) for picture in plots if picture is not None),
            section("Worker by worker", _workers(figures)),
            section("How requests ended", _outcomes(figures)),
            section("Where from", _about(about)),
            _figures(about, figures),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Equipoise: {escape_html(title(figures))}</title>\n<style>{CSS}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(log: ProxyLog, figures: ProxyLogFigures) -> str:
    completed, total = figures.outcomes.get(COMPLETED, 0), figures.total.requests
    mood = "good" if completed == total else "bad"
    verdict = f"{completed:,} of {total:,} requests completed"
    return (
        "<header><h1>Where requests went</h1>"
        f'<p class="soft">{escape_html(log.log)}: {escape_html(title(figures))}. '
        "From the log of equipoise route.</p>"
        f'<div class="verdict {mood}">{escape_html(verdict)}</div></header>'
    )


def _tiles(figures: ProxyLogFigures) -> str:
    total, seconds = figures.total, max(figures.seconds, 1e-9)
    tiles = (
        (format_value(figures.imbalance, 1.0, 0), "imbalance, tokens"),
        (
            f"{format_value(figures.idle, 100.0, 1)} %",
            "idle, if a step waits for the fullest worker",
        ),
        (f"{total.output / seconds:,.0f}", "output tokens/s"),
        (f"{format_value(total.wait.p99, 1.0, 3)} s", "wait at the proxy, P99"),
        (f"{format_value(total.ttft.mean, 1.0, 3)} s", "time to the first token, mean"),
        (f"{format_value(total.tpot.mean, 1e3, 2)} ms", "time per further token, mean"),
    )
    inner = "".join(
        f'<div class="tile"><b>{escape_html(value)}</b><span>{escape_html(words)}</span></div>'
        for value, words in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _workers(figures: ProxyLogFigures) -> str:
    tables = []
    for name, first, last in PARTS:
        columns = zip(HEADS[first:last], UNITS[first:last], strict=True)
        heads = (name, *(f"{head}, {unit}" if unit else head for head, unit in columns))
        rows = [(row[0], *row[1 + first : 1 + last]) for row in table_rows(figures)]
        tables.append(f'<div class="card">{table(heads, rows)}</div>')
    lines = "".join(f"<li>{escape_html(_sentence(line))}</li>" for line in notes(figures))
    return f"{''.join(tables)}<ul class=soft>{lines}</ul>"


def _outcomes(figures: ProxyLogFigures) -> str:
    total = figures.total.requests
    rows = [
        (name, f"{count:,}", f"{count / total:.1%}") for name, count in figures.outcomes.items()
    ]
    return f'<div class="card">{table(("", "requests", "part"), rows)}</div>'


def _about(about: Mapping[str, str]) -> str:
    return card(facts({"equipoise": __version__, **about}.items()))


def _figures(about: Mapping[str, str], figures: ProxyLogFigures) -> str:
    whole: dict[str, Any] = {**about, **figures.to_json()}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    return json_details(text)


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}."
