"""Where weights lie in a pool: apart, aligned, and the same for everybody."""

import itertools
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.host_pool.layout import PoolContents, PoolLayout
from equipoise.balancer.experts.transfer.copy_threads import CACHE_LINE
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import ExpertPoolError, Unsupported
from equipoise.hal.slots import SegmentType

DTYPES = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool)
SEGMENTS = st.builds(
    SegmentType,
    st.sampled_from(("w13", "w2", "scale")),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
)
LAYOUTS = st.builds(
    PoolLayout,
    st.lists(SEGMENTS, min_size=1, max_size=4).map(tuple),
    st.integers(1, 3),
    st.integers(1, 4),
)


@given(LAYOUTS)
def test_pool_layout_parts_are_disjoint_aligned_and_in_bounds(layout: PoolLayout) -> None:
    count = layout.layers * layout.experts
    ranges = [(layout.checksums_offset, layout.checksums_offset + 8 * count)]
    for layer in range(layout.layers):
        for expert in range(layout.experts):
            expert_start = layout.expert_offset(layer, expert)
            assert expert_start % mmap.PAGESIZE == 0
            for segment, offset in zip(layout.descriptor, layout.offsets, strict=True):
                assert offset % CACHE_LINE == 0
                ranges.append((expert_start + offset, expert_start + offset + segment.nbytes))
            assert ranges[-1][1] <= expert_start + layout.stride
    ranges = sorted(span for span in ranges if span[0] < span[1])
    assert ranges[0][0] >= mmap.PAGESIZE
    assert ranges[-1][1] <= layout.nbytes
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


@given(LAYOUTS, st.data())
def test_pool_view_covers_exactly_the_bytes_of_its_expert(
    layout: PoolLayout, choice: st.DataObject
) -> None:
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layer = choice.draw(st.integers(0, layout.layers - 1))
    expert = choice.draw(st.integers(0, layout.experts - 1))
    view = PoolContents(layout, data).view(layer, expert)
    assert [(tuple(v.shape), v.dtype) for v in view] == [
        (segment.shape, segment.dtype) for segment in layout.descriptor
    ]
    for part in view:
        part.reshape(-1).view(torch.uint8).fill_(1)
    expert_start = layout.expert_offset(layer, expert)
    expert_nbytes = sum(segment.nbytes for segment in layout.descriptor)
    assert (
        int(data[expert_start : expert_start + layout.stride].sum())
        == int(data.sum())
        == expert_nbytes
    )


@given(LAYOUTS, LAYOUTS)
def test_pool_layout_digests_are_equal_only_for_equal_layouts(a: PoolLayout, b: PoolLayout) -> None:
    assert (a.digest == b.digest) == (a == b)
    again = PoolLayout(a.descriptor, a.layers, a.experts)
    assert again.digest == a.digest


ONE = (SegmentType("w", (2, 2), torch.uint8),)


@pytest.mark.parametrize(
    ("descriptor", "layers", "experts"), [(ONE, 0, 1), (ONE, 1, 0), ((), 1, 1)]
)
def test_pool_layout_refuses_empty_pool(
    descriptor: tuple[SegmentType, ...], layers: int, experts: int
) -> None:
    with pytest.raises(ExpertPoolError, match="no pool of"):
        PoolLayout(descriptor, layers, experts)


def test_pool_layout_refuses_private_format() -> None:
    private_segment = SegmentType("w", (2, 2), torch.uint8, SlotFormat.PRIVATE, 60)
    with pytest.raises(Unsupported, match="'w': no private format"):
        PoolLayout((private_segment,), 1, 1)


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (0, -1), (2, 0), (0, 3)])
def test_pool_layout_names_expert_out_of_range(layer: int, expert: int) -> None:
    with pytest.raises(ExpertPoolError, match=f"no expert {expert} of layer {layer}"):
        PoolLayout(ONE, 2, 3).expert_offset(layer, expert)
