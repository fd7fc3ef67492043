"""`equipoise route-report`: its options, and the report of a request log."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli import kinds
from equipoise.cli.files import write_file
from equipoise.cli.offline import check_outputs, print_written, request_values, usage_errors, warn
from equipoise.cli.option import Option
from equipoise.hal.errors import UsageError

ROUTE_REPORT = """\
Say of the log of `equipoise route` which worker had which requests, when, and how
evenly: a table, and a page with pictures. LOG is what `log:` of the proxy named."""
ROUTE_REPORT_EXAMPLES = """\
examples:
  equipoise route-report requests.jsonl
  equipoise route-report requests.jsonl --html report.html --json figures.json
  equipoise route-report requests.jsonl --run 2
  equipoise route-report requests.jsonl --from 2026-11-27T14:00 --to 2026-11-27T15:00

exit code: 0 reported, 2 bad input, 3 something could not be written"""
SUBJECT, OUTPUT = "what is reported", "output"

OPTIONS = (
    Option(key="run", kind=kinds.WHOLE, group=SUBJECT, metavar="N",
           shown_default="the only one",
           help="which run of the proxy, where it was started several times with this log; "
           "1 is the first"),
    Option(key="from", kind=kinds.TIME, group=SUBJECT, metavar="TIME",
           shown_default="the first request",
           help="only requests that arrived then or later: 2026-11-27T14:05, UTC unless it says "
           "otherwise"),
    Option(key="to", kind=kinds.TIME, group=SUBJECT, metavar="TIME",
           shown_default="the last request",
           help="only requests that arrived before it"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write a page with pictures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
FIELDS = {"from": "begin", "to": "end"}
"""Fields that have other names than their options: `from` is a word of Python's."""
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class RouteReportRequest:
    """What one `equipoise route-report` was asked for; `progress` is `shown` or `hidden`."""

    log: Path
    run: int | None = None
    begin: datetime | None = None
    end: datetime | None = None
    json: Path | None = None
    html: Path | None = None
    progress: str = "shown"


if TYPE_CHECKING:
    from equipoise.report.proxy_log.figures import ProxyLogFigures
    from equipoise.report.proxy_log.requests import ProxyLog
    from equipoise.serve.request_log import RequestRecord


def route_report(arguments: Namespace, command: str) -> int:
    """Read a log, write the figures and the page, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.proxy_log.figures import proxy_log_figures
    from equipoise.report.proxy_log.table import render
    from equipoise.report.terminal import stdout_colour_mode

    request = request_of(vars(arguments))
    check_outputs({"LOG": request.log}, {"--json": request.json, "--html": request.html})
    log = within(load_log(request.log, request.run), request.begin, request.end)
    figures = proxy_log_figures(log)
    try:
        # Before the table: a closed standard output must not cost the files.
        _write(request, log, figures, command)
    finally:
        print(render(figures, str(request.log), stdout_colour_mode()), flush=True)
    return 0


def request_of(arguments: Mapping[str, Any]) -> RouteReportRequest:
    """What the command line asks for, its configuration file included."""
    values = request_values(arguments, BY_KEY)
    values |= {name: values.pop(key) for key, name in FIELDS.items() if key in values}
    return RouteReportRequest(**values)


def load_log(path: Path, run: int | None) -> "ProxyLog":
    """The requests of one run of a proxy.

    Raises UsageError, in one line: it is no log, nothing is in it, or several runs are.
    """
    from equipoise.report.proxy_log.requests import ProxyLog
    from equipoise.serve.request_log import read_log

    cut_lines: list[int] = []
    runs: dict[float, list[RequestRecord]] = {}
    with usage_errors():
        for record in read_log(path, cut_lines.append):
            runs.setdefault(record.run, []).append(record)
    records = _select_run(path, [runs[began] for began in sorted(runs)], run)
    return ProxyLog(str(path), tuple(map(_trip, records)), len(cut_lines))


def within(log: "ProxyLog", begin: datetime | None, end: datetime | None) -> "ProxyLog":
    """The requests that arrived in [begin, end). Raises UsageError where there are none."""
    from equipoise.report.proxy_log.active_time import date_time_text

    first = -inf if begin is None else begin.timestamp()
    last = inf if end is None else end.timestamp()
    requests = tuple(one for one in log.requests if first <= one.arrived_at < last)
    if not requests:
        known = sorted(one.arrived_at for one in log.requests)
        raise UsageError(
            "--from, --to: no request arrived then; the first of the log arrived at "
            f"{date_time_text(known[0])} UTC, the last at {date_time_text(known[-1])} UTC"
        )
    return replace(log, requests=requests)


def _select_run(
    path: Path, runs: "list[list[RequestRecord]]", run: int | None
) -> "list[RequestRecord]":
    if not runs:
        raise UsageError(f"{path}: no request has ended in this log")
    if run is not None and not 1 <= run <= len(runs):
        raise UsageError(f"--run must be 1 to {len(runs)}, got {run}")
    if run is None and len(runs) > 1:
        counts = ", ".join(f"{len(one):,}" for one in runs[:8]) + (", ..." if runs[8:] else "")
        raise UsageError(
            f"{path} holds {len(runs)} runs of the proxy, of {counts} requests: choose one by --run"
        )
    return runs[0 if run is None else run - 1]


def _trip(record: "RequestRecord") -> Any:
    from equipoise.report.proxy_log.requests import LoggedRequest

    return LoggedRequest(
        worker=record.worker,
        arrived_at=record.arrived_at,
        bound_at=record.bound_at,
        first_answer_at=record.first_answer_at,
        ended_at=record.ended_at,
        prompt=record.prompt,
        output=record.output,
        streamed=record.streamed,
        outcome=record.outcome.value,
        attempts=record.attempts,
    )


def _write(
    request: RouteReportRequest, log: "ProxyLog", figures: "ProxyLogFigures", command: str
) -> None:
    about = {"command": command, "log": str(request.log)}
    if request.run is not None:
        about["run"] = str(request.run)
    for key, name in FIELDS.items():
        if (time := getattr(request, name)) is not None:
            about[key] = time.isoformat()
    lines = []
    if request.json is not None:
        text = json.dumps(about | figures.to_json(), indent=2, allow_nan=False)
        place = write_file(request.json, text + "\n")
        lines.append(f"figures: {place}")
    if request.html is not None:
        from equipoise.report.proxy_log.html import render_html
        from equipoise.report.svg import PlotsMissing

        try:
            place = write_file(request.html, render_html(log, figures, about))
            lines.append(f"page: {place}")
        except PlotsMissing as missing:
            warn(f"no page: {missing}")
    print_written(request.progress, lines)
