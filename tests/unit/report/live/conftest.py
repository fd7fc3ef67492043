"""States of a live display, as a run builds them."""

from typing import Any

import pytest

from equipoise.demo.progress import LiveMessage
from equipoise.report.live.state import LiveSetup, LiveState


def live_setup(**other: Any) -> LiveSetup:
    fields: dict[str, Any] = {
        "ranks": 4,
        "layers": 2,
        "experts": 32,
        "stages": 1,
        "phases": ("python", "chinese", "tables"),
        "switch_steps": (40, 80),
        "steps": 120,
        "passes": ("unbalanced", "local"),
        "tokens": lambda _: 100,
    }
    return LiveSetup(**{**fields, **other})


def load(step: int, *rows: list[int], text: tuple[str, str] = ("def f(", "x):")) -> LiveMessage:
    return {"live": "load", "step": step, "rank_rows": list(rows), "text": list(text)}


def ended(number: int, step: int, **other: Any) -> LiveMessage:
    fields = {"outcome": "committed", "copies": 3, "bytes": 99, "seconds": 0.8, "moves": []}
    return {"live": "ended", "rebalance": number, "step": step, **fields, **other}


UNEVEN = [100, 90, 190, 20], [100, 90, 190, 20]
"""Rank 2 has 1.9 times the mean of both layers."""
EVEN = [100, 100, 100, 100], [100, 100, 100, 100]


@pytest.fixture
def moved() -> LiveState:
    """Behind the first commit of the second pass."""
    state = LiveState(live_setup())
    state.begin_pass("unbalanced")
    for step in range(0, 120, 2):
        state.update({"live": "step", "step": step, "seconds": 0.5})
        state.update(load(step, *UNEVEN))
    state.begin_pass("local")
    for step in (0, 2, 4):
        state.update({"live": "step", "step": step, "seconds": 0.25})
        state.update(load(step, *UNEVEN))
    moves = [[1, 7, 2, 3], [0, 5, 2, 0], [1, 9, 2, 1]]
    for message in (
        {"live": "state", "state": "planning", "rebalance": 1},
        {"live": "state", "state": "transferring", "rebalance": 1},
        {"live": "moves", "rebalance": 1, "count": 3, "moves": moves},
        ended(1, 6),
        load(6, *EVEN),
    ):
        state.update(message)
    return state
