"""`equipoise report`: its options, its checks, and how evenly a placement spreads load."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.balancer.formats.iterations import IterationRange
from equipoise.cli import kinds
from equipoise.cli.files import write_file
from equipoise.cli.offline import (
    check_outputs,
    check_ranks,
    load_placement,
    load_statistics,
    print_written,
    request_values,
    usage_errors,
    warn,
)
from equipoise.cli.option import Option
from equipoise.hal.errors import UsageError

SUBJECT, OUTPUT = "what is compared", "output"

OPTIONS = (
    Option(key="placement", kind=kinds.PATH, group=SUBJECT, metavar="FILE", shown_default="none",
           help="placement, in any format, to serve the same rows with"),
    Option(key="ranks", kind=kinds.WHOLE, group=SUBJECT, metavar="N",
           shown_default="those of --placement, or that recorded",
           help="ranks that the experts are spread over"),
    Option(key="range", kind=kinds.RANGE, group=SUBJECT, metavar="START-STOP",
           shown_default="all that were recorded",
           help="only these iterations; STOP itself is not one of them"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures of every layer there"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write a page with heat maps there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What one `equipoise report` was asked for; `progress` is `shown` or `hidden`."""

    statistics: Path
    placement: Path | None = None
    ranks: int | None = None
    range: IterationRange | None = None
    json: Path | None = None
    html: Path | None = None
    progress: str = "shown"


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
    from equipoise.report.placement.comparison import Comparison


def report(arguments: Namespace, command: str) -> int:
    """Read statistics, write the figures and the page, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.placement.comparison import render
    from equipoise.report.terminal import stdout_colour_mode

    request = request_of(vars(arguments))
    _validate(request)
    comparison = _compare(request, load_statistics(request.statistics, request.range))
    try:
        # Before the table: a closed standard output must not cost the files.
        _write(request, comparison, command)
    finally:
        print(render(comparison, stdout_colour_mode()), flush=True)
    return 0


def request_of(arguments: Mapping[str, Any]) -> ReportRequest:
    """What the command line asks for, its configuration file included."""
    return ReportRequest(**request_values(arguments, BY_KEY))


def _validate(request: ReportRequest) -> None:
    check_ranks(request.ranks)
    inputs = {"STATS": request.statistics}
    if request.placement is not None:
        inputs["--placement"] = request.placement
    check_outputs(inputs, {"--json": request.json, "--html": request.html})


def _compare(request: ReportRequest, statistics: "ExpertStatistics") -> "Comparison":
    from equipoise.report.placement.comparison import compare

    placement: ExpertPlacement | None = None
    if request.placement is not None:
        placement = load_placement("--placement", request.placement, request.ranks)
    ranks = placement.ranks if placement is not None else _ranks(request, statistics)
    with usage_errors("" if request.placement is None else f"--placement: {request.placement}"):
        return compare(statistics, placement, ranks)


def _ranks(request: ReportRequest, statistics: "ExpertStatistics") -> int:
    if request.ranks is not None:
        return request.ranks
    if statistics.by_rank is None:
        raise UsageError(
            f"--ranks is needed: {request.statistics} does not say how many ranks recorded it"
        )
    return len(statistics.by_rank)


def _write(request: ReportRequest, comparison: "Comparison", command: str) -> None:
    about = {"command": command, "statistics": str(request.statistics)}
    if request.placement is not None:
        about["placement"] = str(request.placement)
    if request.range is not None:
        about["range"] = str(request.range)
    lines = []
    if request.json is not None:
        text = json.dumps(about | comparison.to_json(), indent=2, allow_nan=False)
        place = write_file(request.json, text + "\n")
        lines.append(f"figures: {place}")
    if request.html is not None:
        from equipoise.report.placement.html import render_html
        from equipoise.report.svg import PlotsMissing

        try:
            place = write_file(request.html, render_html(comparison, about))
            lines.append(f"page: {place}")
        except PlotsMissing as missing:
            warn(f"no page: {missing}")
    print_written(request.progress, lines)
