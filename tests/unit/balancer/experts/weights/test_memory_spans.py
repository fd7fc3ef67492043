"""Which bytes are claimed, and that no byte is claimed twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.weights.expert_weights import TensorName
from equipoise.balancer.experts.weights.memory_spans import MemorySpan, OwnedSpan, SpanIndex
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import RegistrationError
from equipoise.hal.slots import Segment

INTERVALS = st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(1, 6)).map(
    lambda interval: MemorySpan(interval[0], interval[1], interval[1] + interval[2])
)


def owned_span(span: MemorySpan, slot: int = 0) -> OwnedSpan:
    return OwnedSpan(span, TensorName("m", 0, "w"), slot)


def cells(span: MemorySpan) -> set[tuple[str, int]]:
    return {(span.device, byte) for byte in range(span.start, span.end)}


@given(st.lists(INTERVALS, max_size=8), INTERVALS)
def test_claims_cover_exactly_the_claimed_bytes(
    spans: list[MemorySpan], queried: MemorySpan
) -> None:
    index, owned_cells = SpanIndex(), set[tuple[str, int]]()
    indexed_spans = []
    for number, span in enumerate(spans):
        if cells(span) & owned_cells:
            with pytest.raises(RegistrationError, match=f"slot {number} shares memory with"):
                index.with_spans([owned_span(span, number)])
            continue
        index, owned_cells = index.with_spans([owned_span(span, number)]), owned_cells | cells(span)
        indexed_spans.append(span)
    assert index.bytes_covered(queried) == len(cells(queried) & owned_cells)
    overlapping_spans = [one.span for one in index.overlapping(queried)]
    assert overlapping_spans == sorted(
        (span for span in indexed_spans if cells(span) & cells(queried)),
        key=lambda span: span.start,
    )


@given(st.lists(INTERVALS, min_size=2, max_size=6))
def test_claims_refuse_overlap_within_one_call(spans: list[MemorySpan]) -> None:
    total = sum(span.nbytes for span in spans)
    if total == len(set().union(*map(cells, spans))):
        assert len(list(SpanIndex().with_spans(map(owned_span, spans)))) == len(spans)
        return
    with pytest.raises(RegistrationError, match="shares memory"):
        SpanIndex().with_spans(map(owned_span, spans))


def test_span_covers_first_to_last_byte_of_tensor() -> None:
    tensor = torch.zeros(4, 6)
    start = tensor.data_ptr()
    assert MemorySpan.of(tensor) == MemorySpan("cpu", start, start + 96)
    assert MemorySpan.of(tensor.t()) == MemorySpan.of(tensor)
    assert MemorySpan.of(tensor[1, 2]) == MemorySpan("cpu", start + 32, start + 36)
    assert MemorySpan.of(tensor[:, :2]) == MemorySpan("cpu", start, start + 80)
    assert MemorySpan.of(tensor[:0]).nbytes == 0


def test_span_of_private_segment_covers_whole_storage() -> None:
    storage_tensor = torch.zeros(6)
    start = storage_tensor.data_ptr()
    assert MemorySpan.of_segment(Segment("w", storage_tensor[:4])).nbytes == 16
    private_segment = Segment("w", storage_tensor[:4], SlotFormat.PRIVATE)
    assert MemorySpan.of_segment(private_segment) == MemorySpan("cpu", start, start + 24)
