"""Groups of ranks that are runs of their own."""

from typing import Any

import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.rank_programs.operations import total
from helpers.watchdog import WATCHDOG

from equipoise.hal.communicator import Fabric
from equipoise.hal.subgroup import SubgroupFabric


def two_groups(fabric: Fabric) -> Any:
    """Even and odd ranks ask the same questions, under the same purposes, in their own groups."""
    rank, size = fabric.control.rank, fabric.control.size
    members = list(range(rank % 2, size, 2))[::-1]
    group = SubgroupFabric(fabric, f"group {rank % 2}", members)
    control = group.control
    control.cast("who", str(rank).encode())
    ballots = [ballot.decode() for ballot in control.collect("who", WATCHDOG)]
    first = [ballot.decode() for ballot in control.collect("who", WATCHDOG, [0])]
    decided = control.decide("first", str(rank % 2).encode()).decode()
    communicator = group.open("sum")
    sums = [total(communicator)]
    communicator.rebuild(list(range(control.size)))
    sums.append(total(communicator))
    pair = group.open("pair", [1, 0])
    own_rank = torch.tensor([rank])
    gathered = torch.zeros(2, 1, dtype=torch.int64)
    pair.all_gather(gathered, own_rank).result(WATCHDOG)
    group.close()
    control.close()
    fabric.control.cast("still there", b"")
    return {
        "place": [control.rank, control.size, communicator.rank, pair.rank],
        "ballots": ballots,
        "first": first,
        "decided": decided,
        "sums": sums,
        "gathered": gathered.flatten().tolist(),
        "closed": outcome(lambda: communicator.barrier())["error"],
        "still": len(fabric.control.collect("still there", WATCHDOG)),
    }


def forgotten(fabric: Fabric) -> Any:
    """What one group forgets the other remembers."""
    rank = fabric.control.rank
    control = SubgroupFabric(fabric, f"group {rank}", [rank]).control
    control.cast("q", b"mine")
    fabric.control.cast("q", b"the run's")
    fabric.control.collect("q", WATCHDOG)
    if rank == 0:
        control.forget("q")
    fabric.control.cast("forgotten", b"")
    fabric.control.collect("forgotten", WATCHDOG)
    mine = outcome(lambda: control.collect("q", 0.2))["error"]
    return [mine, [ballot.decode() for ballot in fabric.control.collect("q", WATCHDOG)]]


def misnamed(fabric: Fabric) -> Any:
    """Groups that cannot be."""
    rank, size = fabric.control.rank, fabric.control.size
    groups = [[1 - rank], [rank, rank], [rank, size], []]
    return [outcome(lambda g=g: SubgroupFabric(fabric, "g", g))["error"] for g in groups]  # type: ignore[misc]
