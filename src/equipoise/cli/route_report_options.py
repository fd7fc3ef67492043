"""The options of `equipoise route-report`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.cli import kinds
from equipoise.cli.options import Option

ROUTE_REPORT = """\
Say of the log of `equipoise route` which worker had which requests, when, and how
evenly: a table, and a page with pictures. LOG is what `log:` of the proxy named."""
ROUTE_REPORT_EXAMPLES = """\
examples:
  equipoise route-report requests.jsonl
  equipoise route-report requests.jsonl --html report.html --json figures.json
  equipoise route-report requests.jsonl --run 2

exit code: 0 reported, 2 bad input, 3 something could not be written"""
SUBJECT, OUTPUT = "what is reported", "output"

OPTIONS = (
    Option(key="run", kind=kinds.WHOLE, group=SUBJECT, metavar="N",
           shown_default="the only one",
           help="which run of the proxy, where it was started several times with this log; "
           "1 is the first"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write a page with pictures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class RouteReportRequest:
    """What one `equipoise route-report` was asked for; `progress` is `shown` or `hidden`."""

    log: Path
    run: int | None = None
    json: Path | None = None
    html: Path | None = None
    progress: str = "shown"
