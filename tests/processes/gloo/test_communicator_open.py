import pytest
from helpers.processes.thread_ranks import GroupMember, on_ranks

from equipoise.hal.errors import CommunicatorFailed


def test_communicator_open_fails_when_a_peer_never_opens() -> None:
    def program(member: GroupMember) -> str:
        if member.rank:
            return "elsewhere"
        with pytest.raises(CommunicatorFailed, match="did not all meet within 5 s"):
            member.fabric.open("lonely")
        return "gave up"

    assert on_ranks(2, program, deadline=5.0) == ["gave up", "elsewhere"]
