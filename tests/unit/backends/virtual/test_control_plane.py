"""The control plane in one thread, and the entry points."""

import pytest
from helpers.strategies.virtual_worlds import Worlds

from equipoise.backends.virtual import BACKEND, COMMUNICATOR
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import (
    BackendUnavailable,
    Unsupported,
)
from equipoise.hal.stream import Role

SECONDS = 1.0


def test_leaving_rank_is_reported_to_others_only(make_world: Worlds) -> None:
    world = make_world(2)
    planes = [world.fabric(rank).control for rank in range(2)]
    planes[1].announce_exit("left: done")
    loss = planes[0].lost_rank(0.0)
    assert loss is not None
    assert (loss.rank, loss.reason) == (1, "left: done")
    assert planes[1].lost_rank(SECONDS) is None


def test_virtual_device_opened_by_name_runs_eagerly() -> None:
    device, log = BACKEND.open(0), []
    device.stream(Role.COMPUTE).launch(lambda: log.append("ran"))
    assert log == ["ran"]
    with pytest.raises(BackendUnavailable):
        BACKEND.open(1)


def test_virtual_fabric_by_name_has_one_rank() -> None:
    where = Rendezvous(rank=0, size=1, host="", port=0, deadline=SECONDS)
    work = COMMUNICATOR.connect(where).open("main").barrier()
    assert work.done()
    with pytest.raises(BackendUnavailable, match="conformance suite"):
        COMMUNICATOR.connect(Rendezvous(rank=0, size=2, host="", port=0, deadline=SECONDS))
    with pytest.raises(Unsupported, match="conformance suite"):
        COMMUNICATOR.host()
    COMMUNICATOR.launcher_rendezvous()
