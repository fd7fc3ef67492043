"""Reads a trace file of any known format, which is detected from its content."""

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType

from equipoise.balancer.formats.numbers import short_repr
from equipoise.balancer.requests.catalogue import FORMATS
from equipoise.balancer.requests.traces import azure, burstgpt, mooncake, sharegpt
from equipoise.balancer.requests.traces.csv_columns import csv_header
from equipoise.balancer.requests.traces.trace_file import TraceFile, open_trace_file
from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import UsageError

READERS: Mapping[str, Callable[[TraceFile, int | None], Workload]] = MappingProxyType(
    {
        "azure": azure.read,
        "mooncake": mooncake.read,
        "burstgpt": burstgpt.read,
        "sharegpt": sharegpt.read,
    }
)
CSV_COLUMNS = {"azure": azure.COLUMNS, "burstgpt": burstgpt.COLUMNS}
"""Columns of the CSV formats."""


def read_trace(
    path: str | PathLike[str], format: str | None = None, most: int | None = None
) -> Workload:
    """Reads the requests of a file, which may be compressed with gzip.

    Args:
        path: the file.
        format: a key of `FORMATS`; None: detected from the beginning of the file.
        most: maximum number of rows to read, some of which may be dropped (in ShareGPT, a row is a
            conversation); None: all.

    Returns:
        The requests in order of time, with notes on what was dropped, sorted or estimated.

    Raises:
        FormatError: names the file, the line if there is one, what was expected and what was found.
        UsageError: the format is unknown, or `most` is below 1.
    """
    if format is not None and format not in READERS:
        raise UsageError(f"no trace format is called {format!r}: there are {', '.join(FORMATS)}")
    if most is not None and most < 1:
        raise UsageError(f"at most {most} rows of a trace are none: at least 1")
    with open_trace_file(Path(path)) as source:
        return READERS[format or _detect_format(source)](source, most)


def _detect_format(source: TraceFile) -> str:
    """Returns the format of a file by its first bytes."""
    names = csv_header(source.head)
    for name, columns in CSV_COLUMNS.items():
        if set(columns) <= set(names):
            return name
    first = source.head.lstrip()[:1]
    if first in (b"[", b"{"):
        return "sharegpt" if first == b"[" else "mooncake"
    begins = short_repr(source.head[:100].partition(b"\n")[0].decode(errors="replace"))
    headers = " or ".join(repr(",".join(columns)) for columns in CSV_COLUMNS.values())
    raise source.error(f"begins with {begins}, expected columns {headers}, or JSON", 1)
