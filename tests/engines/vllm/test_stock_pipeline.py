"""Two stages of a pipeline say the reference, over the path that other devices take."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens, counts, differs
from engines.vllm.runs.prompts import PROMPTS, TOKENS
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import Fault

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
TENSORS = 2
"""Hidden states and the residual; beside them travels what describes them."""


@pytest.mark.parametrize("sequences", [8, modes.TWO_BATCHES])
def test_stock_pipeline_keeps_tokens_over_async_sends(
    sequences: int, references: References, run_once: RunOnce
) -> None:
    outcome = run_once(f"pipeline-{sequences}", modes.pipeline(references["qwen3-moe"], sequences))
    check_tokens(outcome, references["qwen3-moe"])
    first, last = (counts(process) for process in outcome.of("watch"))
    batches = -(-len(PROMPTS) // sequences)
    steps = len(outcome.rounds) * batches * TOKENS
    assert first == {"sent": steps, "sent_handles": steps * (TENSORS + 1)}
    assert last == {"received": steps, "received_handles": steps * TENSORS}


@pytest.mark.parametrize("sequences", [8, modes.TWO_BATCHES])
def test_stock_pipeline_skipped_wait_changes_tokens(
    sequences: int, references: References, run_once: RunOnce
) -> None:
    case = modes.pipeline(references["qwen3-moe"], sequences)
    outcome = run_once(f"unwaited-{sequences}", replace(case, fault=Fault.SKIPPED_WAIT))
    assert differs(outcome, references["qwen3-moe"], Fault.SKIPPED_WAIT)
