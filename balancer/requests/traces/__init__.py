"""Traces of requests that others published: files in, a `Workload` out.

from equipoise.balancer.requests.traces import read_trace
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.balancer.requests.traces.reader import read_trace

__all__ = ["read_trace"]


def __getattr__(name: str) -> object:
    # Only when asked for: a command line lists the formats and needs no numpy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.balancer.requests.traces import reader

    return getattr(reader, name)
