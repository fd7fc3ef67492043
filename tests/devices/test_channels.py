"""Channels between devices: streams read, and messages follow streams."""

from collections.abc import Callable, Collection
from typing import Any

from helpers.harnesses.devices import Network
from helpers.processes.ranks import DEADLINE, Case, Ranks
from helpers.rank_programs import channel_ends, channels, stages, tensor_dicts
from helpers.strategies.drawing import few
from hypothesis import given
from hypothesis import strategies as st

FEW = few(8, shrink=False)
ROWS = st.lists(st.integers(0, channels.MOST), min_size=1, max_size=8)


def on_devices(
    ranks: Ranks,
    network: Network,
    program: Callable[..., Any],
    size: int,
    lost: Collection[int] = (),
    deadline: float = DEADLINE,
    **arguments: Any,
) -> list[Any]:
    network.need(size)
    return ranks.play(
        Case(
            program=f"{program.__module__}:{program.__qualname__}",
            size=size,
            arguments={**arguments, "backend": network.backend},
            communicator=network.communicator,
            lost=frozenset(lost),
            deadline=deadline,
            spoils=bool(lost),
        )
    )


def played(ranks: Ranks, network: Network, size: int, **arguments: Any) -> list[dict[str, Any]]:
    return on_devices(ranks, network, channels.stream_of_steps, size, **arguments)


@FEW
@given(ROWS, st.integers(1, 3).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, d))))
def test_steps_arrive_whole_though_their_source_is_written_over(
    ranks: Ranks, network: Network, rows: list[int], buffers: tuple[int, int]
) -> None:
    depth, ahead = buffers
    for answer in played(ranks, network, 2, rows=rows, depth=depth, ahead=ahead, parts=1):
        assert answer["wrong"] == []
        assert (answer["messages"], answer["buffers"]) == (len(rows), 0)


@FEW
@given(ROWS, st.integers(1, 3))
def test_steps_that_are_made_where_they_are_sent_from_arrive_whole(
    ranks: Ranks, network: Network, rows: list[int], depth: int
) -> None:
    for answer in played(
        ranks, network, 2, rows=rows, depth=depth, ahead=depth, parts=1, lent=True
    ):
        assert (answer["wrong"], answer["buffers"]) == ([], 0)


def test_a_read_orders_the_stream_behind_a_message_that_nobody_has_sent_and_the_host_goes_on(
    ranks: Ranks,
    network: Network,
) -> None:
    _, receiver = on_devices(ranks, network, channel_ends.read_before_it_was_sent, 2)
    assert receiver == {"ready": False, "seen": [True, True]}


def test_a_buffer_is_not_received_into_while_a_tensor_over_it_is_kept(
    ranks: Ranks, network: Network
) -> None:
    sender, receiver = on_devices(ranks, network, channels.keeper, 2)
    assert sender["error"] == ""
    assert receiver["told"]["error"] == "BuffersHeld"
    assert receiver["whole"] == [True, True]
    assert receiver["seen"] == [True] * 4


def test_a_host_whose_stream_reads_is_told_each_time_that_a_message_was_lost(
    ranks: Ranks, network: Network
) -> None:
    _, receiver = on_devices(
        ranks, network, channel_ends.lost_on_the_way, 2, lost={0}, deadline=3.0
    )
    assert receiver["whole"]
    first, again = receiver["told"]
    assert first == again
    assert first in ("CommunicatorFailed", "OperationTimeout")


@FEW
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_a_pipeline_samples_what_one_process_samples_though_a_stage_hands_on_what_came(
    ranks: Ranks, network: Network, sizes: list[int], in_flight: int, passes: bool
) -> None:
    passing = [1] if passes else []
    told: dict[str, Any] = {
        "sizes": sizes,
        "in_flight": in_flight,
        "depth": 2,
        "parts": 1,
        "raises": [],
    }
    answers = on_devices(ranks, network, stages.turns, 3, passing=passing, **told)
    expected = stages.alone(3, sizes, in_flight, passing)
    assert [answer["error"] for answer in answers] == [""] * 3
    assert answers[0]["tokens"] == answers[-1]["tokens"] == expected


@FEW
@given(ROWS)
def test_slices_are_gathered_to_what_was_sent(
    ranks: Ranks, network: Network, rows: list[int]
) -> None:
    for answer in played(ranks, network, 4, rows=rows, depth=2, ahead=2, parts=2):
        assert answer["wrong"] == []
        assert answer["messages"] == len(rows)


def test_what_is_received_comes_behind_readers_who_hold_no_tensor_any_more(
    ranks: Ranks, network: Network
) -> None:
    _, read = on_devices(ranks, network, tensor_dicts.let_go, 2, steps=24)
    assert read == list(range(24))
