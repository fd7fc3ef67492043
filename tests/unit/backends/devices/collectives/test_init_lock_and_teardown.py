"""Whose turn it is to make a communicator, and how it is given back."""

import threading
import time
from contextlib import closing

import pytest
import torch
from helpers.harnesses.store_keys import store_keys

from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.devices.collectives.bootstrap import InitLock
from equipoise.backends.devices.collectives.ccl import CommSpec
from equipoise.backends.devices.collectives.communicator import plan_round
from equipoise.backends.devices.collectives.teardown import UNRELEASED_COMMS, TeardownQueue
from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.errors import CommunicatorFailed

DEADLINE = 20.0
NAME = "library"
SHORT = 0.05
Planes = list[StoreControlPlane]


def deadline_in(seconds: float = DEADLINE) -> Deadline:
    return Deadline(time.monotonic() + seconds, threading.Event())


def turn(plane: StoreControlPlane, what: str, *ranks: int, seconds: float = DEADLINE) -> InitLock:
    return InitLock(plane, NAME, what, ranks or (0, 1), deadline_in(seconds))


def test_init_locks_of_disjoint_ranks_are_held_at_once(planes: Planes) -> None:
    acquisitions = []
    with turn(planes[0], "one", 0, 1), turn(planes[1], "other", 2, 3, seconds=SHORT):
        acquisitions.append("both")
    assert acquisitions == ["both"]


def test_init_lock_waits_where_one_rank_is_shared(planes: Planes) -> None:
    with (
        turn(planes[0], "one", 0, 1),
        pytest.raises(CommunicatorFailed, match="rank 0 holds to make one"),
        turn(planes[1], "other", 2, 1, seconds=SHORT),
    ):
        pass


def test_init_lock_given_up_frees_what_it_had_taken(planes: Planes) -> None:
    with (
        turn(planes[0], "one", 1, 2),
        pytest.raises(CommunicatorFailed),
        turn(planes[1], "other", 0, 1, seconds=SHORT),
    ):
        pass
    with turn(planes[0], "next", 0, 3, seconds=SHORT):
        pass


def test_init_lock_waits_for_previous_owner(planes: Planes) -> None:
    order: list[str] = []
    with turn(planes[0], "first"):

        def next_one() -> None:
            with turn(planes[1], "second"):
                order.append("second")

        waiting_thread = threading.Thread(target=next_one)
        waiting_thread.start()
        order.append("first")
    waiting_thread.join(DEADLINE)
    assert order == ["first", "second"]


def test_init_lock_timeout_names_current_owner(planes: Planes) -> None:
    with (
        turn(planes[0], "model/0/0-1"),
        pytest.raises(CommunicatorFailed, match="rank 0 holds to make model/0/0-1"),
        turn(planes[1], "other", seconds=SHORT),
    ):
        pass


def test_init_lock_of_lost_rank_is_taken_over(planes: Planes) -> None:
    turn(planes[0], "mine").__enter__()
    planes[0].announce_exit("fell over")
    acquisitions = []
    with turn(planes[1], "next"):
        acquisitions.append("next")
    assert acquisitions == ["next"]


def test_init_lock_wait_ends_when_given_up(planes: Planes) -> None:
    cancel_event = threading.Event()
    cancel_event.set()
    deadline = Deadline(time.monotonic() + DEADLINE, cancel_event)
    with (
        turn(planes[0], "mine"),
        pytest.raises(CommunicatorFailed),
        InitLock(planes[1], NAME, "next", (0, 1), deadline),
    ):
        pass


class Channel:
    """A channel that is idle when the test says so; its library may be able to abort."""

    def __init__(self, name: str, idle: bool, aborts: bool = False) -> None:
        self.spec = CommSpec(name, (0, 1), 0, is_link=False, deadline=DEADLINE)
        self.idle = idle
        self.closed = False
        self.aborted = False
        self.can_abort = aborts

    def collect_completed(self) -> bool:
        return self.idle

    def abort(self, failure: CommunicatorFailed) -> None:
        if self.can_abort and not self.closed:
            self.aborted = True

    def close(self) -> None:
        self.closed = True

    def is_released(self) -> bool:
        return self.idle and (self.closed or self.aborted)


def test_teardown_closes_comm_when_all_members_are_idle(planes: Planes) -> None:
    mine, theirs = (TeardownQueue(NAME, plane) for plane in planes)
    here, there = Channel("c", idle=True), Channel("c", idle=False)
    mine.add(here)  # type: ignore[arg-type]
    theirs.add(there)  # type: ignore[arg-type]
    assert mine.tick()
    assert theirs.tick()
    there.idle = True
    assert not theirs.tick()
    assert not mine.tick()
    assert here.closed
    assert there.closed


