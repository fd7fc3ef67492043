"""Our engine balances a real vLLM: tokens stay, experts move, and counters prove whose they are."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens, differs
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import Fault

RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
EAGER: Mapping[str, Any] = {
    "target": 0.0,
    "min_gain": 0.0,
    "timeout": 30.0,
}
"""Moves for whatever can be gained, so that there is much to go wrong."""
MODEL = "qwen3-moe"
EXPERTS = 8
"""Of a layer of that model."""


def balanced_case(reference: Reference, **settings: Any) -> Case:
    """Two ranks, two redundant experts, a rebalance every 8 steps; `eplb`."""
    return modes.ours(modes.balanced(reference), eplb={**EAGER, **settings})


def balanced_by_us(outcome: Outcome, rebalances: int = modes.REARRANGEMENTS) -> None:
    """Both ranks rebalanced and moved experts; vLLM's own EPLB did nothing."""
    first, second = outcome.of("equipoise")
    for rank in (first, second):
        assert rank["rebalances"] >= 1
        assert rank["rebalances"] + rank["unchanged_rebalances"] >= rebalances
        assert rank["moved_slots"] >= 1
        assert rank["routed_expert_batches"] >= 1
    assert first["moved_slots"] == second["moved_slots"]
    assert [process["counts"].get("rearrangements", 0) for process in outcome.of("watch")] in (
        [],
        [0, 0],
    )


def test_engine_keeps_tokens_and_moves_experts_with_default_settings(
    references: References, run_once: RunOnce
) -> None:
    """Shares are local then: each rank levels its own batch."""
    case = replace(balanced_case(references[MODEL]), asks=("equipoise_placement",))
    outcome = run_once("ours-default", case)
    check_tokens(outcome, references[MODEL])
    balanced_by_us(outcome)
    assert outcome.answers is not None
    first, second = outcome.answers["asked"]["equipoise_placement"]
    assert first == second
    assert any(sorted(set(row)) == list(range(8)) and row[8:] != [0, 1] for row in first)
    assert "engine=vllm0 rebalance=" in outcome.output


@pytest.mark.deep
@pytest.mark.parametrize("shares", ["static", "lagged", "node", "exact"])
def test_engine_keeps_tokens_with_other_share_modes(
    shares: str, references: References, run_once: RunOnce
) -> None:
    outcome = run_once(f"ours-{shares}", balanced_case(references[MODEL], shares=shares))
    check_tokens(outcome, references[MODEL])
    balanced_by_us(outcome)


@pytest.mark.deep
@pytest.mark.parametrize("model", [MODEL, "glm4-moe"])
def test_engine_keeps_tokens_while_layers_are_rewritten_in_place(
    model: str, references: References, run_once: RunOnce
) -> None:
    settings: dict[str, Any] = {"commit": "in_place", "layer_updates_per_iter": 1}
    outcome = run_once(f"ours-in-place-{model}", balanced_case(references[model], **settings))
    check_tokens(outcome, references[model])
    balanced_by_us(outcome)


@pytest.mark.deep
def test_engine_keeps_every_bit_of_bfloat16_experts_that_move(
    references: References, run_once: RunOnce
) -> None:
    """Tokens cannot show it: partial sums are rounded, and which there are goes by placement."""
    case = balanced_case(references[MODEL])
    outcome = run_once(
        "ours-bfloat16",
        replace(
            case,
            engine={**case.engine, "dtype": "bfloat16"},
            asks=("equipoise_placement", "expert_slot_digests"),
        ),
    )
    assert len(outcome.rounds) == modes.ROUNDS
    balanced_by_us(outcome)
    placement, other = outcome.rpc_results["equipoise_placement"]
    assert placement == other
    assert any(experts != [*range(EXPERTS), 0, 1] for experts in placement)
    ranks = outcome.rpc_results["expert_slot_digests"]
    for layer, experts in enumerate(placement):
        loaded, now = (
            [digest for rank in ranks for digest in rank[moment][layer]]
            for moment in ("loaded", "now")
        )
        assert len(set(loaded)) == EXPERTS
        assert loaded[EXPERTS:] == loaded[:2], "redundant slots repeat the first experts"
        assert now == [loaded[expert] for expert in experts]


@pytest.mark.deep
@pytest.mark.parametrize("model", ["qwen3-moe-16", "glm4-moe"])
def test_engine_keeps_tokens_with_16_experts_or_a_shared_expert(
    model: str, references: References, run_once: RunOnce
) -> None:
    outcome = run_once(f"ours-{model}", balanced_case(references[model]))
    check_tokens(outcome, references[model])
    balanced_by_us(outcome)


@pytest.mark.deep
def test_engine_keeps_tokens_behind_data_parallel_server(
    references: References, run_once: RunOnce
) -> None:
    case = modes.data_parallel_balanced(references[MODEL])
    outcome = run_once("ours-data-parallel", modes.ours(case, eplb=dict(EAGER)))
    check_tokens(outcome, references[MODEL])
    balanced_by_us(outcome)


@pytest.mark.deep
@pytest.mark.parametrize("fault", [Fault.OUR_DROPPED_COPY, Fault.OUR_OWN_PICKS])
def test_engine_planted_fault_changes_tokens(
    fault: Fault, references: References, run_once: RunOnce
) -> None:
    outcome = run_once(f"ours-{fault}", replace(balanced_case(references[MODEL]), fault=fault))
    assert differs(outcome, references[MODEL], fault)


@pytest.mark.deep
def test_vllm_without_settings_runs_no_equipoise_code(
    references: References, run_once: RunOnce
) -> None:
    case = replace(modes.balanced(references[MODEL]), asks=())
    outcome = run_once("eplb-async", case)
    assert outcome.of("equipoise") == []
    assert "equipoise: " not in outcome.output
