"""Two ranks with half of the experts each say the reference, while experts move between them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.expected import Reference
from engines.vllm.runs.judging import counts, differs, rearranged, says
from engines.vllm.runs.run import Outcome
from vllm_cpu.faults import Fault

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
LAYERS = 4


def test_experts_that_move_beside_the_forward_change_no_token(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("eplb-async", modes.balanced(references["qwen3-moe"]))
    says(outcome, references["qwen3-moe"])
    rearranged(outcome, LAYERS)


def test_experts_that_move_between_two_steps_change_no_token(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("eplb-sync", modes.balanced(references["qwen3-moe"], use_async=False))
    says(outcome, references["qwen3-moe"])
    rearranged(outcome, 0)


def test_more_experts_for_each_token_change_none_either(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("eplb-16", modes.balanced(references["qwen3-moe-16"]))
    says(outcome, references["qwen3-moe-16"])
    rearranged(outcome, LAYERS)


@pytest.mark.parametrize("model", ["qwen3-moe", "qwen2-moe"])
def test_experts_that_stay_where_they_are_change_no_token(
    model: str, references: References, run_once: RunOnce
) -> None:
    # vLLM does not balance qwen2-moe, which has a shared expert beside the others.
    outcome = run_once(f"experts-{model}", modes.expert_parallel(references[model]))
    says(outcome, references[model])
    assert outcome.of("watch") == [], "nothing rearranges"


@pytest.mark.parametrize("use_async", [True, False])
def test_a_dropped_copy_is_noticed(
    use_async: bool, references: References, run_once: RunOnce
) -> None:
    case = modes.balanced(references["qwen3-moe"], use_async=use_async)
    outcome = run_once(f"dropped-{use_async}", replace(case, fault=Fault.DROPPED_COPY))
    assert differs(outcome, references["qwen3-moe"], Fault.DROPPED_COPY)
    first, second = outcome.of("watch")
    assert first["maps"] == second["maps"], "the maps do not tell"
    assert counts(first)["rearrangements"] >= modes.REARRANGEMENTS
