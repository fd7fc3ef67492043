"""vLLM's second model runner, which GPUs have: the same tokens, the same proofs.

It calls the balancer by other code than the first, steps it on every stage of a pipeline, and
computes positions, batches and samples in kernels of Triton, which are interpreted here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens, differs
from engines.vllm.runs.prompts import PROMPTS, TOKENS
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
MODEL = "qwen3-moe"
STAGES = {"pipeline_parallel_size": 2}
RUNNER_LOG_LINE = "Using V2 Model Runner"


def balanced_case(reference: Reference, **engine: Any) -> Case:
    """Two ranks a stage, two redundant experts, a rebalance every 8 steps; `eplb`."""
    case = modes.ours(modes.balanced(reference), eplb=dict(EAGER))
    return modes.on_second_runner(replace(case, engine={**case.engine, **engine}))


def says_by_the_second(outcome: Outcome, reference: Reference) -> None:
    check_tokens(outcome, reference)
    assert RUNNER_LOG_LINE in outcome.output


def check_rebalances(outcome: Outcome) -> None:
    """Every rank rebalanced; the ranks of one stage moved the same slots."""
    ranks = outcome.of("equipoise")
    rebalance_counts = [rank["rebalances"] + rank["unchanged_rebalances"] for rank in ranks]
    assert min(rebalance_counts) >= modes.rearrangements(len(outcome.rounds))
    assert min(rank["rebalances"] for rank in ranks) >= 1
    assert min(rank["routed_expert_batches"] for rank in ranks) >= 1
    moves = [rank["moved_slots"] for rank in sorted(ranks, key=lambda rank: rank["rank"])]
    assert min(moves) >= 1
    assert moves[0::2] == moves[1::2]
    rearranged = [process["counts"].get("rearrangements", 0) for process in outcome.of("watch")]
    assert not any(rearranged)


@pytest.mark.deep
def test_v2_runner_engine_keeps_tokens(references: References, run_once: RunOnce) -> None:
    outcome = run_once("second-engine", balanced_case(references[MODEL]))
    says_by_the_second(outcome, references[MODEL])
    check_rebalances(outcome)


def test_v2_runner_balances_each_stage_and_hands_over(
    references: References, run_once: RunOnce
) -> None:
    """On every commit, so with fewer rounds: one start for the engine and for the hand-over."""
    case = balanced_case(references[MODEL], **STAGES)
    parts = {**(case.plugin or {}), "pp_transport": {"timeout": 30.0}}
    case = replace(case, plugin=parts, rounds=3)
    outcome = run_once("second-stages", case)
    says_by_the_second(outcome, references[MODEL])
    check_rebalances(outcome)
    steps = len(outcome.rounds) * TOKENS
    ranks = sorted(outcome.of("equipoise"), key=lambda rank: rank["rank"])
    assert [rank["sent_messages"] for rank in ranks] == [steps, steps, 0, 0]
    assert [rank["received_messages"] for rank in ranks] == [0, 0, steps, steps]


@pytest.mark.deep
def test_v2_runner_handover_keeps_tokens_with_two_micro_batches(
    references: References, run_once: RunOnce
) -> None:
    case = modes.pipeline(references[MODEL], modes.TWO_BATCHES)
    case = modes.on_second_runner(modes.ours(case, pp_transport={"timeout": 30.0}))
    outcome = run_once("second-handover", case)
    says_by_the_second(outcome, references[MODEL])
    steps = len(outcome.rounds) * -(-len(PROMPTS) // modes.TWO_BATCHES) * TOKENS
    first, last = outcome.of("equipoise")
    assert (first["sent_messages"], last["received_messages"]) == (steps, steps)


@pytest.mark.deep
def test_v2_runner_engine_keeps_tokens_behind_data_parallel_server(
    references: References, run_once: RunOnce
) -> None:
    case = modes.ours(modes.data_parallel_balanced(references[MODEL]), eplb=dict(EAGER))
    outcome = run_once("second-data-parallel", modes.on_second_runner(case))
    says_by_the_second(outcome, references[MODEL])
    check_rebalances(outcome)


@pytest.mark.deep
@pytest.mark.parametrize("fault", [Fault.OUR_DROPPED_COPY, Fault.OUR_OWN_PICKS])
def test_v2_runner_planted_fault_changes_tokens(
    fault: Fault, references: References, run_once: RunOnce
) -> None:
    outcome = run_once(f"second-{fault}", replace(balanced_case(references[MODEL]), fault=fault))
    assert differs(outcome, references[MODEL], fault)


@pytest.mark.deep
def test_v2_runner_fails_without_triton_stand_in(references: References, run_once: RunOnce) -> None:
    case = modes.on_second_runner(modes.single(references[MODEL]))
    outcome = run_once("second-without-triton", replace(case, holes=frozenset()))
    with pytest.raises(AssertionError):
        check_tokens(outcome, references[MODEL])
