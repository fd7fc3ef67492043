"""Channels between devices: streams read, and messages follow streams."""

from collections.abc import Callable, Collection
from typing import Any

from helpers.harnesses.devices import Network
from helpers.processes.rank_pool import DEADLINE, Case, Ranks
from helpers.rank_programs import channel_ends, channels, engine_steps
from helpers.rank_programs import pipeline_stages as stages
from helpers.strategies.hypothesis_examples import few
from hypothesis import example, given
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
def test_channel_delivers_steps_despite_source_overwrite(
    ranks: Ranks, network: Network, rows: list[int], buffers: tuple[int, int]
) -> None:
    depth, ahead = buffers
    for answer in played(ranks, network, 2, rows=rows, depth=depth, ahead=ahead, parts=1):
        assert answer["wrong"] == []
        assert (answer["messages"], answer["buffers"]) == (len(rows), 0)


@FEW
@given(ROWS, st.integers(1, 3))
def test_channel_delivers_steps_written_into_lent_buffers(
    ranks: Ranks, network: Network, rows: list[int], depth: int
) -> None:
    for answer in played(
        ranks, network, 2, rows=rows, depth=depth, ahead=depth, parts=1, lent=True
    ):
        assert (answer["wrong"], answer["buffers"]) == ([], 0)


def test_channel_read_before_send_does_not_block_host(
    ranks: Ranks,
    network: Network,
) -> None:
    _, receiver = on_devices(ranks, network, channel_ends.read_before_it_was_sent, 2)
    assert receiver == {"ready": False, "seen": [True, True]}


def test_channel_does_not_receive_into_held_buffer(ranks: Ranks, network: Network) -> None:
    sender, receiver = on_devices(ranks, network, channels.keeper, 2)
    assert sender["error"] == ""
    assert receiver["told"]["error"] == "BuffersBusy"
    assert receiver["whole"] == [True, True]
    assert receiver["seen"] == [True] * 4


def test_channel_read_reports_lost_message_every_time(ranks: Ranks, network: Network) -> None:
    _, receiver = on_devices(
        ranks, network, channel_ends.lost_on_the_way, 2, lost={0}, deadline=5.0
    )
    assert receiver["whole"]
    first, again = receiver["told"]
    assert first == again
    assert first in ("CommunicatorFailed", "OperationTimeout")


@FEW
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_pipeline_tokens_equal_single_process_with_passing_stage(
    ranks: Ranks, network: Network, sizes: list[int], in_flight: int, passes: bool
) -> None:
    passing = [1] if passes else []
    arguments: dict[str, Any] = {
        "sizes": sizes,
        "in_flight": in_flight,
        "depth": 2,
        "parts": 1,
        "raises": [],
    }
    answers = on_devices(ranks, network, stages.run_stages, 3, passing=passing, **arguments)
    expected = stages.alone(3, sizes, in_flight, passing)
    assert [answer["error"] for answer in answers] == [""] * 3
    assert answers[0]["tokens"] == answers[-1]["tokens"] == expected


@FEW
@given(ROWS)
def test_channel_gathers_slices_to_sent_step(
    ranks: Ranks, network: Network, rows: list[int]
) -> None:
    for answer in played(ranks, network, 4, rows=rows, depth=2, ahead=2, parts=2):
        assert answer["wrong"] == []
        assert answer["messages"] == len(rows)


@FEW
@given(st.lists(st.integers(1, channels.MOST), min_size=8, max_size=16), st.integers(2, 4))
@example([1, 32] * 6, 2)
@example([32, 1, 1] * 4, 3)
@example([32, 1, 1, 1] * 3, 4)
def test_channel_steps_of_mixed_sizes_in_flight_make_no_host_wait(
    ranks: Ranks, network: Network, rows: list[int], in_flight: int
) -> None:
    """As engines run it, two ranks a stage: padded steps, read and let go of at once."""
    answers = on_devices(
        ranks, network, engine_steps.run, 4, rows=rows, in_flight=in_flight, parts=2
    )
    for answer in answers:
        assert (answer["messages"], answer["buffers"]) == (len(rows) - in_flight, 0)
        assert answer["host_waits"] == 0
    for answer in answers[2:]:
        assert answer["right"] == [True] * len(rows)
        assert answer["finite"]
