"""Ranks as threads of one process: real gloo, real streams, and Python objects to break."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from helpers.watchdog import WATCHDOG

from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric, Rendezvous

T = TypeVar("T")


@dataclass(frozen=True)
class GroupMember:
    """What a rank's program is given."""

    rank: int
    size: int
    fabric: Fabric
    accelerator: Accelerator


def on_ranks(
    size: int, program: Callable[[GroupMember], T], deadline: float = WATCHDOG / 2
) -> list[T]:
    """Run `program` once a rank and return what each returned; the first error is raised.

    An operation fails at `deadline`, by default before its rank counts as hung: its error names it.
    """
    backend = registry.communicator("gloo")
    host = backend.host()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def serve(rank: int) -> None:
        where = Rendezvous(
            rank=rank, size=size, host=host.address[0], port=host.address[1], deadline=deadline
        )
        try:
            fabric = backend.connect(where)
            accelerator = registry.accelerator("cpu").open(0)
            try:
                results[rank] = program(GroupMember(rank, size, fabric, accelerator))
            finally:
                fabric.close()
                accelerator.close()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    host.close()
    unfinished = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not unfinished, (
        f"rank(s) {unfinished} did not end within {WATCHDOG:g} s; errors: {errors}"
    )
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in range(size)]
