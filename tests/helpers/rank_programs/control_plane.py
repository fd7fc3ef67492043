"""The control plane between processes."""

from typing import Any

from helpers.rank_programs.call_outcome import outcome
from helpers.watchdog import WATCHDOG

from equipoise.hal import registry
from equipoise.hal.communicator import Fabric, Rendezvous


def lose_the_store(fabric: Fabric, seconds: float) -> Any:
    """The last rank plays the launcher: it holds a second store, and lets it go."""
    control = fabric.control
    backend = registry.communicator("gloo")
    last = control.rank == control.size - 1
    host = backend.host() if last else None
    address = f"{host.address[0]} {host.address[1]}" if host else ""
    control.cast("address", address.encode())
    name, port = control.collect("address", WATCHDOG)[-1].decode().split()
    return _without(fabric, host, name, int(port), seconds)


def _without(fabric: Fabric, host: Any, name: str, port: int, seconds: float) -> Any:
    control, backend = fabric.control, registry.communicator("gloo")
    if host is not None:
        control.cast("ready", b"")
        control.collect("ready", WATCHDOG)
        host.close()
        return None
    where = Rendezvous(
        rank=control.rank, size=control.size - 1, host=name, port=port, deadline=seconds
    )
    other = backend.connect(where)
    control.cast("ready", b"")
    waiting = outcome(lambda: other.control.collect("never", seconds))
    answers = [
        waiting,
        outcome(lambda: other.control.cast("x", b"1")),
        outcome(lambda: other.control.decide("y", b"1")),
        outcome(lambda: backend.connect(where)),
    ]
    other.control.announce_exit("nobody listens")
    accused = other.control.lost_rank(0.0)
    other.close()
    return {"answers": answers, "accused": accused and str(accused)}
