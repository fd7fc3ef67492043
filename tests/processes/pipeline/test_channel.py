"""Channels between processes: P5, K1, X3, and the bugs that taught them."""

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import channel_ends, channels, engine_steps
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st

FEW = few(25)
ROWS = st.lists(st.integers(0, channels.MOST), min_size=1, max_size=12)


@FEW
@given(ROWS, st.integers(1, 4).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, d))))
def test_channel_delivers_steps_whose_source_is_overwritten(
    ranks: Ranks, rows: list[int], buffers: tuple[int, int]
) -> None:
    depth, ahead = buffers
    answers = ranks.run(channels.stream_of_steps, 2, rows=rows, depth=depth, ahead=ahead, parts=1)
    for answer in answers:
        assert answer["wrong"] == []
        assert (answer["messages"], answer["buffers"]) == (len(rows), 0)


@FEW
@given(ROWS, st.integers(1, 3))
def test_channel_delivers_steps_built_in_lent_buffers(
    ranks: Ranks, rows: list[int], depth: int
) -> None:
    answers = ranks.run(
        channels.stream_of_steps, 2, rows=rows, depth=depth, ahead=depth, parts=1, lent=True
    )
    assert [(answer["wrong"], answer["buffers"]) for answer in answers] == [([], 0)] * 2


def test_channel_does_not_pack_into_lent_buffer_still_held(ranks: Ranks) -> None:
    sender, receiver = ranks.run(channel_ends.kept_of_a_loan, 2)
    assert sender["refused"]["error"] == "BuffersBusy"
    assert "message 0" in sender["refused"]["text"]
    assert sender["kept"]
    assert receiver["wrong"] == []


def test_channel_reopens_closed_edge_under_same_name(ranks: Ranks) -> None:
    assert ranks.run(channel_ends.opened_again, 2, times=3) == [[], []]


@FEW
@given(ROWS, st.integers(1, 3))
def test_channel_gathers_slices_to_sent_tensors(ranks: Ranks, rows: list[int], depth: int) -> None:
    answers = ranks.run(channels.stream_of_steps, 4, rows=rows, depth=depth, ahead=depth, parts=2)
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    assert {answer["messages"] for answer in answers} == {len(rows)}
    assert all(answer["gathered"] >= 2 * len(rows) for answer in answers[2:])
    assert all(answer["buffers"] == 0 for answer in answers)


@FEW
@given(ROWS, st.integers(2, 4), st.sampled_from([1, 2]))
def test_channel_hands_padded_steps_to_engine(
    ranks: Ranks, rows: list[int], in_flight: int, parts: int
) -> None:
    answers = ranks.run(engine_steps.run, 2 * parts, rows=rows, in_flight=in_flight, parts=parts)
    for answer in answers[parts:]:
        assert answer["right"] == [True] * len(rows)
        assert answer["finite"]


def test_channel_steady_step_is_one_message_without_allocation(
    ranks: Ranks,
) -> None:
    sender, receiver = ranks.run(channels.steady, 2, steps=20)
    assert sender == {"isend": 20}
    assert receiver == {"irecv": 20}


@pytest.mark.parametrize("other", ["dtype", "depth"])
def test_channel_refuses_mismatched_ends_on_both_sides(ranks: Ranks, other: str) -> None:
    for answer in ranks.run(channels.opened_otherwise, 2, other=other):
        assert answer["error"] == "ShapeClassError"
        assert "rank 0" in answer["text"]
        assert "rank 1" in answer["text"]


def test_channel_does_not_receive_into_buffer_still_held(ranks: Ranks) -> None:
    sender, receiver = ranks.run(channels.keeper, 2)
    assert sender["error"] == ""
    assert receiver["told"]["error"] == "BuffersBusy"
    assert "message 0" in receiver["told"]["text"]
    assert receiver["whole"] == [True, True]
    assert receiver["seen"] == [True] * 4


def test_channel_drain_during_handovers_frees_no_buffer_early(ranks: Ranks) -> None:
    rows = [channels.MOST, 1] * 40
    answers = ranks.run(channels.drained_meanwhile, 2, rows=rows)
    assert [answer["wrong"] for answer in answers] == [[], []]


def test_channel_send_does_not_wait_for_later_receive_vllm_49274(ranks: Ranks) -> None:
    """vLLM pull request 49274: the metadata of an asynchronous send was sent blocking, and a
    schedule in which the receive came later hung."""
    sender, receiver = ranks.run(channels.before_anybody_receives, 2, steps=4)
    assert not sender["room"]
    assert receiver["wrong"] == []


def test_channel_refuses_slices_of_unequal_tensors_sglang_30015(ranks: Ranks) -> None:
    """SGLang issue 30015: gathered slices of tensors that differ are nobody's."""
    answers = ranks.run(channels.not_alike, 4)
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    for answer in answers[:2]:
        assert answer["told"]["error"] == "NotReplicated"
        assert "hidden, residual" in answer["told"]["text"]


def test_channel_reads_of_lost_sender_raise_the_same_error(ranks: Ranks) -> None:
    _, receiver = ranks.run(channels.lost_sender, 2, lost={0}, deadline=5.0)
    assert receiver["whole"]
    assert receiver["reads"][0] == receiver["reads"][1]
    assert receiver["reads"][0][0] in ("CommunicatorFailed", "OperationTimeout")
    assert receiver["later"] == receiver["reads"][0][0]


def test_channel_step_in_graph_capture_is_an_error_vllm_51887(ranks: Ranks) -> None:
    """vLLM issue 51887: a graph had captured the boundary of a stage, and serving hung."""
    sender, receiver = ranks.run(channels.in_a_graph, 2, deadline=5.0)
    assert sender == "EventNotRecorded"
    assert receiver in ("OperationTimeout", "CommunicatorFailed")
