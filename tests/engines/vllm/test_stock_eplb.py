"""Two ranks with half of the experts each say the reference, while experts move between them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_rearrangements, check_tokens, counts, differs
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import Fault

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
LAYERS = 4


def test_stock_async_eplb_keeps_tokens(references: References, run_once: RunOnce) -> None:
    outcome = run_once("eplb-async", modes.balanced(references["qwen3-moe"]))
    check_tokens(outcome, references["qwen3-moe"])
    check_rearrangements(outcome, LAYERS)
    assert all(counts(process)["load"] > 0 for process in outcome.of("watch"))


def test_stock_sync_eplb_keeps_tokens(references: References, run_once: RunOnce) -> None:
    outcome = run_once("eplb-sync", modes.balanced(references["qwen3-moe"], use_async=False))
    check_tokens(outcome, references["qwen3-moe"])
    check_rearrangements(outcome, 0)


def test_stock_eplb_keeps_tokens_with_16_experts(references: References, run_once: RunOnce) -> None:
    outcome = run_once("eplb-16", modes.balanced(references["qwen3-moe-16"]))
    check_tokens(outcome, references["qwen3-moe-16"])
    check_rearrangements(outcome, LAYERS)


@pytest.mark.parametrize("model", ["qwen3-moe", "qwen2-moe"])
def test_expert_parallel_without_eplb_keeps_tokens(
    model: str, references: References, run_once: RunOnce
) -> None:
    # vLLM does not balance qwen2-moe, which has a shared expert beside the others.
    outcome = run_once(f"experts-{model}", modes.expert_parallel(references[model]))
    check_tokens(outcome, references[model])
    assert outcome.of("watch") == [], "nothing rearranges"


@pytest.mark.parametrize("use_async", [True, False])
def test_stock_eplb_dropped_copy_changes_tokens(
    use_async: bool, references: References, run_once: RunOnce
) -> None:
    case = modes.balanced(references["qwen3-moe"], use_async=use_async)
    outcome = run_once(f"dropped-{use_async}", replace(case, fault=Fault.DROPPED_COPY))
    assert differs(outcome, references["qwen3-moe"], Fault.DROPPED_COPY)
    first, second = outcome.of("watch")
    assert first["maps"] == second["maps"], "the maps do not tell"
    assert counts(first)["rearrangements"] >= modes.REARRANGEMENTS
