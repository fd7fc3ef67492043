"""What a live display is told of events."""

import json

import numpy as np
import pytest
from helpers.strategies.engine_events import SHAPE, placements, rebalance_ended, state_changed
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import (
    BatchSampled,
    BoundaryDone,
    EventsDropped,
    StepDone,
    TransferStarted,
)
from equipoise.demo.live_feed import MAX_MOVES, PROMPT_BYTES_SHOWN, LiveFeed
from equipoise.demo.progress import LiveMessage
from equipoise.demo.scheduler import RunningRequest
from equipoise.demo.traffic import PromptRequest

TURNS = 2
Told = list[LiveMessage]


@pytest.fixture
def feed() -> tuple[LiveFeed, Told]:
    told: Told = []
    return LiveFeed(told.append, TURNS), told


def sampled(step: int) -> BatchSampled:
    placement = initial_placement(SHAPE)
    layout = Layout(placement, even_shares(placement, SHAPE.experts))
    counts = np.zeros((SHAPE.ranks, SHAPE.layers, SHAPE.experts), dtype=np.int32)
    return BatchSampled(step, counts, layout, SHAPE, lambda *_: np.array([[1, 2], [3, 4]]))


def ids(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(numbers, dtype=np.int32)


def request(phase: int, prompt: bytes, *tokens: int) -> RunningRequest:
    return RunningRequest(PromptRequest(0, phase, prompt), 0, list(tokens))


def test_live_feed_tells_steps_of_the_serve_loop(feed: tuple[LiveFeed, Told]) -> None:
    live, told = feed
    live.emit(sampled(7))
    live.emit(StepDone(3, 1.0, 1.25))
    live.emit(state_changed("planning", 4))
    live.emit(EventsDropped(5))
    live.emit(BoundaryDone(8, 0.0, 0.0))
    assert told == [
        {"live": "load", "step": 3, "rank_rows": [[1, 2], [3, 4]], "text": ["", ""]},
        {"live": "step", "step": 3, "seconds": 0.25},
        {"live": "state", "state": "planning", "rebalance": 4},
        {"live": "dropped", "count": 5},
    ]
    assert json.loads(json.dumps(told)) == told


def test_live_feed_names_copies_between_ranks_only(feed: tuple[LiveFeed, Told]) -> None:
    live, told = feed
    # Six slots on two ranks: slots 3 to 5 are rank 1's.
    live.emit(TransferStarted(7, 3, ids(0, 1, 1), ids(2, 3, 0), ids(3, 0, 1), ids(0, 5, 2), SHAPE))
    live.emit(rebalance_ended(number=3))
    assert told[0] == {
        "live": "moves",
        "rebalance": 3,
        "count": 2,
        "moves": [[0, 2, 1, 0], [1, 3, 0, 1]],
    }
    assert told[1]["moves"] == []
    assert told[1]["step"] == 9 // TURNS
    assert told[1]["seconds"] == 1.0


def test_live_feed_bounds_moves_of_a_message(feed: tuple[LiveFeed, Told]) -> None:
    live, told = feed
    many = np.arange(3 * MAX_MOVES, dtype=np.int32)
    live.emit(TransferStarted(7, 3, many, many, many * 0, many * 0 + 3, SHAPE))
    assert told[0]["count"] == 3 * MAX_MOVES
    assert len(told[0]["moves"]) == MAX_MOVES


def test_live_feed_takes_moves_without_transfer_as_from_host(feed: tuple[LiveFeed, Told]) -> None:
    live, told = feed
    before, after = placements()
    assert before[0, 0] != after[0, 0]
    live.emit(rebalance_ended())
    assert told[0]["moves"] == [[0, int(after[0, 0]), -1, 0]]


def test_live_feed_follows_a_request_to_its_end(feed: tuple[LiveFeed, Told]) -> None:
    live, told = feed
    first, second, third = request(0, b"one "), request(0, b"two "), request(1, b"three ")
    live.follow(None, 2)
    for newest, token in ((first, 65), (second, 66)):
        live.follow(newest, 2)
        first.tokens.append(token)
        live.emit(sampled(0))
    live.follow(second, 2)
    live.emit(sampled(0))
    live.follow(third, 2)  # its text is of another kind: the switch is to be seen
    live.emit(sampled(0))
    live.close()
    live.emit(sampled(0))
    assert [message["text"] for message in told] == [
        ["one ", "A"],
        ["one ", "AB"],
        ["two ", ""],
        ["three ", ""],
        ["", ""],
    ]


@given(text=st.text(min_size=1), cut=st.integers(0, 200), more=st.binary(max_size=16))
def test_live_feed_text_never_fails_and_keeps_what_is_whole(
    text: str, cut: int, more: bytes
) -> None:
    told: Told = []
    live = LiveFeed(told.append, 1)
    prompt = text.encode()[: max(cut, 1)]
    live.follow(request(0, prompt, *more), 100)
    live.emit(sampled(0))
    shown, written = told[0]["text"]
    assert len(shown.encode()) <= PROMPT_BYTES_SHOWN
    assert shown in text
    assert "\ufffd" not in shown or "\ufffd" in text
    if not more and len(prompt) == len(text.encode()):
        assert text.endswith(shown + written)


def test_live_feed_leaves_unfinished_character_to_the_next_token() -> None:
    told: Told = []
    tokens = "中".encode()
    prompt = b"a" + tokens[:1]
    for count in (0, 1, 2):
        live = LiveFeed(told.append, 1)
        live.follow(request(0, prompt, *tokens[1 : 1 + count]), 9)
        live.emit(sampled(0))
    assert [message["text"] for message in told] == [["a", ""], ["a", ""], ["a", "中"]]
