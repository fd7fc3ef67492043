"""The fault matrix; what two ranks that are left of three may have seen, and what not."""

from typing import Any

from helpers.rank_programs import rebalance_faults as faults
from helpers.rank_programs.rebalance_faults import VICTIM

STAGED_STATES = ("Planning", "Proposed", "Transferring", "Staged", "Decided")
IN_PLACE_STATES = ("Planning", "Proposed", "Decided", "Updating")
LOSSES = [
    *((where, how, commit)
      for commit, states in (("staged", STAGED_STATES), ("in_place", IN_PLACE_STATES))
      for where in states
      for how in ("killed", "stopped", "cut off")),
    ("Decided", "raises", "staged"),
    ("Decided", "raises", "in_place"),
    ("Proposed", "writes fail", "in_place"),
    ("Proposed", "writes are wrong", "in_place"),
]  # fmt: skip
"""Where a rank is lost, how, and how the ranks commit."""
TROUBLES = [
    *((what, where, "staged") for where in ("Idle", *STAGED_STATES) for what in faults.BREAKAGES),
    *((what, where, "in_place") for where in ("Idle", *IN_PLACE_STATES)
      for what in ("planner raises", "plan differs", "ballot lost", "slow")),
]  # fmt: skip
"""What is wrong with a rank that lives, since when, and how the ranks commit. In place nothing
travels that could be lost or fail before the decision; behind it a rank that fails is lost."""


def matrix_row(backend: str, commit: str, fault: str, state: str) -> dict[str, object]:
    """A place of the matrix, for docs/deep-results.md."""
    return {"ranks": backend, "path": commit, "fault": fault, "passed in": [state]}


def healthy(records: list[dict[str, Any]]) -> None:
    """They served one layout all the time, noticed the loss soon, and rebalance by themselves."""
    first, second = records
    assert mixed(records, "before") == []
    assert mixed(records, "after") == []
    assert first["last"] == second["last"]
    assert first["last"] < faults.STEPS - 1, "the fault was never reached"
    assert len(first["after"]) == len(second["after"]) >= faults.MORE
    assert "committed" in first["rebalances"], "two ranks rebalance by themselves"
    assert first["rebalances"] == second["rebalances"]


REASONS = {
    "planner raises": "planner failed",
    "transfer raises": "transfer failed",
    "plan differs": "plans differ",
    "bytes corrupted": "staged bytes differ",
    "message lost": "no progress in time",
    "ballot lost": "no ballot from rank(s) 1",
}
"""Of the abort that each of `faults.BREAKAGES` leads to; where none is said, to a late commit."""


def unmoved(records: list[dict[str, Any]], what: str) -> None:
    """All ranks served one layout all the time, and say alike what became of each rebalance."""
    columns = list(zip(*(record["observations"] for record in records), strict=True))
    assert len(columns) == faults.ENDURED
    for observations in columns:
        step, generations, placement, _ = observations[0]
        for rank, observation in enumerate(observations):
            expected = [row[rank * 3 : rank * 3 + 3] for row in placement]
            assert observation == [step, generations, placement, expected], f"rank {rank}"
    assert all(record["rebalances"] == records[0]["rebalances"] for record in records)
    for record in records:
        if what in REASONS:
            assert REASONS[what] in record["aborts"]
        else:
            assert record["aborts"] == {}
            assert "committed" in record["rebalances"]


def mixed(records: list[dict[str, Any]], part: str) -> list[str]:
    """Steps in which ranks had other generations or layouts, or slots held what nobody promised."""
    differences = []
    for first, second in zip(*(record[part] for record in records), strict=False):
        if first[:3] != second[:3]:
            differences.append(f"step {first[0]}: {first[:3]} and {second[:3]}")
        for place, (_, _, placement, contents) in enumerate((first, second)):
            rank = place if part == "after" or place < VICTIM else place + 1
            expected = [row[rank * 3 : rank * 3 + 3] for row in placement]
            if contents != expected:
                differences.append(
                    f"step {first[0]}: rank {rank} holds {contents}, promised {expected}"
                )
    return differences
