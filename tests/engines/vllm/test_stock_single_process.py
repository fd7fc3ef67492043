"""One process of a stock vLLM says what transformers says: the harness and the models are right."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens
from engines.vllm.runs.prompts import PROMPTS, TOKENS
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome

RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
OTHERS = ("qwen3-moe-16", "qwen2-moe", "glm4-moe", "qwen3")


def test_reference_tokens_have_clear_margin_and_vary(references: References) -> None:
    for name, reference in references.items():
        assert reference.margin > 1e-3, name
        assert [len(tokens) for tokens in reference.tokens] == [TOKENS] * len(PROMPTS)
        assert min(len(set(tokens)) for tokens in reference.tokens) > TOKENS // 3, name


@pytest.mark.deep
def test_stock_vllm_single_process_matches_reference(
    references: References, run_once: RunOnce
) -> None:
    case = replace(modes.single(references["qwen3-moe"]), asks=("check_health",))
    outcome = run_once("single", case)
    check_tokens(outcome, references["qwen3-moe"])
    assert outcome.rpc_results == {"check_health": [None]}
    assert outcome.of("watch") == [], "a stock vLLM of one process neither sends nor balances"


@pytest.mark.deep
@pytest.mark.parametrize("model", OTHERS)
def test_stock_vllm_matches_reference_of_every_model(
    model: str, references: References, run_once: RunOnce
) -> None:
    check_tokens(run_once(f"single-{model}", modes.single(references[model])), references[model])
