"""Many rebalances, and nothing grows: memory, threads, descriptors, shared memory, keys."""

from typing import Any

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import rebalance_soak as soak
from helpers.records import RecordProperty, add_row
from helpers.tiers import DEEP

MEBI = 1 << 20
WARM, REBALANCES, WATCHDOG = (100, 10_000, 3_600.0) if DEEP else (30, 60, 250.0)
"""Rebalances that move weights, before what is held is counted first and after it; seconds."""
SLACK = {
    "resident": (8 if DEEP else 3) << 20,
    "threads": 0,
    "descriptors": 0,
    "mappings of shared memory": 0,
    "objects": 400,
    "keys": 40,
    "length": 40,
}
"""By how much a count may differ between two moments: a rebalance and what it asks, or a page of a
heap, is there or is not. Whatever grew by one a rebalance would exceed it in the deep profile; what
grew by as much as a rebalance asks, on every commit."""
pytestmark = pytest.mark.timeout(WATCHDOG * 2)


@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_engine_resources_do_not_grow_over_rebalances(
    ranks: Ranks, commit: str, record_property: RecordProperty
) -> None:
    records = ranks.run(
        soak.serve, 2, watchdog=WATCHDOG, commit=commit, warm=WARM, rebalances=REBALANCES
    )
    for rank, record in enumerate(records):
        add_row(record_property, "soak", table_row(f"{commit}, rank {rank}", record))
        assert record["wrong"] == []
        assert record["outcomes"]["moved"] >= WARM + REBALANCES
        assert resource_growth(record["before"], record["after"]) == {}


def test_balancer_reconfigure_frees_control_plane_questions(ranks: Ranks) -> None:
    slack = SLACK["keys"]
    first, last = ranks.run(
        soak.regroup,
        2,
        watchdog=WATCHDOG,
        times=200 if DEEP else 8,
        rebalances=2,
        slack=slack,
        settling=20,
    )[0]
    assert last <= first + slack


def table_row(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """A row of docs/deep-results.md with the counts before and after; memory in MiB."""
    before, after = record["before"], record["after"]
    counts = {count: f"{before[count]} to {after[count]}" for count in COUNTS}
    counts["resident"] = f"{before['resident'] / MEBI:.1f} to {after['resident'] / MEBI:.1f}"
    rebalances = ", ".join(f"{number} {outcome}" for outcome, number in record["outcomes"].items())
    return {"path": name, "steps": record["steps"], "rebalances": rebalances, **counts}


def resource_growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Counts that grew by more than their slack, with both values."""
    growth = {
        name: (before[name], after[name])
        for name in COUNTS
        if after[name] - before[name] > SLACK[name]
    }
    for path, length in after["lengths"].items():
        first = before["lengths"].get(path, 0)
        if length - first > SLACK["length"]:
            growth[path] = (first, length)
    return growth


COUNTS = tuple(name for name in SLACK if name != "length")
