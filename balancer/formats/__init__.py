"""Other systems' files, and our own: statistics and placements in, statistics and placements out.

    from equipoise.balancer import formats
    statistics = formats.read_statistics("recorded/")
    lost = formats.write_placement("moe_load_balancer.yaml", arrangement)

Every bad file is one `FormatError`. The table of formats is docs/formats.md.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.balancer.formats.iterations import Iterations
    from equipoise.balancer.formats.placement import Arrangement
    from equipoise.balancer.formats.read_write import (
        known,
        placement_format,
        read_either,
        read_placement,
        read_statistics,
        statistics_format,
        write_placement,
        write_statistics,
    )
    from equipoise.balancer.formats.recorder import Recorder
    from equipoise.balancer.formats.statistics import Statistics

__all__ = [
    "Arrangement",
    "Iterations",
    "Recorder",
    "Statistics",
    "known",
    "placement_format",
    "read_either",
    "read_placement",
    "read_statistics",
    "statistics_format",
    "write_placement",
    "write_statistics",
]
HOMES = {
    "Arrangement": "placement",
    "Iterations": "iterations",
    "Recorder": "recorder",
    "Statistics": "statistics",
}


def __getattr__(name: str) -> object:
    # Only when asked for: a command line reads the configuration and needs no numpy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = HOMES.get(name, "read_write")
    return getattr(import_module(f"equipoise.balancer.formats.{home}"), name)
