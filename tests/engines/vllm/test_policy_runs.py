"""Our policy in a real vLLM's own balancer: tokens stay, experts move as ours says."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens, counts, differs
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import Fault

RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
EAGER: Mapping[str, Any] = {"target": 0.0, "min_gain": 0.0}
"""Moves for whatever can be gained: windows of this model are a few hundred rows."""
MODEL = "qwen3-moe"


def policy_case(reference: Reference, **settings: Any) -> Case:
    """Two ranks, two redundant experts, a rearrangement every 8 steps; our policy."""
    return modes.ours(modes.balanced(reference, **settings), eplb_policy=EAGER)


def check_policy_plans(outcome: Outcome) -> None:
    """Both ranks asked our policy each time and got the same; nobody asked vLLM's."""
    first, second = outcome.of("equipoise")
    for rank in (first, second):
        assert rank["eplb_policy_calls"] >= modes.REARRANGEMENTS
        assert rank["eplb_policy_moved_slots"] >= 1
        assert rank["eplb_policy_failures"] == 0
    assert first["eplb_policy_moved_slots"] == second["eplb_policy_moved_slots"]
    for process in outcome.of("watch"):
        assert counts(process).get("policy", 0) == 0
        assert counts(process)["rearrangements"] >= modes.REARRANGEMENTS
        assert counts(process)["map_changes"] >= 1
    here, there = outcome.of("watch")
    assert here["maps"] == there["maps"] != here["first"]
    assert "equipoise eplb_policy: " in outcome.output


def test_policy_async_eplb_keeps_tokens(references: References, run_once: RunOnce) -> None:
    outcome = run_once("policy-async", policy_case(references[MODEL]))
    check_tokens(outcome, references[MODEL])
    check_policy_plans(outcome)


@pytest.mark.deep
def test_policy_sync_eplb_keeps_tokens(references: References, run_once: RunOnce) -> None:
    outcome = run_once("policy-sync", policy_case(references[MODEL], use_async=False))
    check_tokens(outcome, references[MODEL])
    check_policy_plans(outcome)


@pytest.mark.deep
def test_policy_keeps_tokens_with_16_experts(references: References, run_once: RunOnce) -> None:
    outcome = run_once("policy-16", policy_case(references["qwen3-moe-16"]))
    check_tokens(outcome, references["qwen3-moe-16"])
    check_policy_plans(outcome)


@pytest.mark.deep
@pytest.mark.parametrize("use_async", [True, False])
def test_policy_dropped_copy_changes_tokens(
    use_async: bool, references: References, run_once: RunOnce
) -> None:
    """However little moves: what moves is read."""
    case = policy_case(references[MODEL], use_async=use_async)
    outcome = run_once(f"policy-dropped-{use_async}", replace(case, fault=Fault.DROPPED_COPY))
    assert differs(outcome, references[MODEL], Fault.DROPPED_COPY)
