"""The options of `equipoise report`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.balancer.formats.iterations import Iterations
from equipoise.cli import kinds
from equipoise.cli.options import Option

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
    range: Iterations | None = None
    json: Path | None = None
    html: Path | None = None
    progress: str = "shown"
