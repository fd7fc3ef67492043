"""Two data-parallel ranks behind the OpenAI server say the reference to streaming clients."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_rearrangements, check_tokens
from engines.vllm.runs.prompts import PROMPTS
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
SERVED = re.compile(r'^vllm:request_success_total\{engine="(\d)",.*\} (\d+)\.0$', re.MULTILINE)


def served(outcome: Outcome) -> list[int]:
    """Requests by rank, as the server counts them."""
    requests_by_rank = [0, 0]
    for rank, requests in SERVED.findall(outcome.metrics):
        requests_by_rank[int(rank)] += int(requests)
    return requests_by_rank


def test_data_parallel_server_keeps_reference_tokens(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("replicas", modes.data_parallel(references["qwen3"]))
    check_tokens(outcome, references["qwen3"])
    assert sum(served(outcome)) == len(outcome.rounds) * len(PROMPTS)
    assert min(served(outcome)) > 0


def test_data_parallel_rank_header_selects_rank(references: References, run_once: RunOnce) -> None:
    case = replace(modes.data_parallel(references["qwen3"]), pins=(0, 1, 0, 0, 0, 1))
    outcome = run_once("pinned", case)
    check_tokens(outcome, references["qwen3"])
    assert served(outcome) == [4 * case.rounds, 2 * case.rounds]


def test_data_parallel_async_eplb_keeps_tokens(references: References, run_once: RunOnce) -> None:
    outcome = run_once("replicas-eplb", modes.data_parallel_balanced(references["qwen3-moe"]))
    check_tokens(outcome, references["qwen3-moe"])
    check_rearrangements(outcome, 4)
    assert min(served(outcome)) > 0
