"""A file of a known trace to a workload, the format told by what is in it."""

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
"""By format, columns that its CSV has."""


def read_trace(
    path: str | PathLike[str], format: str | None = None, most: int | None = None
) -> Workload:
    """Requests of a file, which gzip may have compressed.

    Args:
        path: the file.
        format: one of `FORMATS`; None: told by how the file begins.
        most: no more than so many rows are read, of which some may be dropped (of ShareGPT, a
            row is a conversation); None: all.

    Returns: the requests in order of time. Its notes say what was dropped, sorted or estimated.

    Raises: FormatError that names the file and, where there is one, the line, what was expected and
    what was found; UsageError for an unknown format, and for `most` below 1.
    """
    if format is not None and format not in READERS:
        raise UsageError(f"no trace format is called {format!r}: there are {', '.join(FORMATS)}")
    if most is not None and most < 1:
        raise UsageError(f"at most {most} rows of a trace are none: at least 1")
    with open_trace_file(Path(path)) as source:
        return READERS[format or _detect_format(source)](source, most)


def _detect_format(source: TraceFile) -> str:
    """The format of what begins so."""
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
