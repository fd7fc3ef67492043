"""How a channel is made while an earlier one, which was given up, is still being made."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.harnesses.store_keys import store_keys

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.devices.collectives.ccl import CommSpec, WarmupOps
from equipoise.backends.devices.collectives.comm_init import PENDING_COMMS, CommBuilder, CommPlan
from equipoise.backends.devices.collectives.comm_stream import CommStream
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import CommunicatorFailed

DEADLINE = 20.0
SHORT = 0.2
RUNTIME: Any = SimpleNamespace(set_thread_device=lambda index: None)
DEVICE = Device(RUNTIME, 0)
ENDED: Any = SimpleNamespace(is_complete=lambda: True, error=lambda: "")


class SlowLibrary:
    """One whose channels named "slow" are made when the test says so."""

    name = "library"
    title = "Library"
    capabilities = SimpleNamespace(abort=False)

    def __init__(self, one_at_a_time: bool = True, meets: bool = False) -> None:
        self.one_at_a_time = one_at_a_time
        self.meets = meets
        self.resumed = threading.Event()
        self.joined_names: list[str] = []

    def estimate_bytes(self, link: bool) -> int:
        return 0

    def init_comm(self, membership: CommSpec, *_: object) -> tuple[Any, WarmupOps]:
        self.joined_names.append(membership.name)
        if self.meets:  # as every library: nobody gets through before all have come
            expiry = time.monotonic() + DEADLINE
            while self.joined_names.count(membership.name) < 2 and time.monotonic() < expiry:
                time.sleep(0.001)
        if membership.name == "slow":
            assert self.resumed.wait(DEADLINE)
        group = SimpleNamespace(stream=None, close=lambda: None, closed=True)
        return group, WarmupOps(ENDED, (), torch.zeros(1, dtype=torch.int8))


@pytest.fixture
def library() -> Iterator[SlowLibrary]:
    library = SlowLibrary()
    yield library
    library.resumed.set()
    expiry = time.monotonic() + DEADLINE
    while PENDING_COMMS.names() and time.monotonic() < expiry:
        time.sleep(0.001)


@pytest.fixture
def builder(planes: list[StoreControlPlane], library: SlowLibrary) -> CommBuilder:
    """Rank 0's."""
    anything: Any = library
    return CommBuilder(anything, planes[0])


def make(builder: CommBuilder, name: str, *others: int, seconds: float = DEADLINE) -> CommStream:
    """A channel of rank 0 and others."""
    greeting: Any = None
    plan = CommPlan(
        CommSpec(name, (0, *others), 0, is_link=False, deadline=DEADLINE), greeting, DEVICE
    )
    return builder.build(plan, builder.deadline(time.monotonic() + seconds))


def make_slow_with_lost_rank(builder: CommBuilder, planes: list[StoreControlPlane]) -> None:
    """Rank 1 is lost after it has come; rank 0 gives up at its deadline."""
    for word in ("here", "0/ready"):
        planes[1].cast(f"library/slow/{word}", b"")
    with pytest.raises(CommunicatorFailed, match="slow: Library did not make it in time"):
        make(builder, "slow", 1, seconds=SHORT)
    assert PENDING_COMMS.names() == ("slow",)
    planes[1].announce_exit("fell over")


def test_builder_makes_comm_only_after_one_that_was_given_up(
    builder: CommBuilder, library: SlowLibrary
) -> None:
    with pytest.raises(CommunicatorFailed, match="slow: Library did not make it in time"):
        make(builder, "slow", seconds=SHORT)
    with pytest.raises(CommunicatorFailed, match="next: Library is still making slow"):
        make(builder, "next", seconds=SHORT)
    library.resumed.set()
    assert make(builder, "last").spec.name == "last"


def test_comm_init_with_lost_rank_does_not_block_others(
    builder: CommBuilder, planes: list[StoreControlPlane]
) -> None:
    make_slow_with_lost_rank(builder, planes)
    assert make(builder, "next").spec.name == "next"


