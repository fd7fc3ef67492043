"""Constructor checks of segments, layouts and rounds (clauses A6, A1, X1)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.errors import SlotError
from equipoise.hal.slots import Segment, SegmentType, SlotLayout

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
BLOB = torch.zeros(1, dtype=torch.uint8)


@given(SHAPES, st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
def test_segment_type_counts_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    data = torch.zeros(shape, dtype=dtype)
    assert Segment("w", data).type.nbytes == data.numel() * data.element_size()
    assert Segment("w", data).type == SegmentType("w", shape, dtype)


def test_segment_refuses_strided_tensor() -> None:
    with pytest.raises(SlotError, match=r"'gate' of shape \(3, 2\) is strided"):
        Segment("gate", torch.zeros(2, 3).t())


def test_segment_offset_is_free_except_for_private_format() -> None:
    storage = torch.zeros(4, 3)
    assert Segment("w", storage[2]).data.storage_offset() == 6
    Segment("w", storage[0], SlotFormat.PRIVATE)
    with pytest.raises(SlotError, match="needs storage offset 0"):
        Segment("w", storage[2], SlotFormat.PRIVATE)


@given(SHAPES, st.integers(0, 9))
def test_private_segment_covers_its_whole_storage(shape: tuple[int, ...], padding: int) -> None:
    count = math.prod(shape)
    whole = torch.arange(count + padding, dtype=torch.int16)
    segment = Segment("w", whole[:count].view(shape), SlotFormat.PRIVATE)
    expected_type = SegmentType("w", shape, torch.int16, SlotFormat.PRIVATE, padding=2 * padding)
    assert (segment.type, expected_type.nbytes) == (expected_type, whole.nbytes)
    assert torch.equal(segment.bytes, whole.view(torch.uint8))
    assert Segment("w", segment.data).type.padding == 0
    assert torch.equal(Segment("w", segment.data).bytes, whole[:count].view(torch.uint8))


def test_segment_bytes_alias_tensor_memory() -> None:
    storage = torch.zeros(4, 3)
    Segment("w", storage[2]).bytes.fill_(1)
    assert storage.view(torch.uint8).sum(1).tolist() == [0, 0, 12, 0]
    Segment("w", storage[0], SlotFormat.PRIVATE).bytes.fill_(2)
    assert set(storage.view(torch.uint8).flatten().tolist()) == {2}


def test_slot_layout_refuses_no_slots() -> None:
    with pytest.raises(SlotError, match="at least one slot"):
        SlotLayout((), 1)


@pytest.mark.parametrize(
    "other",
    [
        Segment("w", torch.zeros(3)),
        Segment("v", torch.zeros(2)),
        Segment("w", torch.zeros(2, dtype=torch.int32)),
        Segment("w", torch.zeros(2), SlotFormat.PRIVATE),
    ],
    ids=["shape", "name", "dtype", "format"],
)
def test_slot_layout_refuses_different_descriptors(other: Segment) -> None:
    with pytest.raises(SlotError, match="slot 1 is"):
        SlotLayout(((Segment("w", torch.zeros(2)),), (other,)), 1)


def test_slot_layout_refuses_private_slots_of_different_size() -> None:
    slots = [(Segment("w", torch.zeros(n)[:2], SlotFormat.PRIVATE),) for n in (2, 3)]
    with pytest.raises(SlotError, match="slot 1 is"):
        SlotLayout(tuple(slots), 1)


def test_slot_layout_refuses_different_segment_counts() -> None:
    one = Segment("w", torch.zeros(2))
    with pytest.raises(SlotError, match="slot 1 is"):
        SlotLayout(((one,), (one, one)), 1)


def test_slot_bytes_are_sum_of_segments() -> None:
    slot = (Segment("a", torch.zeros(3)), Segment("b", torch.zeros(5, dtype=torch.bfloat16)))
    assert SlotLayout((slot, slot), 0).slot_bytes == 22


@given(st.lists(st.integers(0, 5), max_size=8))
def test_exchange_refuses_two_blobs_per_peer_and_direction(peers: list[int]) -> None:
    buffers = tuple(PeerBuffer(peer, BLOB) for peer in peers)
    if len(set(peers)) == len(peers):
        assert Exchange(sends=buffers, receives=buffers).sends == buffers
        return
    with pytest.raises(ValueError, match="more than one blob"):
        Exchange(sends=buffers, receives=())
    with pytest.raises(ValueError, match="more than one blob"):
        Exchange(sends=(), receives=buffers)
