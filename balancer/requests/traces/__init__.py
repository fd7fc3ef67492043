"""Reads published traces of requests into a `Workload`.

from equipoise.balancer.requests.traces import read_trace
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.balancer.requests.traces.reader import read_trace

__all__ = ["read_trace"]


def __getattr__(name: str) -> object:
    # Imported on first use: a command line that lists the formats must not wait for numpy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.balancer.requests.traces import reader

    return getattr(reader, name)
