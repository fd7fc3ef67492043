"""`equipoise route-report`: its options, and the report of a request log."""

from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from equipoise.cli import kinds
from equipoise.cli.command import Command, Settings
from equipoise.cli.offline import (
    check_outputs,
    print_written,
    usage_errors,
    write_figures,
    write_page,
)
from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, Argument, Option

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
SUBJECT = "what is reported"


@dataclass(frozen=True, kw_only=True)
class RouteReportRequest(Settings):
    """What one `equipoise route-report` was asked for."""

    # fmt: off
    log: Annotated[Path, Argument("LOG", "the proxy's log")]
    run: Annotated[int | None, Option(
        "which run of the proxy, where it was started several times with this log; 1 is the first",
        SUBJECT, default="the only one")] = None
    begin: Annotated[datetime | None, Option(
        "only requests that arrived then or later: 2026-11-27T14:05, UTC unless it says otherwise",
        SUBJECT, kind=kinds.TIME, key="from", default="the first request")] = None
    end: Annotated[datetime | None, Option(
        "only requests that arrived before it", SUBJECT, kind=kinds.TIME, key="to",
        default="the last request")] = None
    json: Annotated[Path | None, Option("write the figures there", OUTPUT)] = None
    html: Annotated[Path | None, Option("write a page with pictures there", OUTPUT)] = None
    # fmt: on


if TYPE_CHECKING:
    from equipoise.report.proxy_log.figures import ProxyLogFigures
    from equipoise.report.proxy_log.requests import ProxyLog
    from equipoise.serve.request_log import RequestRecord


def route_report(request: RouteReportRequest, command: str) -> int:
    """Read a log, write the figures and the page, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.proxy_log.figures import proxy_log_figures
    from equipoise.report.proxy_log.table import render
    from equipoise.report.terminal import stdout_colour_mode

    check_outputs({"LOG": request.log}, {"--json": request.json, "--html": request.html})
    log = within(load_log(request.log, request.run), request.begin, request.end)
    figures = proxy_log_figures(log)
    try:
        # Before the table: a closed standard output must not cost the files.
        _write(request, log, figures, command)
    finally:
        print(render(figures, str(request.log), stdout_colour_mode()), flush=True)
    return 0


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
    for key, time in (("from", request.begin), ("to", request.end)):
        if time is not None:
            about[key] = time.isoformat()

    def page() -> str:
        from equipoise.report.proxy_log.html import render_html

        return render_html(log, figures, about)

    lines = write_figures(request.json, about | figures.to_json())
    lines += write_page(request.html, page)
    print_written(request.progress, lines)


COMMAND = Command(
    RouteReportRequest, route_report, description=ROUTE_REPORT, examples=ROUTE_REPORT_EXAMPLES
)
