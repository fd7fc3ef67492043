import pytest
from helpers.processes.threads import Seat, on_ranks

from equipoise.hal.errors import CommunicatorFailed


def test_a_communicator_that_a_peer_never_opens_fails_instead_of_waiting_for_ever() -> None:
    def program(seat: Seat) -> str:
        if seat.rank:
            return "elsewhere"
        with pytest.raises(CommunicatorFailed, match="did not all meet within 2 s"):
            seat.fabric.open("lonely")
        return "gave up"

    assert on_ranks(2, program, deadline=2.0) == ["gave up", "elsewhere"]
