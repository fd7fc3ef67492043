"""The options of `equipoise record`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.balancer.formats.iterations import Iterations
from equipoise.balancer.formats.names import IN_A_FOLDER, STATISTICS
from equipoise.cli import kinds
from equipoise.cli.options import BY_KEY as RUN
from equipoise.cli.options import Option, merged, settings_of
from equipoise.demo.settings import Balance, RunSettings

SUBJECT, OUTPUT = "what is recorded", "output"
OWN = "range", "run", "out", "format", "quiet"
"""Keys that are not of serving."""

OPTIONS = (
    Option(key="range", kind=kinds.RANGE, group=SUBJECT, metavar="START-STOP",
           shown_default="every step",
           help="only these steps; STOP itself is not one of them"),
    Option(key="run", kind=kinds.PATH, group=SUBJECT, metavar="DIR", shown_default="none",
           help="what `equipoise run` has left there (its --out), instead of serving: the sum of "
           "all ranks"),
    *(RUN[key] for key in ("ranks", "backend", "communicator", "deadline")),
    *(RUN[key] for key in ("steps", "text", "seed")),
    Option(key="balance", kind=kinds.BALANCE, group=RUN["balance"].group, metavar="on|off",
           shown_default="off",
           help="whether experts move meanwhile; the counts are the same: they are of experts, "
           "not of slots"),
    *(RUN[key] for key in ("slots", "num_redundant_experts", "shares")),
    *(RUN[key] for key in ("window_size", "step_interval")),
    Option(key="out", short="-o", kind=kinds.PATH, group=OUTPUT, metavar="DIR|FILE",
           shown_default="none: has to be given",
           help="write the statistics there: a new or empty folder, or a file"),
    Option(key="format", kind=kinds.NAME, group=OUTPUT, metavar="NAME",
           shown_default=f"as the suffix says, a folder is {IN_A_FOLDER}",
           help=f"format of the statistics: {', '.join(STATISTICS)}"),
    replace(RUN["quiet"], help="no progress, only the closing line", shown_default="off"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """What one `equipoise record` was asked for; `progress` is `shown` or `hidden`.

    `said` are the keys that anybody gave a value to, on the command line or in a file.
    """

    settings: RunSettings
    range: Iterations | None = None
    run: Path | None = None
    out: Path | None = None
    format: str | None = None
    progress: str = "shown"
    said: frozenset[str] = frozenset()


def resolve(command_line: Mapping[str, Any], file: Mapping[str, Any]) -> RecordRequest:
    """Command line over configuration file over default. Raises UsageError."""
    values = merged(command_line, file)
    own = {key: values[key] for key in OWN if key in values and key != "quiet"}
    served = {key: value for key, value in values.items() if key not in OWN}
    return RecordRequest(
        settings=settings_of({"balance": Balance.OFF} | served),
        progress="hidden" if values.get("quiet") else "shown",
        said=frozenset(values),
        **own,
    )
