"""Heartbeats and the store, within one process: clauses C1, C4 to C6, C9.

Two planes of two ranks; a rank whose pulse is stopped stands for one that is stopped or starved.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
from helpers.harnesses.store_keys import store_keys
from helpers.watchdog import WATCHDOG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.backends.common import control_plane
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost
from equipoise.backends.cpu import GLOO
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost

Pair = tuple[StoreControlPlane, StoreControlPlane]


@pytest.fixture
def host() -> Iterator[StoreHost]:
    store_host = GLOO.host()
    yield store_host
    store_host.close()


def plane(host: StoreHost, rank: int, deadline: float = WATCHDOG) -> StoreControlPlane:
    name, port = host.address
    return StoreControlPlane(Rendezvous(rank=rank, size=2, host=name, port=port, deadline=deadline))


@pytest.fixture
def pair(host: StoreHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(control_plane, "HEARTBEAT_INTERVAL", 0.02)
    monkeypatch.setattr(control_plane, "HEARTBEAT_TIMEOUT", 0.5)
    control_planes = plane(host, 0), plane(host, 1)
    yield control_planes
    for each in control_planes:
        each.close()


def starve(plane: StoreControlPlane) -> None:
    """Its pulse neither beats nor looks any more."""
    plane._heartbeat.stop()


def test_silent_rank_is_reported_with_observer_operation(pair: Pair) -> None:
    starve(pair[1])
    pair[0].set_operation("step 9")
    loss = pair[0].lost_rank(WATCHDOG)
    assert loss is not None
    assert (loss.rank, loss.operation) == (1, "step 9")
    assert loss.reason.startswith("fell silent")


def test_starved_rank_does_not_report_others_as_lost(pair: Pair) -> None:
    """After a stop of its own, every other rank looks silent until it has looked again."""
    starve(pair[0])
    assert pair[0].lost_rank(1.0) is None


def test_closed_control_plane_is_freed_without_gc(host: StoreHost) -> None:
    """Its connections are descriptors of the process."""
    closed_plane = plane(host, 0)
    closed_plane.close()
    reference = weakref.ref(closed_plane)
    gc.disable()
    try:
        del closed_plane
        assert reference() is None
    finally:
        gc.enable()


def test_unjoined_rank_is_lost_only_after_deadline(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "HEARTBEAT_INTERVAL", 0.02)
    monkeypatch.setattr(control_plane, "HEARTBEAT_TIMEOUT", 0.1)
    default_plane, short_plane = plane(host, 0), plane(host, 0, deadline=0.3)
    try:
        assert default_plane.lost_rank(0.5) is None
        loss = short_plane.lost_rank(WATCHDOG)
        assert loss is not None
        assert loss.rank == 1
    finally:
        default_plane.close()
        short_plane.close()


def test_first_reported_loss_is_kept_and_hidden_from_lost_rank(host: StoreHost, pair: Pair) -> None:
    host.report_loss(1, "was killed by SIGKILL")
    host.report_loss(0, "exited")
    loss = pair[0].lost_rank(WATCHDOG)
    assert loss is not None
    assert (loss.rank, loss.reason) == (1, "was killed by SIGKILL")
    assert pair[1].lost_rank(0.0) is None


SHARED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBER = iter(range(10**9))


@SHARED
@given(st.binary(max_size=40), st.binary(max_size=40))
def test_ballots_are_collected_by_rank(pair: Pair, one: bytes, two: bytes) -> None:
    question = f"q{next(NUMBER)}"
    pair[1].cast(question, two)
    pair[0].cast(question, one)
    pair[0].cast(question, one)
    assert pair[0].collect(question, WATCHDOG) == pair[1].collect(question, WATCHDOG) == (one, two)


@SHARED
@given(st.binary(max_size=9), st.binary(max_size=9), st.integers(0, 1))
def test_forgotten_question_leaves_no_key_in_store(
    pair: Pair, first: bytes, second: bytes, who: int
) -> None:
    question = f"q{next(NUMBER)}"
    # These come by themselves, and are counted below.
    pair[0].store.wait(["beat/0", "beat/1"], timedelta(seconds=WATCHDOG))
    for value in (first, second):
        key_count = pair[0].store.num_keys()
        for each in pair:
            each.cast(question, value)
        assert pair[0].decide(question, value) == value
        assert pair[1].collect(question, WATCHDOG) == (value, value)
        pair[who].forget(question)
        pair[1 - who].forget(question)
        assert pair[0].store.num_keys() == key_count
        with pytest.raises(BallotIncomplete):
            pair[1].collect(question, 0.0)


def test_forget_can_drop_ballots_of_some_ranks(pair: Pair) -> None:
    for each in pair:
        each.cast("q", b"x")
    pair[0].forget("q", [1])
    with pytest.raises(BallotIncomplete) as error:
        pair[0].collect("q", 0.0)
    assert error.value.missing == (1,)


def test_control_calls_fail_without_store(host: StoreHost, pair: Pair) -> None:
    pair[0].cast("before", b"x")
    host.close()
    calls = (
        lambda: pair[0].cast("after", b"x"),
        lambda: pair[0].collect("before", WATCHDOG),
        lambda: pair[0].decide("after", b"x"),
        lambda: pair[0].forget("before"),
    )
    for call in calls:
        with pytest.raises(ControlPlaneLost):
            call()
    pair[0].announce_exit("no matter")
    assert pair[0].lost_rank(0.0) is None


def test_collect_reads_again_after_late_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is late once; the collect has more time than that."""
    pair[0].cast("q", b"x")
    store, answer, lateness = pair[0].store, threading.Event(), list[str]()
    call = pair[0]._calls.call

    def slow_check(keys: list[str]) -> bool:
        answer.wait(WATCHDOG)
        return store.check(keys)

    def noted_call(function: Callable[[], object], timeout: float) -> object:
        try:
            return call(function, timeout)
        except ControlPlaneLost as error:
            lateness.append(str(error))
            answer.set()
            raise

    monkeypatch.setattr(control_plane, "STORE_TIMEOUT", 0.05)
    slow_store = SimpleNamespace(check=slow_check, multi_get=store.multi_get)
    monkeypatch.setattr(pair[0], "_store", slow_store)
    monkeypatch.setattr(pair[0]._calls, "call", noted_call)
    assert pair[0].collect("q", WATCHDOG, [0]) == (b"x",)
    assert "did not answer within" in lateness[0]


