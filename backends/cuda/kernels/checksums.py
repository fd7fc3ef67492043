"""The checksum of `equipoise.hal.checksum`, of one tensor's bytes or of several buffers, at once.

Bytes that stand in several places are added up place by place, cut where words end: each word is
read once, and nothing is put together but words that go over a cut.

Programs of a buffer go through its words in turns, add their sums to one total in the workspace and
take a ticket; whoever draws the last one finishes, as in `histogram`. Words are read as such where
the buffers stand on multiples of four bytes, and put together from bytes where they do not.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.hashing import STEP_64, mix64
from equipoise.backends.cuda.kernels.workspace import Workspace

BLOCK = 1024
"""Words a program and turn: two loads of 16 bytes are under way for each thread."""
WARPS = 4
PROGRAMS = 8
"""Programs for each of the device's processors."""


@triton.jit
def load_bytes(data: tl.tensor, lane: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Words of the `length` bytes at `data`, uint64, little-endian; zeros after them."""
    words = tl.zeros_like(lane).to(tl.uint64)
    for part in tl.static_range(4):
        at = 4 * lane + part
        byte = tl.load(data + at, mask=at < length, other=0)
        words |= byte.to(tl.uint64) << (8 * part)
    return words


@triton.jit
def load_block(
    data: tl.tensor, lane: tl.tensor, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Words of a whole block at `data`, uint64."""
    if ALIGNED:
        words = tl.load(data.to(tl.pointer_type(tl.uint32), bitcast=True) + lane).to(tl.uint64)
    else:
        words = load_bytes(data, lane, 4 * BLOCK)
    return words


@triton.jit
def sum_blocks(
    data: tl.tensor,
    nbytes: tl.tensor,
    before: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of the mixed words of the whole blocks that come to this program, uint64."""
    lane, turn = tl.arange(0, BLOCK), tl.num_programs(0).to(tl.int64)
    blocks, program = nbytes // (4 * BLOCK), tl.program_id(0).to(tl.int64)
    # The product with a word's number is carried along: an addition is cheaper.
    steps = (before + program * BLOCK + lane + 1).to(tl.uint64) * STEP_64
    onward = (turn * BLOCK).to(tl.uint64) * STEP_64
    place, sums = data + program * 4 * BLOCK, tl.zeros([BLOCK], tl.uint64)
    for _ in range(program, blocks, turn):
        sums += mix64(load_block(place, lane, ALIGNED, BLOCK) + steps)
        steps += onward
        place += turn * 4 * BLOCK
    return tl.sum(sums, 0)


@triton.jit
def sum_rest(
    data: tl.tensor,
    nbytes: tl.tensor,
    before: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of the mixed words after the whole blocks, the last one filled up; and the length's,
    which is 0 for a length of -1."""
    lane = tl.arange(0, BLOCK)
    first = nbytes // (4 * BLOCK) * BLOCK
    remaining = nbytes - 4 * first
    steps = (before + first + lane + 1).to(tl.uint64) * STEP_64
    mixed_words = mix64(load_bytes(data + 4 * first, lane, remaining) + steps)
    rest = tl.sum(tl.where(4 * lane < remaining, mixed_words, 0), 0)
    return rest + mix64((-1 - length).to(tl.uint64))


@triton.jit(do_not_specialize=["nbytes", "before", "length", "accumulate"])
def checksum_kernel(
    data: tl.tensor,
    nbytes: tl.int64,
    before: tl.int64,
    length: tl.int64,
    accumulate: tl.int64,
    stride: tl.int64,
    out: tl.tensor,
    sums: tl.tensor,
    tickets: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum one program's part of one buffer; the last of a buffer's programs finishes it.

    `before` are words that come before the buffer's; `length` is -1 where others come after;
    `accumulate` is 1 where the sum is added to what is there, else 0.
    """
    buffer = tl.program_id(1)
    data += buffer * stride
    program_sum = sum_blocks(data, nbytes, before, ALIGNED, BLOCK)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        program_sum += sum_rest(data, nbytes, before, length, BLOCK)
    tl.atomic_add(sums + buffer, program_sum.to(tl.int64, bitcast=True), sem="relaxed")
    # As in `histogram`: the additions before the ticket, whichever thread makes them.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + buffer, 1, sem="acq_rel")
    if ticket == tl.num_programs(0) - 1:
        total = tl.atomic_xchg(sums + buffer, tl.zeros_like(length), sem="relaxed")
        tl.store(out + buffer, total + accumulate * tl.load(out + buffer))
        tl.store(tickets + buffer, 0)


def checksum(data: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Checksum of a tensor's bytes, in one launch on the current stream.

    Args:
        data: C-contiguous, of any dtype, at any byte of its storage.
        out: int64 [1], overwritten.
        workspace: of this stream.

    Raises:
        ValueError: the tensor is not C-contiguous.
    """
    if not data.is_contiguous():
        raise ValueError(f"data: expected C-contiguous, got strides {data.stride()}")
    checksum_rows(data.detach().reshape(-1).view(torch.uint8)[None], out, workspace)


def checksum_rows(data: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Checksums of several buffers, in one launch on the current stream.

    Args:
        data: uint8 [n, bytes], each row contiguous.
        out: int64 [n], overwritten.
        workspace: of this stream.

    Raises:
        ValueError: there are more rows than the workspace was made for, or they are not contiguous.
    """
    number, length = data.shape
    if number > workspace.sizes.buffers:
        raise ValueError(f"data: expected at most {workspace.sizes.buffers} rows, got {number}")
    if length > 1 and data.stride(1) != 1:
        raise ValueError(f"data: expected contiguous rows, got strides {data.stride()}")
    if number:
        _launch(data, out, workspace, 0, length, accumulate=False)


def checksum_parts(parts: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
    """Checksum of parts back to back: a launch for each on the current stream, and one more for
    each word that goes from one part into the next.

    Args:
        parts: uint8 [n] each, contiguous; one at least.
        out: int64 [1], overwritten.
        workspace: of this stream.
    """
    pieces, before = cut_at_words(parts), 0
    for piece in pieces:
        last = piece is pieces[-1]
        length = 4 * before + piece.numel() if last else -1
        _launch(piece[None], out, workspace, before, length, accumulate=before > 0)
        before += piece.numel() // 4


def cut_at_words(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same bytes in the same order; every piece but the last one is of whole words."""
    pieces: list[Tensor] = []
    word: list[Tensor] = []
    for number, part in enumerate(parts):
        word_bytes = sum(piece.numel() for piece in word)
        if word_bytes:
            word.append(part[: 4 - word_bytes])
            word_bytes, part = word_bytes + word[-1].numel(), part[4 - word_bytes :]
            if word_bytes < 4:
                continue
            pieces.append(torch.cat(word))
            word = []
        whole = part.numel() if number == len(parts) - 1 else part.numel() // 4 * 4
        if whole:
            pieces.append(part[:whole])
        if part.numel() > whole:
            word = [part[whole:]]
    if word:
        pieces.append(torch.cat(word))
    return pieces or [parts[0][:0]]


def _launch(
    data: Tensor, out: Tensor, workspace: Workspace, before: int, length: int, accumulate: bool
) -> None:
    number, nbytes = data.shape
    stride = data.stride(0) if number > 1 else 0
    programs = min(-(-nbytes // (4 * BLOCK)), -(-_processors(data.device) * PROGRAMS // number))
    checksum_kernel[(max(1, programs), number)](
        data,
        nbytes,
        before,
        length,
        int(accumulate),
        stride,
        out,
        workspace.sums,
        workspace.tickets,
        ALIGNED=data.data_ptr() % 4 == 0 and stride % 4 == 0,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@functools.cache
def _processors(device: torch.device) -> int:
    """Of the device; one of the host's, where Triton interprets."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
