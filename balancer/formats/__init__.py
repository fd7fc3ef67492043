"""Reads and writes expert statistics and placements, in our own formats and those of other systems.

    from equipoise.balancer import formats
    statistics = formats.read_statistics("recorded/")
    loss = formats.write_placement("moe_load_balancer.yaml", placement)

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
    from equipoise.balancer.formats.statistics import ExpertStatistics

__all__ = [
    "ExpertPlacement",
    "ExpertStatistics",
    "IterationRange",
    "StatisticsRecorder",
    "known_formats",
    "placement_format",
    "read_either",
    "read_placement",
    "read_statistics",
    "statistics_format",
    "write_placement",
    "write_statistics",
]
_MODULE_BY_NAME = {
    "ExpertPlacement": "placement",
    "IterationRange": "iterations",
    "StatisticsRecorder": "recorder",
    "ExpertStatistics": "statistics",
}


def __getattr__(name: str) -> object:
    # Imported on first use: a command line that only checks its options must not wait for numpy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = _MODULE_BY_NAME.get(name, "read_write")
    return getattr(import_module(f"equipoise.balancer.formats.{module}"), name)
