"""Ranks of an engine that connect at different times, one of which leaves at once."""

import json
import time
from typing import Any

from helpers.rank_programs.call_outcome import outcome
from helpers.watchdog import WATCHDOG

from equipoise.backends.common.tcp_store import StoreHost
from equipoise.hal import registry
from equipoise.hal.accelerator import open_for_rank
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.integrations.vllm.worker_context import await_all_connected, connect_fabric

DEADLINE = 60.0
LATE = 1.0
"""Seconds that the second rank comes later, and so longer than the first needs to leave."""


def first_rank_leaves_at_once(fabric: Fabric) -> dict[str, Any]:
    """The first rank holds the store, connects, and closes both."""
    control = fabric.control
    host = StoreHost() if control.rank == 0 else None
    control.cast("address", json.dumps(host.address if host else None).encode())
    address, port = json.loads(control.collect("address", WATCHDOG)[0])
    if control.rank == 1:
        time.sleep(LATE)

    def come_and_leave() -> None:
        accelerator = open_for_rank(registry.accelerator("cpu"), control.rank)
        rendezvous = Rendezvous(
            rank=control.rank, size=2, host=address, port=port, deadline=DEADLINE
        )
        own = connect_fabric("gloo", rendezvous, accelerator)
        await_all_connected(own, DEADLINE)
        own.close()
        accelerator.close()
        if host is not None:
            host.close()

    return outcome(come_and_leave)
