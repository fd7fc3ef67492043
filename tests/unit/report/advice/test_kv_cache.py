"""The KV cache beside expert weights: its arithmetic, and a published pair of figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import FormatError
from equipoise.report.advice.hardware import Expert
from equipoise.report.advice.kv_cache import KvCache

SIZES = st.integers(0, 2**50)


@given(st.integers(1, 2**30), SIZES, SIZES, SIZES)
def test_kv_tokens_never_grow_with_expert_weights(
    per_token: int, memory: int, weights: int, more: int
) -> None:
    cache = KvCache(per_token, memory)
    tokens = cache.tokens(weights)
    assert 0 <= cache.tokens(weights + more) <= tokens
    assert (
        tokens == 0 or tokens * per_token + weights <= memory < (tokens + 1) * per_token + weights
    )


def test_weights_that_leave_no_kv_cache_are_refused_with_both_sizes() -> None:
    cache = KvCache(10, 2048)
    cache.check_room(2038)
    with pytest.raises(FormatError) as raised:
        cache.check_room(2039, "--memory")
    assert str(raised.value) == (
        "--memory: 2.0 KiB of a rank leave no KV cache beside its expert weights, 2.0 KiB"
    )


def test_two_redundant_slots_halve_the_kv_cache_as_measured_on_a100() -> None:
    """297 K tokens with 16 slots a rank, 149 K and 7.1 GB more weights with 18: OEPLB's A100 log.

    Qwen3-235B in BF16, TP8 and EP8: 94 layers, one of 4 KV heads of 128 on a rank.
    """
    expert = Expert.of_dimensions(4096, 1536, "bf16").size
    slot = 94 * expert
    assert 2 * slot == pytest.approx(7.1e9, rel=0.005)
    per_token = 94 * 2 * 1 * 128 * 2
    cache = KvCache(per_token, 297_000 * per_token + 16 * slot)
    assert cache.tokens(16 * slot) == 297_000
    assert cache.tokens(18 * slot) == pytest.approx(149_000, rel=0.01)
