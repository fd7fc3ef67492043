"""Every hole is one: unfilled, vLLM fails as its docstring says, so none is filled for nothing."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import rearranged, says
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.missing_features import Hole

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
LAYERS = 4
SAID = {
    Hole.RECEIVE_BUFFER: "assert self.intermediate_tensors is not None",
    Hole.EXPERT_MAP: "died unexpectedly",
    Hole.EPLB_STATE: "EPLB requires expert_load_view != None",
    Hole.EPLB_STREAMS: "torch.accelerator.",
    Hole.EPLB_ROUTING: "",
    Hole.EPLB_SWITCH: "",
}
"""What vLLM then says. Nothing where it goes on, and its load stays zero or EPLB off."""


@pytest.mark.parametrize("hole", SAID)
def test_vllm_run_fails_its_checks_when_hole_is_unfilled(
    hole: Hole, references: References, run_once: RunOnce
) -> None:
    reference = references["qwen3-moe"]
    staged = hole is Hole.RECEIVE_BUFFER
    whole = modes.pipeline(reference) if staged else modes.balanced(reference)
    outcome = run_once(f"without-{hole}", replace(whole, holes=whole.holes - {hole}))
    with pytest.raises(AssertionError):
        judge(outcome, reference)
    assert SAID[hole] in outcome.said


def judge(outcome: Outcome, reference: Reference) -> None:
    """As experts that move are judged; a pipeline does not come so far."""
    says(outcome, reference)
    rearranged(outcome, LAYERS)


def test_vllm_sends_no_async_handles_without_filled_collectives(
    references: References, run_once: RunOnce
) -> None:
    case = modes.pipeline(references["qwen3-moe"])
    outcome = run_once("without-gloo", replace(case, holes=case.holes - {Hole.COLLECTIVES}))
    handles = [process["counts"].get("sent_handles", 0) for process in outcome.of("watch")]
    assert handles == [0, 0]
