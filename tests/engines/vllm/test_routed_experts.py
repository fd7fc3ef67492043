"""Routed experts that a real vLLM returns are read: in the process, and from the server's JSON."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import RESPONSES_FILE, ROUTED_FOLDER, Case
from engines.vllm.runs.outcome_checks import check_tokens
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import run

from equipoise.balancer.formats import RoutedTokens, RoutingTrace, TraceUnit, read_trace

pytestmark = pytest.mark.deep
References = Mapping[str, Reference]
LAYERS, EXPERTS, TOP_K = 4, 8, 2


def returning(case: Case) -> Case:
    """The case with routed experts returned, which only the second runner does."""
    engine = {
        **case.engine,
        "enable_return_routed_experts": True,
        "enable_prefix_caching": True,  # it asks for that
    }
    return modes.on_second_runner(replace(case, engine=engine, rounds=1))


def requests(trace: object, reference: Reference, layers: tuple[int, ...]) -> list[RoutedTokens]:
    """The parts of a trace of all prompts, checked against what was asked."""
    assert isinstance(trace, RoutingTrace)
    assert (trace.unit, trace.layers, trace.top_k) == (TraceUnit.REQUEST, layers, TOP_K)
    assert 1 < trace.experts <= EXPERTS
    parts = list(trace.parts())
    # The last token was sampled, and nothing ran it.
    lengths = [
        len(prompt) + len(tokens) - 1
        for prompt, tokens in zip(reference.prompts, reference.tokens, strict=True)
    ]
    assert [len(part.ids) for part in parts] == lengths
    return parts


@pytest.mark.parametrize("model", ["qwen3-moe", "glm4-moe"])
def test_read_trace_reads_arrays_that_vllm_returned(
    model: str, references: References, tmp_path: Path
) -> None:
    reference = references[model]
    check_tokens(run(returning(modes.single(reference)), tmp_path), reference)
    # The first layer of GLM's is dense.
    layers = tuple(range(1 if model == "glm4-moe" else 0, LAYERS))
    parts = requests(read_trace(tmp_path / ROUTED_FOLDER), reference, layers)
    array = np.load(tmp_path / ROUTED_FOLDER / "0.npy")
    assert array.dtype == np.uint8
    assert array.shape[1:] == (LAYERS, TOP_K)
    assert np.array_equal(parts[0].ids, array[:, list(layers)])


def test_read_trace_reads_responses_of_vllm_server(references: References, tmp_path: Path) -> None:
    reference = references["qwen3-moe"]
    case = returning(replace(modes.single(reference), front="server"))
    check_tokens(run(case, tmp_path), reference)
    trace = read_trace(tmp_path / RESPONSES_FILE)
    parts = requests(trace, reference, tuple(range(LAYERS)))
    assert [part.prompt_tokens for part in parts] == [len(ids) for ids in reference.prompts]
