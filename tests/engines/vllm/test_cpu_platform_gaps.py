"""Every hole is needed: without it vLLM fails, or does not balance, as its docstring says."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_rearrangements, check_tokens, counts
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.missing_features import Hole

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
LAYERS = 4
FAILURES = {
    Hole.RECEIVE_BUFFER: "assert self.intermediate_tensors is not None",
    Hole.EXPERT_MAP: "died unexpectedly",
    Hole.EPLB_STATE: "EPLB requires expert_load_view != None",
    Hole.EPLB_STREAMS: "torch.accelerator.",
}
"""What vLLM prints before it ends. Without the other two of EPLB it serves on, unbalanced."""


@pytest.mark.parametrize("hole", FAILURES)
def test_vllm_run_fails_when_hole_is_unfilled(
    hole: Hole, references: References, run_once: RunOnce
) -> None:
    reference = references["qwen3-moe"]
    case = modes.pipeline(reference) if hole is Hole.RECEIVE_BUFFER else modes.balanced(reference)
    outcome = run_without(hole, case, run_once)
    with pytest.raises(AssertionError):
        judge(outcome, reference)
    assert FAILURES[hole] in outcome.output


def test_vllm_eplb_sees_no_load_without_filled_routing(
    references: References, run_once: RunOnce
) -> None:
    reference = references["qwen3-moe"]
    outcome = run_without(Hole.EPLB_ROUTING, modes.balanced(reference), run_once)
    check_tokens(outcome, reference)
    assert len(outcome.of("watch")) == 2
    for process in outcome.of("watch"):
        assert counts(process)["policy"] >= modes.REARRANGEMENTS - 1
        assert counts(process)["load"] == 0
        # Without load every plan is the same: each layer moves once, in the first rearrangement.
        assert counts(process)["map_changes"] <= LAYERS


def test_vllm_does_not_balance_without_filled_eplb_switch(
    references: References, run_once: RunOnce
) -> None:
    reference = references["qwen3-moe"]
    outcome = run_without(Hole.EPLB_SWITCH, modes.balanced(reference), run_once)
    check_tokens(outcome, reference)
    assert outcome.of("watch") == [], "EPLB was on"


def run_without(hole: Hole, case: Case, run_once: RunOnce) -> Outcome:
    return run_once(f"without-{hole}", replace(case, holes=case.holes - {hole}))


def judge(outcome: Outcome, reference: Reference) -> None:
    """As experts that move are judged; a pipeline does not come so far."""
    check_tokens(outcome, reference)
    check_rearrangements(outcome, LAYERS)


def test_vllm_sends_no_async_handles_without_filled_collectives(
    references: References, run_once: RunOnce
) -> None:
    case = modes.pipeline(references["qwen3-moe"])
    outcome = run_once("without-gloo", replace(case, holes=case.holes - {Hole.COLLECTIVES}))
    handles = [process["counts"].get("sent_handles", 0) for process in outcome.of("watch")]
    assert handles == [0, 0]
