"""Checks of the outcome of a run: tokens, rearrangements, counters."""

from operator import ne
from typing import Any

from engines.vllm.runs.modes import REARRANGEMENTS
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import PLANTED, Fault


def check_tokens(outcome: Outcome, reference: Reference) -> None:
    """Every round is the reference, token for token."""
    for number, tokens in enumerate(outcome.rounds):
        assert tokens == reference.tokens, f"round {number}"


def differs(outcome: Outcome, reference: Reference, fault: Fault) -> bool:
    """Whether a fault that was planted shows: another token, or an engine that died of it."""
    assert PLANTED.format(fault) in outcome.output, "nothing was broken"
    if outcome.answers is None:
        return outcome.code == 1
    return any(tokens != reference.tokens for tokens in outcome.rounds)


def check_rearrangements(outcome: Outcome, layers: int) -> None:
    """Both ranks went through enough rearrangements, alike, and experts moved.

    Args:
        outcome: of two ranks with vLLM's own EPLB.
        layers: that are to be moved one by one in each rearrangement: 4, or 0 where all of a
            rearrangement is one step. One by one, the last rearrangement may not be through when
            the ranks end, and one rank may have come further with it.
    """
    processes = outcome.of("watch")
    assert len(processes) == 2, "nothing is balanced"
    first, second = processes
    assert (first["rank"], second["rank"]) == (0, 1)
    moved = [counts(process).get("layers", 0) for process in processes]
    differing = sum(map(ne, first["maps"], second["maps"]))
    # A layer that was moved is installed in the step after.
    under_way = abs(moved[0] - moved[1]) + 1 if layers else 0
    assert differing <= under_way, "ranks serve different placements"
    assert first["maps"] != first["first"]
    assert layers or counts(first) == counts(second)
    rearrangements = counts(first)["rearrangements"]
    assert rearrangements == counts(second)["rearrangements"] >= REARRANGEMENTS
    for process in processes:
        assert (
            layers * (rearrangements - 1)
            <= counts(process).get("layers", 0)
            <= layers * rearrangements
        )
        assert counts(process)["map_changes"] >= REARRANGEMENTS - 1


def counts(process: dict[str, Any]) -> dict[str, int]:
    """The counters of one process, by name."""
    counts_by_name: dict[str, int] = process["counts"]
    return counts_by_name
