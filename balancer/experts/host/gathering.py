"""How ranks that may be on one machine come to share one memory, or find that they cannot.

The lowest rank makes the memory and offers it. The others open it by /proc; whom that is not
permitted knocks at a door that the owner then opens; who does not get through that either stays
apart. Those who are apart begin again among themselves: two containers under one name of a node
end up with a pool each. Every round has at least one rank fewer.
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equipoise.balancer.experts.host import memory
from equipoise.balancer.experts.host.council import Council
from equipoise.balancer.experts.host.door import Door, knock
from equipoise.balancer.experts.host.header import TOKEN, Header
from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.balancer.experts.host.offer import Offer, boot
from equipoise.balancer.experts.host.room import room
from equipoise.hal.errors import ExpertPoolError, ForeignMemory, NoRoom

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Gathered:
    """Ranks that hold one memory, lowest first, and this rank's descriptor of it."""

    ranks: Ranks
    descriptor: int


def gather(council: Council, layout: PoolLayout) -> Gathered:
    """Memory for `layout`, shared with as many of the council's ranks as can.

    Raises:
        NoRoom: the machine has not so much; on every rank that would have shared it.
        ExpertPoolError: the owner could not make it.
        ControlError: a rank did not answer in time.
    """
    left, number = council.ranks, 0
    while True:
        if council.rank == left[0]:
            return _lead(council, layout, left, number)
        found = _join(council, layout, left, number)
        if isinstance(found, Gathered):
            return found
        left, number = found, number + 1


def _lead(council: Council, layout: PoolLayout, ranks: Ranks, number: int) -> Gathered:
    descriptor, token = _make(council, layout, number)
    try:
        council.say(f"offer{number}", {"offer": Offer.of(descriptor, token).encode()})
        refused = _refused(council, f"answer{number}", ranks[1:])
        if refused:
            with Door(descriptor, token) as door:
                council.say(f"door{number}", door.address)
                refused = _refused(council, f"knocked{number}", refused)
    except BaseException:
        os.close(descriptor)
        raise
    return Gathered(_without(ranks, refused), descriptor)


def _make(council: Council, layout: PoolLayout, number: int) -> tuple[int, bytes]:
    """The memory, and the token of this instance in it. What fails is told to those who wait."""
    token = secrets.token_bytes(TOKEN)
    try:
        found = room()
        if layout.total > found.free:
            raise NoRoom(layout.total, found.free, found.whose)
        descriptor = memory.create(layout.total)
        try:
            memory.reserve(descriptor, 0, layout.first)
            Header.of(layout, token).write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    except NoRoom as error:
        council.say(f"offer{number}", {"room": [error.wanted, error.free, error.whose]})
        raise
    except (ExpertPoolError, OSError, ValueError) as error:
        council.say(f"offer{number}", {"error": f"rank {council.rank}: {error}"})
        raise ExpertPoolError(str(error)) from error
    return descriptor, token


def _join(council: Council, layout: PoolLayout, ranks: Ranks, number: int) -> Gathered | Ranks:
    """The memory, or the ranks that stay apart, of which this is one."""
    owner = ranks[:1]
    offer = _offered(council.hear(f"offer{number}", owner)[owner[0]])
    descriptor, reason = _try(lambda: offer.open(layout))
    try:
        council.say(f"answer{number}", reason)
        refused = _refused(council, f"answer{number}", ranks[1:])
        if council.rank in refused:
            address = str(council.hear(f"door{number}", owner)[owner[0]])
            descriptor, reason = _try(lambda: _knock(address, offer, layout))
            council.say(f"knocked{number}", reason)
        refused = _refused(council, f"knocked{number}", refused)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    if descriptor is None:
        return refused
    return Gathered(_without(ranks, refused), descriptor)


def _offered(told: dict[str, Any]) -> Offer:
    """What the owner offers. Raises what it failed with."""
    if "room" in told:
        raise NoRoom(*told["room"])
    if "error" in told:
        raise ExpertPoolError(told["error"])
    return Offer.decode(told["offer"])


def _knock(address: str, offer: Offer, layout: PoolLayout) -> int:
    if offer.boot != boot():
        raise ForeignMemory("it is on another machine")
    return knock(address, offer, layout)


def _try(opening: Callable[[], int]) -> tuple[int | None, str]:
    """A descriptor and "", or none and why."""
    try:
        return opening(), ""
    except ForeignMemory as error:
        return None, str(error)


def _refused(council: Council, question: str, ranks: Ranks) -> Ranks:
    """Which of `ranks` say why they have it not."""
    return tuple(rank for rank, reason in council.hear(question, ranks).items() if reason)


def _without(ranks: Ranks, others: Ranks) -> Ranks:
    return tuple(rank for rank in ranks if rank not in others)
