"""The host pool between processes."""

import dataclasses
import gc
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

from helpers.harnesses.host_pool import LAYOUT, fill, holdings, holds, opened, sealed
from helpers.rank_programs.call_outcome import Outcome, outcome
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.host_pool import shared_memory
from equipoise.balancer.experts.host_pool.pool import HostExpertPool
from equipoise.balancer.experts.host_pool.rendezvous import MemoryHandle, NodeCoordinator
from equipoise.balancer.experts.host_pool.shared_memory import SharedMapping
from equipoise.hal.communicator import Fabric
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import PoolMismatch

OPEN_POOLS: list[HostExpertPool] = []
"""Pools that a case leaves open."""


def share(fabric: Fabric, over_socket: bool = False) -> dict[str, Any]:
    """Fill and read one pool; over a socket, if nobody may look into another's /proc."""
    barred = mock.patch.object(MemoryHandle, "open", side_effect=PoolMismatch("not permitted"))
    if over_socket:
        barred.start()
    try:
        pool = sealed(fabric.control)
    finally:
        mock.patch.stopall()
    state = {"holds": holds(pool), "ranks": pool.ranks, "during": holdings()}
    pool.close()
    gc.collect()
    return state | {"after": holdings()}


def keep(fabric: Fabric) -> int:
    """The inode of a pool that stays open."""
    OPEN_POOLS.append(sealed(fabric.control))
    with open("/proc/self/maps") as maps:
        return next(int(line.split()[4]) for line in maps if shared_memory.MEMORY_NAME in line)


def die_instead_of(fabric: Fabric, victim: int, word: int) -> dict[str, Any]:
    """The victim is killed when it is about to say its n-th word; the others go on."""
    spoken = iter(range(1 << 10))

    def mortal(say: Callable[..., None]) -> Callable[..., None]:
        def counted_say(self: NodeCoordinator, *words: Any) -> None:
            if self.rank == victim and next(spoken) == word:
                os.kill(os.getpid(), signal.SIGKILL)
            say(self, *words)

        return counted_say

    def work() -> None:
        pool = HostExpertPool.open(fabric.control, range(3), LAYOUT, name="doomed", timeout=1.0)
        fill(pool)
        pool.seal(1.0)

    with (
        mock.patch.object(NodeCoordinator, "check_same", mortal(NodeCoordinator.check_same)),
        mock.patch.object(NodeCoordinator, "publish", mortal(NodeCoordinator.publish)),
    ):
        work_outcome = outcome(work)
    gc.collect()
    return {"ended": work_outcome, "holdings": holdings()}


def outlive(fabric: Fabric, victim: int) -> bool:
    """The victim dies once the pool is sealed; the others read on. Whether they found all of it."""
    pool = sealed(fabric.control)
    if fabric.control.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    fabric.control.lost_rank(WATCHDOG)
    intact = holds(pool)
    pool.close()
    return intact


def instances(fabric: Fabric) -> dict[str, Any]:
    """Ranks 0 and 1 are one job, 2 and 3 another, at the same time on the same machine."""
    control = fabric.control
    job = control.rank // 2
    members = (2 * job, 2 * job + 1)
    pool = HostExpertPool.open(control, members, LAYOUT, name=f"job{job}", timeout=WATCHDOG)
    fill(pool, seed=job)
    _meet(control, "filled")
    pool.seal(WATCHDOG)
    _meet(control, "sealed")
    state = {"holds": holds(pool, seed=job), "ranks": pool.ranks}
    _meet(control, "read")
    pool.close()
    return state


def steal(fabric: Fabric) -> list[Outcome] | None:
    """Rank 0 holds a pool of one instance; rank 1 comes with the token of its own, then rightly."""
    control = fabric.control
    pool = HostExpertPool.open(
        control, [control.rank], LAYOUT, name=f"{control.rank}", timeout=WATCHDOG
    )
    state = pool._state
    header = os.pread(state.descriptor, 24, 0)  # type: ignore[union-attr]
    mine = MemoryHandle.of(state.descriptor, header[8:])  # type: ignore[union-attr]
    control.cast("offers", mine.encode().encode())
    theirs = MemoryHandle.decode(control.collect("offers", WATCHDOG)[1 - control.rank].decode())
    tries = [dataclasses.replace(theirs, token=mine.token), theirs]
    outcomes = [outcome(lambda o=o: os.close(o.open(LAYOUT))) for o in tries]  # type: ignore[misc]
    _meet(control, "tried")
    pool.close()
    return outcomes


def hoard(fabric: Fabric) -> Outcome:
    """Rank 1 keeps a mapping through which it could write."""
    pool = opened(fabric.control)
    fill(pool)
    state = pool._state
    descriptor: int = state.descriptor  # type: ignore[union-attr]
    hoarded = (
        SharedMapping.for_writing(descriptor, LAYOUT.nbytes) if fabric.control.rank == 1 else None
    )
    seal_outcome = outcome(lambda: pool.seal(WATCHDOG))
    if hoarded is not None:
        hoarded.close()
    return seal_outcome


def _meet(control: ControlPlane, where: str) -> None:
    control.cast(where, b"")
    control.collect(where, WATCHDOG)
