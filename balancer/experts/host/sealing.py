"""From memory that a node's ranks hold to a pool that all may read and nobody may write."""

import os
from collections.abc import Iterator

from equipoise.balancer.experts.host import memory
from equipoise.balancer.experts.host.contents import Contents
from equipoise.balancer.experts.host.council import Council
from equipoise.balancer.experts.host.gathering import Gathered
from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.balancer.experts.host.memory import HugePages, Mapping
from equipoise.balancer.experts.host.states import Filling, Sealed, Users
from equipoise.hal.errors import ExpertPoolError, PoolDamaged, PoolIncomplete, PoolLeased

Ranks = tuple[int, ...]
SHOWN = 3
"""How many experts a complaint names."""


def owned(layout: PoolLayout, place: int, parts: int) -> Iterator[tuple[int, int]]:
    """Each (layer, expert) that the rank at `place` of `parts` fills.

    Every so many-th, so that the memory of every layer is spread over the NUMA nodes of the ranks
    that touch it first.
    """
    for layer in range(layout.layers):
        for expert in range(place, layout.experts, parts):
            yield layer, expert


def prepare(council: Council, layout: PoolLayout, gathered: Gathered) -> Filling:
    """Map the memory and reserve this rank's part; so does every rank that holds it.

    Raises:
        PoolIncomplete: on every rank, if one could not.
    """
    try:
        return _prepare(council, layout, gathered)
    except BaseException:
        os.close(gathered.descriptor)
        raise


def _prepare(council: Council, layout: PoolLayout, gathered: Gathered) -> Filling:
    try:
        mapping = Mapping.to_write(gathered.descriptor, layout.total)
    except ExpertPoolError as error:
        council.agree("reserved", str(error), gathered.ranks, PoolIncomplete)
        raise
    try:
        complaint = _reserve(council, layout, gathered, mapping)
        council.agree("reserved", complaint, gathered.ranks, PoolIncomplete)
        return Filling(council, gathered.descriptor, mapping, Contents(layout, mapping.tensor()))
    except BaseException:
        mapping.abandon()
        raise


def _reserve(council: Council, layout: PoolLayout, gathered: Gathered, mapping: Mapping) -> str:
    """Take this rank's pages, expert by expert; what went wrong, or ""."""
    place, parts = gathered.ranks.index(council.rank), len(gathered.ranks)
    for layer, expert in owned(layout, place, parts):
        if council.left() <= 0.0:
            return f"had no time to reserve expert {expert} of layer {layer} and later ones"
        at = layout.at(layer, expert)
        if mapping.huge_pages is HugePages.ADVISED:
            mapping.populate(at, layout.stride)
        try:
            memory.reserve(gathered.descriptor, at, layout.stride)
        except PoolIncomplete as error:
            return str(error)
    return ""


def seal(state: Filling, layout: PoolLayout, ranks: Ranks, timeout: float) -> Sealed:
    """From filling to sealed, on all of `ranks` together; each step begins when all did the last.

    Raises as `ExpertPool.seal`; the memory is released then.
    """
    council = state.council
    council.renew(timeout)
    try:
        _finish(state, layout, ranks)
        _forbid(state, ranks)
        mapping = _map(state, layout, ranks)
    except BaseException:
        state.release()
        raise
    os.close(state.descriptor)
    contents = Contents(layout, mapping.tensor())
    try:
        council.agree("verified", _verify(council, layout, ranks, contents), ranks, PoolDamaged)
    except BaseException:
        contents.release()
        mapping.abandon()
        raise
    return Sealed(mapping, contents, Users())


def _finish(state: Filling, layout: PoolLayout, ranks: Ranks) -> None:
    """Everything is written, and mapped to be written by nobody."""
    council = state.council
    mine = owned(layout, ranks.index(council.rank), len(ranks))
    missing = [which for which in mine if layout.number(*which) not in state.filled]
    complaint = f"has not filled {_named(missing)}" if missing else ""
    try:
        state.users.drain(0.0)
        state.contents.release()
        state.mapping.close()
    except PoolLeased as error:
        complaint = complaint or f"is still filling: {error}"
    council.agree("filled", complaint, ranks, PoolIncomplete)


def _forbid(state: Filling, ranks: Ranks) -> None:
    """The first rank seals; the kernel does it only if no process could still write."""
    council, complaint = state.council, ""
    if council.rank == ranks[0]:
        try:
            memory.seal(state.descriptor)
        except ExpertPoolError as error:
            complaint = str(error)
        council.say("sealed", complaint)
    told = council.hear("sealed", ranks[:1])[ranks[0]]
    if told:
        raise ExpertPoolError(f"rank {ranks[0]}: {told}")


def _map(state: Filling, layout: PoolLayout, ranks: Ranks) -> Mapping:
    """To be read, once this rank has seen the seal itself. A failure is told to the others."""
    try:
        if not memory.seals(state.descriptor) & memory.READ_ONLY:
            raise ExpertPoolError("the pool is not sealed though its first rank said so")
        return Mapping.to_read(state.descriptor, layout.total)
    except ExpertPoolError as error:
        state.council.agree("verified", str(error), ranks, PoolDamaged)
        raise


def _verify(council: Council, layout: PoolLayout, ranks: Ranks, contents: Contents) -> str:
    """Read this rank's part back, now that it cannot change; what is wrong with it, or ""."""
    wrong = []
    for layer, expert in owned(layout, ranks.index(council.rank), len(ranks)):
        if council.left() <= 0.0:
            return f"had no time to verify expert {expert} of layer {layer} and later ones"
        if not contents.intact(layer, expert):
            wrong.append((layer, expert))
    return f"other bytes than were written in {_named(wrong)}" if wrong else ""


def _named(experts: list[tuple[int, int]]) -> str:
    named = [f"expert {expert} of layer {layer}" for layer, expert in experts[:SHOWN]]
    more = len(experts) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
