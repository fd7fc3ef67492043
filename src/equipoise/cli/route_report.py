"""`equipoise route-report`."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli.files import write_file
from equipoise.cli.offline import check_outputs, options_of, refused, tell_written, warn
from equipoise.cli.route_report_options import BY_KEY, RouteReportRequest
from equipoise.hal.errors import UsageError

if TYPE_CHECKING:
    from equipoise.report.routed.figures import Figures
    from equipoise.report.routed.trips import Routed
    from equipoise.serve.record import Record


def route_report(arguments: Namespace, command: str) -> int:
    """Read a log, write the figures and the page, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.ink import ink_of_stdout
    from equipoise.report.routed.figures import figures_of
    from equipoise.report.routed.table import render

    request = request_of(vars(arguments))
    check_outputs({"LOG": request.log}, {"--json": request.json, "--html": request.html})
    routed = load_log(request.log, request.run)
    figures = figures_of(routed)
    try:
        # Before the table: an output that nobody reads must not cost the files.
        _write(request, routed, figures, command)
    finally:
        print(render(figures, str(request.log), ink_of_stdout()), flush=True)
    return 0


def request_of(given: Mapping[str, Any]) -> RouteReportRequest:
    """What the command line asks for, its configuration file included."""
    return RouteReportRequest(**options_of(given, BY_KEY))


def load_log(path: Path, run: int | None) -> "Routed":
    """The requests of one run of a proxy.

    Raises UsageError, in one line: it is no log, nothing is in it, or several runs are.
    """
    from equipoise.report.routed.trips import Routed
    from equipoise.serve.record import read_log

    cut: list[int] = []
    runs: dict[float, list[Record]] = {}
    with refused():
        for record in read_log(path, cut.append):
            runs.setdefault(record.run, []).append(record)
    records = _chosen(path, [runs[began] for began in sorted(runs)], run)
    return Routed(str(path), tuple(map(_trip, records)), len(cut))


def _chosen(path: Path, runs: "list[list[Record]]", run: int | None) -> "list[Record]":
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


def _trip(record: "Record") -> Any:
    from equipoise.report.routed.trips import Trip

    return Trip(
        worker=record.worker,
        arrival=record.arrival,
        bound=record.bound,
        first=record.first,
        end=record.end,
        prompt=record.prompt,
        output=record.output,
        streamed=record.streamed,
        outcome=record.outcome.value,
        attempts=record.attempts,
    )


def _write(request: RouteReportRequest, routed: "Routed", figures: "Figures", command: str) -> None:
    about = {"command": command, "log": str(request.log)}
    if request.run is not None:
        about["run"] = str(request.run)
    written = []
    if request.json is not None:
        text = json.dumps(about | figures.to_json(), indent=2, allow_nan=False)
        place = write_file(request.json, text + "\n")
        written.append(f"figures: {place}")
    if request.html is not None:
        from equipoise.report.canvas import PlotsMissing
        from equipoise.report.routed.html import render_html

        try:
            place = write_file(request.html, render_html(routed, figures, about))
            written.append(f"page: {place}")
        except PlotsMissing as missing:
            warn(f"no page: {missing}")
    tell_written(request.progress, written)