def test_teardown_leaves_no_store_keys(planes: Planes) -> None:
    mine, theirs = (TeardownQueue(NAME, plane) for plane in planes)
    for name in ("a", "b"):
        mine.add(Channel(name, idle=True))  # type: ignore[arg-type]
        theirs.add(Channel(name, idle=True))  # type: ignore[arg-type]
    for queue in (mine, theirs, mine):
        queue.tick()
    assert store_keys(planes[0]) == set()


def test_teardown_reads_announcements_once(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last member to read them deletes them: while a library still ends its part, nobody may
    take them for missing ones."""
    mine, theirs = (TeardownQueue(NAME, plane) for plane in planes)
    channel = Channel("slow to end", idle=True)
    monkeypatch.setattr(channel, "is_released", lambda: False)
    mine.add(channel)  # type: ignore[arg-type]
    theirs.add(Channel("slow to end", idle=True))  # type: ignore[arg-type]
    for queue in (mine, theirs, mine):
        queue.tick()
    questions: list[str] = []
    monkeypatch.setattr(
        planes[0], "collect", lambda question, *rest, **how: questions.append(question)
    )
    assert mine.tick()
    assert questions == []


def test_teardown_keeps_busy_comm_after_fabric_close(planes: Planes) -> None:
    queue, channel = TeardownQueue(NAME, planes[0]), Channel("stuck", idle=False)
    queue.add(channel)  # type: ignore[arg-type]
    queue.finish(lambda: SHORT)
    assert "stuck" in UNRELEASED_COMMS.names()
    UNRELEASED_COMMS.release_idle()
    assert not channel.closed
    channel.idle = True
    UNRELEASED_COMMS.release_idle()
    assert channel.closed
    assert "stuck" not in UNRELEASED_COMMS.names()


def test_teardown_keeps_comm_without_store(planes: Planes) -> None:
    queue, channel = TeardownQueue(NAME, planes[0]), Channel("alone", idle=True)
    queue.add(channel)  # type: ignore[arg-type]
    with closing(planes[0]):
        planes[0].close()
    assert not queue.tick()
    assert not channel.closed
    UNRELEASED_COMMS.release_idle()


def test_teardown_aborts_hanging_comm_at_fabric_close(planes: Planes) -> None:
    queue, channel = TeardownQueue(NAME, planes[0]), Channel("hung", idle=False, aborts=True)
    queue.add(channel)  # type: ignore[arg-type]
    threading.Timer(2 * SHORT, lambda: setattr(channel, "idle", True)).start()  # the abort's effect
    queue.finish(lambda: SHORT)
    assert channel.aborted
    assert "hung" not in UNRELEASED_COMMS.names()


def test_teardown_abort_spreads_to_other_members(planes: Planes) -> None:
    mine, theirs = (TeardownQueue(NAME, plane) for plane in planes)
    here, there = (Channel("left", idle=idle, aborts=True) for idle in (False, True))
    here.aborted = True
    mine.add(here)  # type: ignore[arg-type]
    theirs.add(there)  # type: ignore[arg-type]
    assert mine.tick()
    assert not theirs.tick()
    assert (there.aborted, here.closed) == (True, False)
    here.idle = True
    assert not mine.tick()


def test_teardown_aborts_comm_of_lost_rank(planes: Planes) -> None:
    queue, channel = TeardownQueue(NAME, planes[0]), Channel("bereft", idle=True, aborts=True)
    queue.add(channel)  # type: ignore[arg-type]
    assert queue.tick()
    planes[1].announce_exit("fell over")
    assert not queue.tick()
    assert channel.aborted


def test_round_of_exchange_has_one_block_per_direction_and_peer() -> None:
    blobs = [torch.full((n,), n, dtype=torch.uint8) for n in (3, 0, 2, 1)]
    exchange_round = plan_round(
        Exchange(
            sends=(PeerBuffer(2, blobs[0]), PeerBuffer(3, blobs[1])),
            receives=(PeerBuffer(3, blobs[2]), PeerBuffer(1, blobs[3])),
        )
    )
    assert exchange_round.operations == ("irecv", "irecv", "isend")
    assert exchange_round.peers == (1, 3, 2)
    assert [blob.numel() for blob in exchange_round.blobs] == [1, 2, 3]
    assert {blob.dtype for blob in exchange_round.blobs} == {torch.int8}