def test_comm_init_with_lost_rank_blocks_no_other_fabric(
    builder: CommBuilder, planes: list[StoreControlPlane]
) -> None:
    make_slow_with_lost_rank(builder, planes)
    builder.give_up()
    assert PENDING_COMMS.names() == ()


def make_on_both(
    builders: list[CommBuilder], name: str, seconds: tuple[float, float] = (DEADLINE, DEADLINE)
) -> list[str]:
    """What came of it on each rank: the channel's name, or the error."""

    def one(rank: int) -> str:
        greeting: Any = None
        plan = CommPlan(
            CommSpec(name, (0, 1), rank, is_link=False, deadline=DEADLINE), greeting, DEVICE
        )
        try:
            deadline = builders[rank].deadline(time.monotonic() + seconds[rank])
            return builders[rank].build(plan, deadline).spec.name
        except CommunicatorFailed as error:
            return str(error)

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(one, range(2)))


@pytest.fixture
def builders(planes: list[StoreControlPlane]) -> list[CommBuilder]:
    anything: Any = SlowLibrary(one_at_a_time=False, meets=True)
    return [CommBuilder(anything, plane) for plane in planes]


@pytest.mark.parametrize("late_rank", [0, 1])
def test_comm_init_succeeds_again_after_late_rank(
    builders: list[CommBuilder], late_rank: int
) -> None:
    early_rank = 1 - late_rank
    greeting: Any = None
    plan = CommPlan(
        CommSpec("again", (0, 1), early_rank, is_link=False, deadline=DEADLINE), greeting, DEVICE
    )
    with pytest.raises(
        CommunicatorFailed,
        match=rf"not all ranks joined in time: rank\(s\) \({late_rank},\) are missing",
    ):
        builders[early_rank].build(plan, builders[early_rank].deadline(time.monotonic() + SHORT))
    assert make_on_both(builders, "again") == ["again"] * 2


def test_comm_init_uses_other_name_after_failed_rendezvous(
    builders: list[CommBuilder], library: SlowLibrary
) -> None:
    """Both ranks came into the library, which did not make it in time."""
    for builder in builders:
        anything: Any = library
        builder._library = anything
    library.one_at_a_time, library.meets = False, True
    errors = make_on_both(builders, "slow", (SHORT, SHORT))
    assert errors == ["slow: Library did not make it in time"] * 2
    assert make_on_both(builders, "slow") == ["slow/attempt1"] * 2
    assert make_on_both(builders, "other") == ["other"] * 2


def test_rank_joins_no_attempt_twice(
    builders: list[CommBuilder], planes: list[StoreControlPlane]
) -> None:
    """The first rank is still in the attempt that failed on the second."""
    planes[0].cast("library/twice/here", b"")
    planes[0].cast("library/twice/turn", b"0")
    builders[1]._attempts["twice"] = 0
    greeting: Any = None
    plan = CommPlan(
        CommSpec("twice", (0, 1), 1, is_link=False, deadline=DEADLINE), greeting, DEVICE
    )
    with pytest.raises(CommunicatorFailed, match="rank 0 is still in attempt 0, which failed here"):
        builders[1].build(plan, builders[1].deadline(time.monotonic() + SHORT))


def test_comm_init_leaves_no_store_keys(
    builders: list[CommBuilder], planes: list[StoreControlPlane]
) -> None:
    channel_names = [make_on_both(builders, f"channel{number}") for number in range(3)]
    assert channel_names == [[f"channel{number}"] * 2 for number in range(3)]
    assert store_keys(planes[0]) == set()


def test_comm_init_runs_parallel_to_slow_one_where_library_allows(
    planes: list[StoreControlPlane], library: SlowLibrary
) -> None:
    library.one_at_a_time = False
    anything: Any = library
    builder = CommBuilder(anything, planes[0])
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(make, builder, "slow")
        while "slow" not in library.joined_names:
            time.sleep(0.001)
        assert make(builder, "beside").spec.name == "beside"
        library.resumed.set()
        assert slow.result(DEADLINE).spec.name == "slow"
