import pytest
from helpers.processes.thread_ranks import Seat, on_ranks

from equipoise.hal.errors import CommunicatorFailed


def test_communicator_open_fails_when_a_peer_never_opens() -> None:
    def program(seat: Seat) -> str:
        if seat.rank:
            return "elsewhere"
        with pytest.raises(CommunicatorFailed, match="did not all meet within 2 s"):
            seat.fabric.open("lonely")
        return "gave up"

    assert on_ranks(2, program, deadline=2.0) == ["gave up", "elsewhere"]
