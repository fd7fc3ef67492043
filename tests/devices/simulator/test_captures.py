"""What a capture forbids whom, and what becomes of its events and graphs."""

from typing import Any

import pytest
from devices.simulator.running import run_program

INVALID, UNJOINED, MODEL_CAPTURED = 100000, 107025, 107026
SUBSCRIBED, UNSUBSCRIBED = 107011, 107015
CAPTURED, EVENT_CAPTURED, MODE, IMPLICIT = 107027, 107028, 107030, 107031
UNMATCHED, WRONG_THREAD, UNSUPPORTED = 107036, 107038, 207000
ALLOWED = dict.fromkeys(("memset", "copy", "pageable", "pinned", "default stream"), 0)
FORBIDDEN = {
    "memset": MODE,
    "copy": MODE,
    "pageable": MODE,
    "pinned": 0,
    "default stream": IMPLICIT,
}


@pytest.fixture(scope="module", params=["eager", "lazy"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the program found; nothing in it may crash."""
    return run_program("captures", request.param).facts


def test_an_event_of_a_capture_that_has_ended_cannot_be_waited_for(facts: dict[str, Any]) -> None:
    assert facts["ended"] == [EVENT_CAPTURED, 1]


def test_a_destroyed_graph_is_told(facts: dict[str, Any]) -> None:
    assert facts["destroyed"] == [[INVALID, 1], [INVALID, 1]]


def test_a_graph_in_the_making_is_not_destroyed(facts: dict[str, Any]) -> None:
    assert facts["making"] == [MODEL_CAPTURED, 1]


@pytest.mark.parametrize(
    ("mode", "own", "others"),
    [
        ("global", FORBIDDEN, FORBIDDEN),
        ("thread_local", FORBIDDEN, ALLOWED),
        ("relaxed", ALLOWED, ALLOWED),
    ],
)
def test_a_mode_says_which_threads_may_call_unsafe_functions(
    facts: dict[str, Any], mode: str, own: dict[str, int], others: dict[str, int]
) -> None:
    found = facts["unsafe"][mode]
    assert found["own thread"] == own
    assert found["other thread"] == others
    assert found["exchanged"] == ALLOWED


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_no_mode_lets_a_capture_be_asked_or_hold_pageable_memory(
    facts: dict[str, Any], mode: str
) -> None:
    forbidden = dict.fromkeys(("pageable", "query", "device"), CAPTURED)
    assert facts["unsafe"][mode]["in the capture"] == forbidden


def test_a_capture_ends_where_it_began(facts: dict[str, Any]) -> None:
    assert facts["ends"] == {
        "default stream": UNSUPPORTED,
        "thread, global": WRONG_THREAD,
        "thread, thread_local": WRONG_THREAD,
        "thread, relaxed": 0,
        "default stream joins": IMPLICIT,
        "joined stream": UNMATCHED,
        "unjoined": UNJOINED,
    }


def test_the_captured_streams_thread_runs_captured_callbacks(facts: dict[str, Any]) -> None:
    assert facts["callbacks"] == {
        "unsubscribed": UNSUBSCRIBED,
        "twice": SUBSCRIBED,
        "replayed": 0,
        "by the captured stream's thread": True,
    }
