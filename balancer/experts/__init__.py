"""Expert balance: which expert sits in which slot, and how it gets there.

from equipoise.balancer.experts import Plan, plan
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.balancer.experts.planning.planner import Plan, plan

__all__ = ["Plan", "plan"]


def __getattr__(name: str) -> object:
    # Only when asked for: a command line reads the configuration and needs no numpy.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.balancer.experts.planning import planner

    return getattr(planner, name)