def test_collect_ends_when_control_plane_is_closed(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(ControlPlaneLost, match="is closed"):
        pair[0].collect("q", WATCHDOG)


def test_connect_names_address_without_store(host: StoreHost) -> None:
    name, port = host.address
    host.close()
    with pytest.raises(ControlPlaneLost, match=f"no store answers at {name}:{port}"):
        GLOO.connect(Rendezvous(rank=0, size=1, host=name, port=port, deadline=0.5))


def test_store_host_closes_twice_and_answers_nothing_afterwards(host: StoreHost) -> None:
    name, port = host.address
    host.close()
    host.close()
    assert host.address == (name, port)
    with pytest.raises(ControlPlaneLost, match=f"store on {name}:{port} was closed"):
        host.report_loss(0, "exited")
    with pytest.raises(ControlPlaneLost, match="was closed"):
        host.beat(0)


def test_collect_of_retractable_ballots_waits_for_none_that_is_gone(
    planes: list[StoreControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was asked whether it is there, and then it was taken back."""
    for each in planes:
        each.cast("here", b"yes")
    ballots = planes[0].collect_retractable("here", 0.0, (0, 1))
    planes[1].forget("here", (1,))
    store = planes[0].store
    stale_store = SimpleNamespace(check=lambda keys: len(keys) > 1, compare_set=store.compare_set)
    monkeypatch.setattr(planes[0], "_store", stale_store)
    with pytest.raises(BallotIncomplete):
        planes[0].collect_retractable("here", 0.0, (0, 1))
    monkeypatch.undo()
    planes[1].cast("here", b"again")
    assert ballots == (b"yes", b"yes")
    assert planes[0].collect_retractable("here", 0.0, (0, 1)) == (b"yes", b"again")


def test_forget_together_deletes_when_last_reader_says_so(planes: list[StoreControlPlane]) -> None:
    for each in planes:
        each.cast("bye", b"")
    planes[0].forget_together("bye", (0, 1))
    assert planes[1].collect("bye", 0.0) == (b"", b"")
    planes[1].forget_together("bye", (0, 1))
    assert store_keys(planes[0]) == set()
