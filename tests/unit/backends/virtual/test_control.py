"""The control plane in one thread, and the entry points."""

import pytest
from helpers.strategies.worlds import Worlds

from equipoise.backends.virtual import BACKEND, COMMUNICATOR
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import (
    BackendUnavailable,
    BallotIncomplete,
    ControlLost,
    Unsupported,
)
from equipoise.hal.stream import Role

SECONDS = 1.0


def test_a_ballot_stays_as_it_was_cast(make_world: Worlds) -> None:
    plane = make_world(1).fabric(0).control
    plane.cast("q", b"yes")
    plane.cast("q", b"yes")
    with pytest.raises(ControlLost, match="cast twice, differently"):
        plane.cast("q", b"no")
    assert plane.collect("q", 0.0) == (b"yes",)


def test_missing_ballots_are_named(make_world: Worlds) -> None:
    world = make_world(3)
    planes = [world.fabric(rank).control for rank in range(3)]
    planes[1].cast("q", b"1")
    with pytest.raises(BallotIncomplete) as caught:
        planes[0].collect("q", SECONDS)
    assert caught.value.missing == (0, 2)
    planes[2].cast("q", b"2")
    assert planes[0].collect("q", 0.0, (2, 1)) == (b"2", b"1")


def test_the_first_decision_is_everybodys(make_world: Worlds) -> None:
    world = make_world(2)
    planes = [world.fabric(rank).control for rank in range(2)]
    assert [
        plane.decide("q", value) for plane, value in zip(planes, (b"a", b"b"), strict=True)
    ] == [
        b"a",
        b"a",
    ]


def test_a_rank_that_left_is_named_to_the_others_only(make_world: Worlds) -> None:
    world = make_world(2)
    planes = [world.fabric(rank).control for rank in range(2)]
    planes[1].leave("left: done")
    lost = planes[0].lost(0.0)
    assert lost is not None
    assert (lost.rank, lost.how) == (1, "left: done")
    assert planes[1].lost(SECONDS) is None


def test_every_call_says_when_the_store_is_gone(make_world: Worlds) -> None:
    world = make_world(2)
    plane = world.fabric(0).control
    world.store.lose()
    for call in (
        lambda: plane.cast("q", b""),
        lambda: plane.collect("q", SECONDS),
        lambda: plane.decide("q", b""),
        lambda: plane.forget("q"),
    ):
        with pytest.raises(ControlLost):
            call()
    plane.leave("whatever")
    assert plane.lost(0.0) is None


def test_a_device_opened_by_name_runs_what_it_is_given_at_once() -> None:
    device, seen = BACKEND.open(0), []
    device.stream(Role.COMPUTE).launch(lambda: seen.append("ran"))
    assert seen == ["ran"]
    with pytest.raises(BackendUnavailable):
        BACKEND.open(1)


def test_a_fabric_by_name_has_one_rank() -> None:
    where = Rendezvous(rank=0, size=1, host="", port=0, deadline=SECONDS)
    work = COMMUNICATOR.connect(where).open("main").barrier()
    assert work.done()
    with pytest.raises(BackendUnavailable, match="conformance suite"):
        COMMUNICATOR.connect(Rendezvous(rank=0, size=2, host="", port=0, deadline=SECONDS))
    with pytest.raises(Unsupported, match="conformance suite"):
        COMMUNICATOR.host()
    COMMUNICATOR.joined()
