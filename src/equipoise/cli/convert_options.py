"""The options of `equipoise convert`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.balancer.formats.names import PLACEMENTS, STATISTICS
from equipoise.cli import kinds
from equipoise.cli.options import Option

FILES = "files"

OPTIONS = (
    Option(key="format", kind=kinds.NAME, group=FILES, metavar="NAME",
           shown_default="as the suffix says, none is a folder",
           help=f"format of OUT; statistics: {', '.join(STATISTICS)}; placements: "
           f"{', '.join(PLACEMENTS)}"),
    Option(key="ranks", kind=kinds.WHOLE, group=FILES, metavar="N", shown_default="as IN says",
           help="IN is a placement for so many ranks: needed where it does not say it"),
    Option(key="quiet", kind=kinds.SWITCH, group=FILES, shown_default="off",
           help="say nothing of what was read and written"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    """What one `equipoise convert` was asked for; `progress` is `shown` or `hidden`."""

    source: Path
    out: Path
    format: str | None = None
    ranks: int | None = None
    progress: str = "shown"
