"""What `metrics:` of `equipoise route` says: by which names workers tell what they have to do."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.hal.errors import UsageError
from equipoise.serve.settings import ReportSettings, WorkerSettings

NAMES = "waiting", "running", "kv_usage", "tokens"
SECONDS = "interval", "timeout"
OTHERS = "path", "rank_label"
KEYS = (*NAMES, *SECONDS, *OTHERS)
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
PATH = re.compile(r"/[!-~]*", re.ASCII)
LEAST, MOST = 0.01, 3600.0


def reports_of(
    said: Mapping[str, object], workers: Sequence[WorkerSettings]
) -> ReportSettings | None:
    """None where nothing is said. Raises UsageError naming the key."""
    if not said:
        return None
    for key in said:
        if key not in KEYS:
            raise UsageError(f"--metrics: unknown key {key!r}; known: {', '.join(KEYS)}")
    for key in ("waiting", "running"):
        if key not in said:
            raise UsageError(f"--metrics: {key} is needed: the name of a metric")
    values: dict[str, Any] = {key: _read(key, value) for key, value in said.items()}
    settings = ReportSettings(**values)
    _check(settings, workers)
    return settings


def _read(key: str, value: object) -> object:
    if key in SECONDS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not LEAST <= float(str(value)) <= MOST:
            raise UsageError(
                f"--metrics: {key} must be {LEAST:g} to {MOST:g} seconds, got {value!r}"
            )
        return float(str(value))
    shape, word = (PATH, "a path") if key == "path" else (NAME, "a name")
    if not isinstance(value, str) or not shape.fullmatch(value):
        raise UsageError(f"--metrics: {key} has to be {word}, got {value!r}")
    return value


def _check(settings: ReportSettings, workers: Sequence[WorkerSettings]) -> None:
    if settings.tokens is None:
        roomless = [one.name for one in workers if one.room is None]
        if settings.kv_usage is None or roomless:
            of = f" of worker {roomless[0]}" if roomless else ""
            raise UsageError(
                "--metrics: tokens are needed: a metric of that name, or kv_usage and room" + of
            )
    urls = [one.url for one in workers]
    for one in workers:
        told = settings.rank_label is not None and one.rank is not None
        if urls.count(one.url) > 1 and not told:
            raise UsageError(
                f"--metrics: several workers are {one.url}: rank_label is needed, the label that "
                "tells them apart, and a rank in the headers of each"
            )
