"""Reads and writes expert statistics, placements and routing traces, our own and other systems'.

    from equipoise.balancer import formats
    statistics = formats.read_statistics("recorded/")
    loss = formats.write_placement("moe_load_balancer.yaml", placement)
    trace = formats.read_trace("routed/")  # streamed: it may be larger than memory

A file that cannot be read raises one `FormatError`. docs/formats.md lists the formats.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.balancer.formats.iterations import IterationRange
    from equipoise.balancer.formats.placement import ExpertPlacement
    from equipoise.balancer.formats.read_write import (
        known_formats,
        placement_format,
        read_either,
        read_placement,
        read_statistics,
        statistics_format,
        write_placement,
        write_statistics,
    )
    from equipoise.balancer.formats.recorder import StatisticsRecorder
    from equipoise.balancer.formats.routing_trace import (
        CountsTrace,
        RoutedTokens,
        RoutingTrace,
        TraceUnit,
    )
    from equipoise.balancer.formats.statistics import ExpertStatistics
    from equipoise.balancer.formats.trace_reading import read_trace
    from equipoise.balancer.formats.trace_writing import write_trace

__all__ = [
    "CountsTrace",
    "ExpertPlacement",
    "ExpertStatistics",
    "IterationRange",
    "RoutedTokens",
    "RoutingTrace",
    "StatisticsRecorder",
    "TraceUnit",
    "known_formats",
    "placement_format",
    "read_either",
    "read_placement",
    "read_statistics",
    "read_trace",
    "statistics_format",
    "write_placement",
    "write_statistics",
    "write_trace",
]
_MODULE_BY_NAME = {
    "ExpertPlacement": "placement",
    "IterationRange": "iterations",
    "StatisticsRecorder": "recorder",
    "ExpertStatistics": "statistics",
    "CountsTrace": "routing_trace",
    "RoutedTokens": "routing_trace",
    "RoutingTrace": "routing_trace",
    "TraceUnit": "routing_trace",
    "read_trace": "trace_reading",
    "write_trace": "trace_writing",
}


def __getattr__(name: str) -> object:
    # Imported on first use: a command line that only checks its options must not wait for numpy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = _MODULE_BY_NAME.get(name, "read_write")
    return getattr(import_module(f"equipoise.balancer.formats.{module}"), name)
