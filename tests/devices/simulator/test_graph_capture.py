"""What a capture forbids whom, and what becomes of its events and graphs."""

from typing import Any

import pytest
from devices.simulator.simulated_program import run_program

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


def test_capture_event_cannot_be_waited_for_after_its_end(facts: dict[str, Any]) -> None:
    assert facts["ended"] == [EVENT_CAPTURED, 1]


def test_capture_graph_is_unusable_after_destroy(facts: dict[str, Any]) -> None:
    assert facts["destroyed"] == [[INVALID, 1], [INVALID, 1]]


def test_capture_graph_cannot_be_destroyed_during_capture(facts: dict[str, Any]) -> None:
    assert facts["making"] == [MODEL_CAPTURED, 1]


@pytest.mark.parametrize(
    ("mode", "own", "others"),
    [
        ("global", FORBIDDEN, FORBIDDEN),
        ("thread_local", FORBIDDEN, ALLOWED),
        ("relaxed", ALLOWED, ALLOWED),
    ],
)
def test_capture_mode_restricts_unsafe_calls_of_threads(
    facts: dict[str, Any], mode: str, own: dict[str, int], others: dict[str, int]
) -> None:
    codes = facts["unsafe"][mode]
    assert codes["own thread"] == own
    assert codes["other thread"] == others
    assert codes["exchanged"] == ALLOWED


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_forbids_queries_and_pageable_copies_in_any_mode(
    facts: dict[str, Any], mode: str
) -> None:
    forbidden = dict.fromkeys(("pageable", "query", "device"), CAPTURED)
    assert facts["unsafe"][mode]["in the capture"] == forbidden


def test_capture_must_end_where_it_began(facts: dict[str, Any]) -> None:
    assert facts["ends"] == {
        "default stream": UNSUPPORTED,
        "thread, global": WRONG_THREAD,
        "thread, thread_local": WRONG_THREAD,
        "thread, relaxed": 0,
        "default stream joins": IMPLICIT,
        "joined stream": UNMATCHED,
        "unjoined": UNJOINED,
    }


def test_capture_callbacks_run_on_thread_of_captured_stream(facts: dict[str, Any]) -> None:
    assert facts["callbacks"] == {
        "unsubscribed": UNSUBSCRIBED,
        "twice": SUBSCRIBED,
        "replayed": 0,
        "by the captured stream's thread": True,
    }
