"""A store that is stopped rather than gone: every call to it ends all the same."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import ControlPlaneLost

HOLDER = """
import sys
from equipoise.backends.common.tcp_store import StoreHost
host = StoreHost()
print(host.address[1], flush=True)
sys.stdin.readline()
"""
DEADLINE = 2.0


@dataclass(frozen=True)
class StoppedStore:
    """A store whose process has just been stopped, and the control plane of a rank."""

    process: subprocess.Popen[str]
    plane: StoreControlPlane


@pytest.fixture
def stopped_plane(stopped_store: StoppedStore) -> StoreControlPlane:
    """The control plane alone."""
    return stopped_store.plane


@pytest.fixture
def stopped_store() -> Iterator[StoppedStore]:
    """A store, stopped."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        where = Rendezvous(rank=0, size=2, host="127.0.0.1", port=port, deadline=DEADLINE)
        plane = StoreControlPlane(where)
        plane.cast("before", b"fine")
        os.kill(holder.pid, signal.SIGSTOP)
        # Its other threads run on until one of them has taken the signal.
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        yield StoppedStore(holder, plane)
        holder.kill()
        plane.close()


CALLS: dict[str, Callable[[StoreControlPlane], object]] = {
    "cast": lambda plane: plane.cast("q", b"x"),
    "collect": lambda plane: plane.collect("q", 1.0),
    "collect beyond the deadline": lambda plane: plane.collect("q", 3600.0),
    "decide": lambda plane: plane.decide("q", b"x"),
    "forget": lambda plane: plane.forget("q"),
}


@pytest.mark.parametrize("name", CALLS)
def test_control_plane_vote_raises_control_lost_when_store_stops(
    name: str, stopped_plane: StoreControlPlane
) -> None:
    with pytest.raises(ControlPlaneLost, match="did not answer within"):
        CALLS[name](stopped_plane)


def test_control_plane_lost_and_leave_return_when_store_stops(
    stopped_plane: StoreControlPlane,
) -> None:
    assert stopped_plane.lost_rank(0.5) is None
    stopped_plane.announce_exit("this test is over")
    with pytest.raises(ControlPlaneLost, match="fell silent"):  # neither of them got an answer
        stopped_plane.cast("q", b"x")


def test_control_plane_works_again_when_store_continues(stopped_store: StoppedStore) -> None:
    plane = stopped_store.plane
    with pytest.raises(ControlPlaneLost):
        plane.cast("q", b"x")
    stopped_store.process.send_signal(signal.SIGCONT)
    assert plane.collect("before", 60.0, [0]) == (b"fine",)
    plane.cast("q", b"x")  # whether the first arrived or not
    assert plane.collect("q", 60.0, [0]) == (b"x",)
