"""`equipoise report`: its options, its checks, and how evenly a placement spreads load."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from equipoise.balancer.formats.iterations import IterationRange
from equipoise.cli import kinds
from equipoise.cli.command import Command, Settings
from equipoise.cli.offline import (
    MAX_RANKS,
    STATISTICS,
    check_outputs,
    load_placement,
    load_statistics,
    print_written,
    ranks_to_serve,
    usage_errors,
    write_figures,
    write_page,
)
from equipoise.option import OUTPUT, Option

SUBJECT = "what is compared"
REPORT = """\
Say how evenly rows spread over ranks and over slots: mean, standard deviation
and imbalance; with experts in their order on consecutive ranks and, if given,
with a placement."""
EXAMPLES = """\
examples:
  equipoise report recorded/ --ranks 32
  equipoise report recorded/ --placement placement.json --html report.html

exit code: 0 reported, 2 bad input, 3 something could not be written"""


@dataclass(frozen=True, kw_only=True)
class ReportRequest(Settings):
    """What one `equipoise report` was asked for."""

    # fmt: off
    statistics: Annotated[Path, STATISTICS]
    placement: Annotated[Path | None, Option(
        "placement, in any format, to serve the same rows with", SUBJECT)] = None
    ranks: Annotated[int | None, Option(
        "ranks that the experts are spread over", SUBJECT, least=1, most=MAX_RANKS,
        default="those of --placement, or that recorded")] = None
    range: Annotated[IterationRange | None, Option(
        "only these iterations; STOP itself is not one of them", SUBJECT, kind=kinds.RANGE,
        default="all that were recorded")] = None
    json: Annotated[Path | None, Option("write the figures of every layer there", OUTPUT)] = None
    html: Annotated[Path | None, Option("write a page with heat maps there", OUTPUT)] = None
    # fmt: on


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
    from equipoise.report.placement.comparison import Comparison


def report(request: ReportRequest, command: str) -> int:
    """Read statistics, write the figures and the page, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.placement.comparison import render
    from equipoise.report.terminal import stdout_colour_mode

    _validate(request)
    comparison = _compare(request, load_statistics(request.statistics, request.range))
    try:
        # Before the table: a closed standard output must not cost the files.
        _write(request, comparison, command)
    finally:
        print(render(comparison, stdout_colour_mode()), flush=True)
    return 0


def _validate(request: ReportRequest) -> None:
    inputs = {"STATS": request.statistics}
    if request.placement is not None:
        inputs["--placement"] = request.placement
    check_outputs(inputs, {"--json": request.json, "--html": request.html})


def _compare(request: ReportRequest, statistics: "ExpertStatistics") -> "Comparison":
    from equipoise.report.placement.comparison import compare

    placement: ExpertPlacement | None = None
    if request.placement is not None:
        placement = load_placement("--placement", request.placement, request.ranks)
    if placement is not None:
        ranks = placement.ranks
    else:
        ranks = ranks_to_serve(request.ranks, request.statistics, statistics.recorders)
    with usage_errors("" if request.placement is None else f"--placement: {request.placement}"):
        return compare(statistics, placement, ranks)


def _write(request: ReportRequest, comparison: "Comparison", command: str) -> None:
    about = {"command": command, "statistics": str(request.statistics)}
    if request.placement is not None:
        about["placement"] = str(request.placement)
    if request.range is not None:
        about["range"] = str(request.range)

    def page() -> str:
        from equipoise.report.placement.html import render_html

        return render_html(comparison, about)

    lines = write_figures(request.json, about | comparison.to_json())
    lines += write_page(request.html, page)
    print_written(request.progress, lines)


COMMAND = Command(ReportRequest, report, description=REPORT, examples=EXAMPLES)
