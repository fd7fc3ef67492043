"""Real traces have the figures that were measured of them, where they are present."""

import os
from pathlib import Path

import numpy as np
import pytest

from equipoise.balancer.requests.traces import read_trace
from equipoise.balancer.requests.workload import Workload

pytestmark = pytest.mark.skipif(
    "EQUIPOISE_TRACES" not in os.environ, reason="EQUIPOISE_TRACES names no folder"
)
# Requests, span in seconds, and mean, p50, p95, max of prompts and of outputs.
Figures = tuple[int, int, tuple[float, int, int, int], tuple[float, int, int, int]]
PUBLISHED: dict[str, Figures] = {
    "AzureLLMInferenceTrace_conv.csv": (
        19366,
        3502,
        (1154.7, 1020, 4083, 14050),
        (211.1, 129, 451, 1000),
    ),
    "AzureLLMInferenceTrace_code.csv": (
        8819,
        3436,
        (2047.8, 1469, 7303, 7437),
        (27.9, 13, 90, 1899),
    ),
    "mooncake_conversation_trace.jsonl": (
        12031,
        3537,
        (12035, 6909, 39550, 126195),
        (343, 350, 698, 2000),
    ),
    "mooncake_synthetic_trace.jsonl": (
        3993,
        1022,
        (15325, 11587, 48904, 191378),
        (149, 69, 519, 893),
    ),
}


def trace(name: str) -> Workload:
    """Reads a published trace, or skips the test."""
    path = Path(os.environ["EQUIPOISE_TRACES"]) / name
    if not path.exists():
        pytest.skip(f"EQUIPOISE_TRACES has no {name}")
    return read_trace(path)


def area(workload: Workload) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """KV tokens that a request holds, summed over its steps: o (s + o / 2)."""
    return workload.outputs * (workload.prompts + workload.outputs / 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_trace_has_published_figures(name: str) -> None:
    count, span, prompts, outputs = PUBLISHED[name]
    summary = trace(name).summary()
    assert (summary.count, round(summary.span or 0)) == (count, span)
    for lengths, (mean, half, high, most) in (
        (summary.prompts, prompts),
        (summary.outputs, outputs),
    ):
        assert lengths.mean == pytest.approx(mean, rel=2e-3)
        # Percentiles are interpolated here, and were perhaps not where they were published.
        assert (lengths.p50, lengths.p95) == pytest.approx((half, high), abs=1)
        assert lengths.most == most


def test_azure_2023_conversations_have_published_figures() -> None:
    workload = trace("AzureLLMInferenceTrace_conv.csv")
    summary = workload.summary()
    assert summary.rate == pytest.approx(5.53, abs=0.005)
    assert summary.variation == pytest.approx(1.09, abs=0.005)
    assert summary.correlation == pytest.approx(-0.11, abs=0.005)
    token_area = area(workload)
    assert token_area.std() / token_area.mean() == pytest.approx(0.95, abs=0.005)
    assert workload.notes == ()


def test_mooncake_conversations_have_published_figures() -> None:
    workload = trace("mooncake_conversation_trace.jsonl")
    summary = workload.summary()
    assert summary.rate == pytest.approx(3.40, abs=0.005)
    assert summary.reuse == pytest.approx(0.366, abs=0.0005)
    token_area = np.sort(area(workload))
    assert token_area[-workload.count // 10 :].sum() / token_area.sum() == pytest.approx(
        0.51, abs=0.005
    )
    # Every block has its hash, and the last one too where it is not full.
    assert workload.hashes is not None
    assert np.array_equal(np.diff(workload.hashes[1]), -(-workload.prompts // 512))
    assert workload.notes == ()


def test_real_trace_take_limit_and_scale() -> None:
    workload = trace("mooncake_conversation_trace.jsonl")
    path = Path(os.environ["EQUIPOISE_TRACES"]) / "mooncake_conversation_trace.jsonl"
    assert read_trace(path, most=1000).same_requests(workload.first(1000))
    limited_workload = workload.with_prompt_limit(32768)
    dropped_count = workload.count - limited_workload.count
    assert limited_workload.notes == (
        f"{dropped_count} of 12031 requests had prompts over 32768: dropped",
    )
    assert limited_workload.scaled_to_rate(2.0).summary().rate == pytest.approx(2.0)
