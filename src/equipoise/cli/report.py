"""`equipoise report`."""

import json
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from equipoise.cli.files import write_file
from equipoise.cli.offline import (
    check_outputs,
    check_ranks,
    load_placement,
    load_statistics,
    options_of,
    refused,
    tell_written,
    warn,
)
from equipoise.cli.report_options import BY_KEY, ReportRequest
from equipoise.hal.errors import UsageError

if TYPE_CHECKING:
    from equipoise.balancer.formats import Arrangement, Statistics
    from equipoise.report.comparison import Comparison


def report(arguments: Namespace, command: str) -> int:
    """Read statistics, write the figures and the page, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.comparison_table import render
    from equipoise.report.ink import ink_of_stdout

    request = request_of(vars(arguments))
    _validate(request)
    found = _compared(request, load_statistics(request.statistics, request.range))
    try:
        # Before the table: an output that nobody reads must not cost the files.
        _write(request, found, command)
    finally:
        print(render(found, ink_of_stdout()), flush=True)
    return 0


def request_of(given: Mapping[str, Any]) -> ReportRequest:
    """What the command line asks for, its configuration file included."""
    return ReportRequest(**options_of(given, BY_KEY))


def _validate(request: ReportRequest) -> None:
    check_ranks(request.ranks)
    inputs = {"STATS": request.statistics}
    if request.placement is not None:
        inputs["--placement"] = request.placement
    check_outputs(inputs, {"--json": request.json, "--html": request.html})


def _compared(request: ReportRequest, statistics: "Statistics") -> "Comparison":
    from equipoise.report.comparison import compare

    placement: Arrangement | None = None
    if request.placement is not None:
        placement = load_placement("--placement", request.placement, request.ranks)
    ranks = placement.ranks if placement is not None else _ranks(request, statistics)
    with refused("" if request.placement is None else f"--placement: {request.placement}"):
        return compare(statistics, placement, ranks)


def _ranks(request: ReportRequest, statistics: "Statistics") -> int:
    if request.ranks is not None:
        return request.ranks
    if statistics.by_rank is None:
        raise UsageError(
            f"--ranks is needed: {request.statistics} does not say how many ranks recorded it"
        )
    return len(statistics.by_rank)


def _write(request: ReportRequest, found: "Comparison", command: str) -> None:
    about = {"command": command, "statistics": str(request.statistics)}
    if request.placement is not None:
        about["placement"] = str(request.placement)
    if request.range is not None:
        about["range"] = str(request.range)
    written = []
    if request.json is not None:
        text = json.dumps(about | found.to_json(), indent=2, allow_nan=False)
        place = write_file(request.json, text + "\n")
        written.append(f"figures: {place}")
    if request.html is not None:
        from equipoise.report.canvas import PlotsMissing
        from equipoise.report.comparison_html import render_html

        try:
            place = write_file(request.html, render_html(found, about))
            written.append(f"page: {place}")
        except PlotsMissing as missing:
            warn(f"no page: {missing}")
    tell_written(request.progress, written)
