"""What several properties cannot do without."""

from equipoise.hal.conformance.property import Needs, Traits
from equipoise.hal.stream import Role


def side_by_side(traits: Traits) -> tuple[str, ...]:
    """The roles whose streams run side by side: the first ones, as many as are declared (B8)."""
    return tuple(role.value for role in Role)[: traits.accelerator.streams]


def several_streams(traits: Traits) -> str | None:
    """Two streams that run side by side."""
    return None if len(side_by_side(traits)) > 1 else "streams"


def a_lock(traits: Traits) -> str | None:
    """A stream lock."""
    return None if traits.accelerator.stream_lock else "stream_lock"


def a_held_stream(traits: Traits) -> str | None:
    """A stream that can be held while another one runs."""
    if not traits.controlled and a_lock(traits):
        return "stream_lock"
    return several_streams(traits)


def a_graph(traits: Traits) -> str | None:
    """Capturing."""
    return None if traits.accelerator.graph_capture else "graph_capture"


def all_of(*needs: Needs) -> Needs:
    """The first that is missing."""
    return lambda traits: next(filter(None, (need(traits) for need in needs)), None)


def copies_beside_launches(traits: Traits) -> str | None:
    """Copies from the host that end while a launched stream waits."""
    declared = traits.accelerator.copy_independent_of_launch
    return None if declared else "copy_independent_of_launch"
