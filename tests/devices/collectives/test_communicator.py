"""What libraries make easy to get wrong, on rank processes: clauses P1 to P3, E1, E8, E9, R1.

What every communicator must do is the conformance suite's to try.
"""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.harnesses.devices import NETWORKS, Network
from helpers.processes.rank_pool import Case, Ranks
from helpers.rank_programs import device_collectives as on_devices

from equipoise.hal import registry

BRISK = 2.0
"""Seconds of a deadline that is meant to strike."""


@pytest.fixture
def play(ranks: Ranks, network: Network) -> Callable[..., list[Any]]:
    """`play(program, size, **arguments)` over what is here."""

    def run(
        program: Callable[..., Any],
        size: int,
        deadline: float = 15.0,
        lost: frozenset[int] = frozenset(),
        spoils: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        network.need(size)
        return ranks.play(
            Case(
                program=f"{program.__module__}:{program.__qualname__}",
                size=size,
                arguments={"backend": network.backend, **arguments},
                deadline=deadline,
                lost=lost,
                spoils=spoils,
                communicator=network.communicator,
            )
        )

    return run


Play = Callable[..., list[Any]]


def test_ranks_that_both_send_first_both_receive(play: Play) -> None:
    received = play(on_devices.messages, 2, edges=[(0, 1), (1, 0)], nbytes=70_000)
    assert received == [[[1] * 70_000], [[0] * 70_000]]


def test_messages_of_different_pairs_do_not_block_each_other(play: Play) -> None:
    """On one stream a rank, and on one for either way, each of these three waits for another."""
    received = play(on_devices.messages, 3, edges=[(0, 1), (0, 2), (1, 2)], nbytes=5)
    assert received == [[], [[0] * 5], [[1] * 5, [2] * 5]]


def test_first_message_of_pair_does_not_block_host(play: Play) -> None:
    first, second = play(on_devices.late, 2)
    assert first == {"done": [False, False], "came": [1, 7]}
    assert second == {"done": [], "came": [0, 7]}


def test_stream_waits_for_message_before_its_link_exists(play: Play) -> None:
    values, _ = play(on_devices.awaited, 2)
    assert values == [5, 6]


def test_stream_waiting_past_deadline_is_released_and_failed(play: Play) -> None:
    for rank, (work, stream, idle) in enumerate(play(on_devices.in_vain, 2, deadline=BRISK)):
        assert work["error"] in ("OperationTimeout", "CommunicatorFailed")
        assert f"irecv from {1 - rank} of 'test'" in work["text"]
        assert stream["error"] == "StreamFailed"
        assert "irecv" in stream["text"]
        assert idle


def test_message_delayed_by_link_keeps_stream_order(play: Play) -> None:
    assert play(on_devices.ordered, 2) == [[True, [2, 3]]] * 2


def test_warm_link_is_used_without_new_thread(play: Play) -> None:
    for new_threads, data, names in play(on_devices.warmed, 2):
        assert new_threads == []
        assert data == [0]
        assert names == ["test/0/0-1", "test/0/0-1/0-1", "test/0/0-1/1-0"]


def test_closed_communicators_return_their_streams(play: Play) -> None:
    for sums, empty in play(on_devices.many, 2, count=40):
        assert sums == [2 * number + 1 for number in range(40)]
        assert empty


def test_empty_operations_wait_for_all_ranks(play: Play) -> None:
    outcomes, _ = play(on_devices.empties, 2)
    assert [outcome["error"] for outcome in outcomes] == ["ResultPending"] * 2


def test_operations_in_capture_are_unsupported(play: Play) -> None:
    for refusals in play(on_devices.captured, 2):
        assert [one["error"] for one in refusals] == ["Unsupported"] * 2
        assert "all_reduce of 'test'" in refusals[0]["text"]


def test_rank_lost_during_link_setup_fails_operation(play: Play) -> None:
    (failure, peer_ended), _ = play(
        on_devices.lost_while_linking, 2, deadline=BRISK, lost=frozenset({1})
    )
    assert failure["error"] in ("OperationTimeout", "CommunicatorFailed")
    assert "irecv from 1 of 'test'" in failure["text"]
    assert peer_ended


def test_communicator_can_be_rebuilt_repeatedly(play: Play) -> None:
    assert play(on_devices.reopened, 2, deadline=BRISK, rounds=3) == [[1, 3, 5]] * 2


def test_communicator_opens_after_one_that_missed_its_deadline(
    play: Play, network: Network
) -> None:
    """Of two that are made at once, torch_npu may take the stream of one for the other; NCCL's are
    made side by side."""
    outcomes = play(on_devices.opened_after_slow_greeting, 2, deadline=BRISK, spoils=True)
    for failure, total, order in outcomes:
        assert failure["error"] == "CommunicatorFailed"
        assert "communicator 'slow' was not opened" in failure["text"]
        assert total == 2
        if network is NETWORKS["ascend"]:
            assert order == ["begins", "ends"] * 2
        else:
            assert order.count("begins") == 2


@pytest.fixture
def aborting(network: Network) -> None:
    """Skips the test where the library cannot abort."""
    if not registry.communicator(network.communicator).capabilities.abort:
        pytest.skip(f"{network.communicator} cannot abort")


@pytest.mark.usefixtures("aborting")
def test_abort_ends_works_and_fails_waiting_streams(play: Play) -> None:
    for failure, stream, idle, refusal, total, clean in play(on_devices.aborted, 2):
        assert "irecv from" in failure["text"]
        assert failure["text"].endswith("was aborted")
        assert stream["error"] == "StreamFailed"
        assert idle
        assert refusal["error"] == "CommunicatorFailed"
        assert "it was aborted" in refusal["text"]
        assert (total, clean) == (1, True)


@pytest.mark.usefixtures("aborting")
def test_fabric_close_aborts_operations_in_flight(play: Play) -> None:
    for failure, remaining in play(on_devices.closed_in_flight, 2):
        assert failure["error"] == "CommunicatorFailed"
        assert remaining == []
