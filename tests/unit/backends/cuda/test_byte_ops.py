"""Copies of bytes in few launches: clauses A4, A5, S4. The copies themselves are torch's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.backends.cuda import byte_ops
from equipoise.backends.cuda.byte_ops import COPY_CHUNK, CudaByteOps, _by_width
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import Unsupported
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Role, Stream

ROOM = 400


class Calls(TorchDispatchMode):
    """Which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def fingerprint(parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
    out[0] = as_int64(checksum(torch.cat(list(parts))))


BYTE_OPS = CudaByteOps(fingerprint)
STREAM = CPU.open(0).stream(Role.COMPUTE)


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Places that do not overlap, with a source for each: (to, from, bytes)."""
    ranges, to = [], 0
    for _ in range(draw(st.integers(0, 6))):
        to += draw(st.integers(0, 9))
        size = draw(st.integers(0, 40))
        if to + size > ROOM:
            break
        ranges.append((to, draw(st.integers(0, ROOM - size)), size))
        to += size
    return ranges


@given(cuts(), st.booleans())
def test_copy_writes_only_its_target_bytes(
    pairs: list[tuple[int, int, int]], as_words: bool
) -> None:
    source = torch.arange(ROOM, dtype=torch.int32).to(torch.uint8)
    view = BYTE_OPS.words if as_words else Tensor.detach
    out, expected = (torch.full((ROOM,), 99, dtype=torch.uint8) for _ in range(2))
    for to, begin, size in pairs:
        expected[to : to + size] = source[begin : begin + size]
    BYTE_OPS.copy(
        [(view(out[to : to + size]), view(source[at : at + size])) for to, at, size in pairs]
    )
    assert out.tolist() == expected.tolist()


def test_copy_batch_takes_one_launch_per_width() -> None:
    """Slots of several segments, some of them odd."""
    to, source = torch.zeros(64, 24, dtype=torch.uint8), torch.ones(64, 24, dtype=torch.uint8)
    even_pairs = [(a[:16], b[:16]) for a, b in zip(to, source, strict=True)]
    odd_pairs = [(a[16:19], b[16:19]) for a, b in zip(to, source, strict=True)]
    widths = [[pair[0].dtype for pair in group] for group in _by_width([*even_pairs, *odd_pairs])]
    assert widths == [[torch.int32] * 64, [torch.uint8] * 64]
    with Calls() as calls:
        BYTE_OPS.copy([*even_pairs, *odd_pairs])
    assert calls.names.count("_foreach_copy_") == 2
    assert "copy_" not in calls.names
    assert to.sum(1).tolist() == [19] * 64


def test_copy_takes_words_as_they_are() -> None:
    to, source = torch.zeros(2, 24, dtype=torch.uint8), torch.ones(2, 24, dtype=torch.uint8)
    pairs = [(BYTE_OPS.words(a), BYTE_OPS.words(b)) for a, b in zip(to, source, strict=True)]
    with Calls() as calls:
        BYTE_OPS.copy(pairs)
    assert calls.names == ["_foreach_copy_"]
    assert to.sum() == 48


@pytest.mark.parametrize(
    ("size", "offset", "width"),
    [
        (16, 0, torch.int32),
        (20, 0, torch.int32),
        (16, 4, torch.int32),
        (22, 8, torch.int16),
        (16, 2, torch.int16),
        (19, 0, torch.uint8),
        (16, 1, torch.uint8),
    ],
)
def test_copy_uses_widest_words_that_size_and_address_allow(
    size: int, offset: int, width: torch.dtype
) -> None:
    to, source = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    pair = to[offset : offset + size], source[:size]
    ((views,),) = _by_width([pair])
    assert (views[0].dtype, views[1].dtype) == (width, width)
    BYTE_OPS.copy([pair])
    assert int(to.sum()) == size == int(to[offset : offset + size].sum())


def test_copy_to_same_target_keeps_order() -> None:
    out, first, second = (torch.full((8,), n, dtype=torch.uint8) for n in range(3))
    BYTE_OPS.copy([(out, first), (out, second)])
    assert out.tolist() == [2] * 8


def test_copy_ignores_empty_pieces() -> None:
    out = torch.zeros(8, dtype=torch.uint8)
    nothing = out[:0]
    with Calls() as calls:
        BYTE_OPS.copy([(nothing, nothing), (nothing, nothing), (out, torch.ones_like(out))])
    assert "copy_" not in calls.names
    assert out.tolist() == [1] * 8


def test_copy_from_other_device_is_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors stand for another device: nothing is copied, everything is asked for."""
    chunk_sizes: list[int] = []
    monkeypatch.setattr(byte_ops, "copy", lambda to, source: chunk_sizes.append(to.numel()))
    size = 2 * COPY_CHUNK + 5
    to = torch.empty(size, dtype=torch.uint8, device="meta")
    BYTE_OPS.copy([(to, torch.empty(size, dtype=torch.uint8))])
    assert chunk_sizes == [COPY_CHUNK, COPY_CHUNK, 5]


def test_checksum_parts_cover_concatenated_parts() -> None:
    parts = [torch.arange(n, dtype=torch.uint8) for n in (3, 5, 1)]
    out = torch.zeros(2, dtype=torch.int64)
    received: list[Sequence[Tensor]] = []

    def recording(parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        received.append(parts)

    CudaByteOps(recording).checksum_parts(parts, out[0], STREAM)
    assert [part.data_ptr() for part in received[0]] == [part.data_ptr() for part in parts]
    BYTE_OPS.checksum_parts(parts, out[0], STREAM)
    BYTE_OPS.checksum_parts(parts[:1], out[1], STREAM)
    assert out.tolist() == [as_int64(checksum(torch.cat(parts))), as_int64(checksum(parts[0]))]


def test_view_refuses_private_format() -> None:
    with pytest.raises(Unsupported, match="CUDA has no private format"):
        BYTE_OPS.view(Segment("w", torch.zeros(8), SlotFormat.PRIVATE))
