"""What HCCL and torch_npu make easy to get wrong, on rank processes: clauses P1 to P3, E1, E9, R1.

What every communicator must do is the conformance suite's to try.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from ranks.cases import hccl
from support.ranks import Case, Ranks

pytestmark = pytest.mark.npusim

BRISK = 2.0
"""Seconds of a deadline that is meant to strike."""


@pytest.fixture
def play(ranks: Ranks) -> Callable[..., list[Any]]:
    """`play(program, size, **arguments)` over HCCL."""

    def run(
        program: Callable[..., Any],
        size: int,
        deadline: float = 15.0,
        lost: frozenset[int] = frozenset(),
        spoils: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        return ranks.play(
            Case(
                program=f"{program.__module__}:{program.__qualname__}",
                size=size,
                arguments=arguments,
                deadline=deadline,
                lost=lost,
                spoils=spoils,
                communicator="equipoise.backends.ascend:HCCL",
            )
        )

    return run


Play = Callable[..., list[Any]]


def test_two_ranks_that_both_send_first_both_receive(play: Play) -> None:
    found = play(hccl.messages, 2, edges=[(0, 1), (1, 0)], nbytes=70_000)
    assert found == [[[1] * 70_000], [[0] * 70_000]]


def test_messages_of_different_pairs_never_wait_for_each_other(play: Play) -> None:
    """On one stream a rank, and on one for either way, each of these three waits for another."""
    found = play(hccl.messages, 3, edges=[(0, 1), (0, 2), (1, 2)], nbytes=5)
    assert found == [[], [[0] * 5], [[1] * 5, [2] * 5]]


def test_the_first_message_of_a_pair_waits_for_nobody(play: Play) -> None:
    first, second = play(hccl.late, 2)
    assert first == {"done": [False, False], "came": [1, 7]}
    assert second == {"done": [], "came": [0, 7]}


def test_a_stream_may_wait_for_a_message_whose_link_is_not_there_yet(play: Play) -> None:
    found, _ = play(hccl.awaited, 2)
    assert found == [5, 6]


def test_a_stream_that_waits_in_vain_is_released_and_fails(play: Play) -> None:
    for rank, (work, stream, idle) in enumerate(play(hccl.in_vain, 2, deadline=BRISK)):
        assert work["error"] in ("OperationTimeout", "CommunicatorFailed")
        assert f"irecv from {1 - rank} of 'test'" in work["text"]
        assert stream["error"] == "StreamFailed"
        assert "irecv" in stream["text"]
        assert idle


def test_a_message_that_had_to_wait_for_its_link_still_comes_after_its_stream(play: Play) -> None:
    assert play(hccl.ordered, 2) == [[True, [2, 3]]] * 2


def test_a_warm_link_is_used_at_once(play: Play) -> None:
    for made, data, names in play(hccl.warmed, 2):
        assert made == []
        assert data == [0]
        assert names == ["test/0/0-1", "test/0/0-1/0-1", "test/0/0-1/1-0"]


def test_streams_of_closed_communicators_are_used_again(play: Play) -> None:
    for sums, empty in play(hccl.many, 2, count=40):
        assert sums == [2 * number + 1 for number in range(40)]
        assert empty


def test_more_communicators_than_streams_are_refused_by_name(play: Play) -> None:
    for (refusal,) in play(hccl.too_many, 2, count=31):
        assert refusal["error"] == "CommunicatorFailed"
        assert "no stream is left for HCCL: the pool has 32" in refusal["text"]
        assert "c7/0/0-1" in refusal["text"]


def test_a_communicator_leaves_the_process_as_it_was(play: Play) -> None:
    for found in play(hccl.surroundings, 2):
        assert found == {"environment": True, "initialised": False, "watchdogs": 0, "ours": True}


def test_empty_operations_wait_for_everybody_too(play: Play) -> None:
    early, _ = play(hccl.empties, 2)
    assert [seen["error"] for seen in early] == ["ResultPending"] * 2


def test_an_error_on_the_device_is_raised_and_stays_on_its_communicator(play: Play) -> None:
    for ended, again in play(hccl.mismatch, 2, spoils=True):
        assert ended["error"] == "CommunicatorFailed"
        assert "all_reduce of 'hit' failed on the device" in ended["text"]
        assert again["error"] == "CommunicatorFailed"
        assert "barrier of 'hit'" in again["text"]


def test_operations_are_not_captured(play: Play) -> None:
    for seen in play(hccl.captured, 2):
        assert [one["error"] for one in seen] == ["Unsupported"] * 2
        assert "all_reduce of 'test'" in seen[0]["text"]


def test_what_hccl_must_not_be_given_is_refused(play: Play) -> None:
    for seen in play(hccl.refused, 2):
        assert [one["error"] for one in seen] == ["Unsupported"] * 5
        wanted = ("on npu", "private format", r"npu:\d is needed", "not summed", "blob")
        for one, words in zip(seen, wanted, strict=True):
            assert re.search(words, one["text"]), one["text"]


def test_a_rank_that_is_lost_while_a_link_is_made_strands_nobody(play: Play) -> None:
    (ended, gone), _ = play(hccl.lost_while_linking, 2, deadline=BRISK, lost=frozenset({1}))
    assert ended["error"] in ("OperationTimeout", "CommunicatorFailed")
    assert "irecv from 1 of 'test'" in ended["text"]
    assert gone


def test_a_communicator_is_rebuilt_as_often_as_it_fails(play: Play) -> None:
    assert play(hccl.reopened, 2, deadline=BRISK, rounds=3) == [[1, 3, 5]] * 2
