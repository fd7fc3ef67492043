"""Epoch after epoch, and nothing grows: memory, threads, descriptors, shared memory, keys."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from ranks.cases import soak
from support.ranks import Ranks

DEEP = settings.get_current_profile_name() == "deep"
WARM, EPOCHS, WATCHDOG = (100, 10_000, 3_600.0) if DEEP else (30, 60, 250.0)
"""Epochs that move weights, before what is held is counted first and after it; seconds."""
SLACK = {
    "resident": (8 if DEEP else 3) << 20,
    "threads": 0,
    "descriptors": 0,
    "mappings of shared memory": 0,
    "objects": 400,
    "keys": 40,
    "length": 40,
}
"""By how much a count may differ between two moments: an epoch and what it asks, or a page of a
heap, is there or is not. Whatever grew by one an epoch would exceed it in the deep profile; what
grew by as much as an epoch asks, on every commit."""
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(WATCHDOG * 2)]


@pytest.mark.parametrize("commit", ["boundary", "locked"])
def test_nothing_grows_however_many_epochs_there_are(
    ranks: Ranks, commit: str, record_property: Callable[[str, object], None]
) -> None:
    stories = ranks.run(soak.serve, 2, watchdog=WATCHDOG, commit=commit, warm=WARM, epochs=EPOCHS)
    for rank, story in enumerate(stories):
        record_property(f"{commit}, rank {rank}", json.dumps(told(story)))
        assert story["wrong"] == []
        assert story["outcomes"]["moved"] >= WARM + EPOCHS
        assert grown(story["before"], story["after"]) == {}


def test_what_a_group_has_asked_goes_when_its_ranks_make_another(ranks: Ranks) -> None:
    first, *others = ranks.run(
        soak.regroup, 2, watchdog=WATCHDOG, times=200 if DEEP else 8, epochs=2
    )[0]
    assert max(others) <= first + SLACK["keys"]


def told(story: dict[str, Any]) -> dict[str, Any]:
    """Both counts, for who asks to see them (`--junitxml`)."""
    counts = {when: {name: story[when][name] for name in COUNTS} for when in ("before", "after")}
    return {"steps": story["steps"], "outcomes": story["outcomes"], **counts}


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """What is more than it was, by more than its slack."""
    found = {
        name: (before[name], after[name])
        for name in COUNTS
        if after[name] - before[name] > SLACK[name]
    }
    for path, length in after["lengths"].items():
        first = before["lengths"].get(path, 0)
        if length - first > SLACK["length"]:
            found[path] = (first, length)
    return found


COUNTS = tuple(name for name in SLACK if name != "length")
