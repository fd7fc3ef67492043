"""Our channel behind vLLM's pipeline: two stages say the reference, one message a step."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens, differs
from engines.vllm.runs.prompts import PROMPTS, TOKENS
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import Fault

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
MODEL = "qwen3-moe"
ALL_AT_ONCE = 8


def pipeline(reference: Reference, sequences: int = ALL_AT_ONCE) -> Case:
    """Two stages, with our hand-over."""
    return modes.ours(modes.pipeline(reference, sequences), pp_transport={"timeout": 30.0})


def handed_over(outcome: Outcome, sequences: int) -> None:
    """Every step was one message of ours, and none was vLLM's."""
    steps = len(outcome.rounds) * -(-len(PROMPTS) // sequences) * TOKENS
    first, last = outcome.of("equipoise")
    assert (first["sent_messages"], first["received_messages"]) == (steps, 0)
    assert (last["sent_messages"], last["received_messages"]) == (0, steps)
    assert outcome.of("watch") == []


def test_pipeline_handover_keeps_tokens_with_one_message_per_step(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("pp_transport", pipeline(references[MODEL]))
    check_tokens(outcome, references[MODEL])
    handed_over(outcome, ALL_AT_ONCE)


def test_pipeline_handover_keeps_tokens_with_two_micro_batches(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("handover-two", pipeline(references[MODEL], modes.TWO_BATCHES))
    check_tokens(outcome, references[MODEL])
    handed_over(outcome, modes.TWO_BATCHES)


def test_pipeline_handover_keeps_tokens_with_sliced_tensor_parallel(
    references: References, run_once: RunOnce
) -> None:
    case = pipeline(references[MODEL])
    case = replace(case, engine={**case.engine, **modes.SHARED_STAGE})
    outcome = run_once("handover-shared", case)
    check_tokens(outcome, references[MODEL])
    steps = len(outcome.rounds) * TOKENS
    message_counts = [
        (each["sent_messages"], each["received_messages"]) for each in outcome.of("equipoise")
    ]
    assert message_counts == [(steps, 0)] * 2 + [(0, steps)] * 2


def test_pipeline_handover_skipped_wait_changes_tokens(
    references: References, run_once: RunOnce
) -> None:
    case = replace(pipeline(references[MODEL]), fault=Fault.OUR_SKIPPED_WAIT)
    outcome = run_once("handover-unwaited", case)
    assert differs(outcome, references[MODEL], Fault.OUR_SKIPPED_WAIT)


@pytest.mark.parametrize("model", ["qwen3"])
def test_pipeline_handover_keeps_tokens_of_dense_model(
    model: str, references: References, run_once: RunOnce
) -> None:
    outcome = run_once(f"handover-{model}", pipeline(references[model]))
    check_tokens(outcome, references[model])
    handed_over(outcome, ALL_AT_ONCE)
