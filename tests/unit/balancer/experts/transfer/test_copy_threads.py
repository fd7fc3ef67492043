"""Copy threads: every byte arrives, and no other is touched."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from helpers.harnesses.host_copies import GUARD, SMALL, STILL, guarded, noise
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.transfer.copy_threads import (
    PLAIN,
    UNLIMITED_RATE,
    CopyLimits,
    CopyThreadPool,
    HostCopy,
)
from equipoise.hal.errors import CopyAbandoned, HostCopyError


@pytest.fixture(scope="module")
def copy_pool() -> Iterator[CopyThreadPool]:
    with CopyThreadPool(SMALL, threads=4) as pool:
        yield pool


@dataclass(frozen=True)
class Places:
    """Copies inside two buffers, as (source offset, destination offset, bytes)."""

    copies: tuple[tuple[int, int, int], ...]
    nbytes: int


@st.composite
def places(draw: st.DrawFn) -> Places:
    """Destinations apart from each other, with gaps or none; sources anywhere."""
    sizes = draw(st.lists(st.integers(0, 400), max_size=8))
    gaps = draw(st.lists(st.integers(0, 70), min_size=len(sizes), max_size=len(sizes)))
    at, copies = draw(st.integers(0, 70)), []
    nbytes = at + sum(sizes) + sum(gaps) + 70
    for size, gap in zip(sizes, gaps, strict=True):
        copies.append((draw(st.integers(0, nbytes - size)), at, size))
        at += size + gap
    return Places(tuple(draw(st.permutations(copies))), nbytes)


@given(places())
def test_copy_threads_writes_exactly_the_destination_bytes(
    copy_pool: CopyThreadPool, placed_copies: Places
) -> None:
    source = noise(placed_copies.nbytes)
    destination, expected = (
        torch.full((placed_copies.nbytes,), GUARD, dtype=torch.uint8) for _ in range(2)
    )
    copies = [
        HostCopy(source[a : a + n], destination[b : b + n]) for a, b, n in placed_copies.copies
    ]
    for a, b, n in placed_copies.copies:
        expected[b : b + n] = source[a : a + n]
    copy_handle = copy_pool.submit(copies)
    copy_handle.wait(WATCHDOG)
    assert copy_handle.done()
    assert torch.equal(destination, expected)
    assert torch.equal(source, noise(placed_copies.nbytes))


SIZES = (0, 1, 63, 64, 65, 1 << 16)
LARGE_SIZES = ((1 << 20) + 7, (1 << 22) + 65)
"""Not in small chunks: a thread offers its processor to others after each, which on a busy machine
take it for milliseconds."""


@pytest.mark.parametrize(
    ("profile", "nbytes"),
    [*itertools.product((PLAIN, SMALL), SIZES), *itertools.product((PLAIN,), LARGE_SIZES)],
)
def test_copy_threads_profiles_copy_every_size(profile: CopyLimits, nbytes: int) -> None:
    source, destination = noise(nbytes), guarded(nbytes)
    with CopyThreadPool(profile, threads=3) as copy_pool:
        copy_pool.submit([HostCopy(source, destination)]).wait(WATCHDOG)
    assert torch.equal(source, destination)


def test_copy_threads_copies_any_dtype_as_bytes(copy_pool: CopyThreadPool) -> None:
    source = torch.randn(3, 5, dtype=torch.bfloat16)
    destination = torch.empty(15, dtype=torch.int16)
    scalar, place = torch.tensor(2.5), torch.tensor(0.0)
    copy_pool.submit([HostCopy(source, destination), HostCopy(scalar, place)]).wait(WATCHDOG)
    assert torch.equal(destination.view(torch.bfloat16), source.reshape(-1))
    assert float(place) == 2.5


def test_copy_threads_serves_tickets_of_many_threads() -> None:
    """Each thread copies down a chain of buffers of its own."""
    failures: list[object] = []

    def copy_chain(copy_pool: CopyThreadPool, seed: int) -> None:
        try:
            buffers = [noise(5000 + seed, seed), *(torch.empty(5000 + seed, dtype=torch.uint8)
                       for _ in range(12))]  # fmt: skip
            for source, destination in itertools.pairwise(buffers):
                copy_pool.submit([HostCopy(source, destination)]).wait(WATCHDOG)
            if not torch.equal(buffers[-1], buffers[0]):
                failures.append(seed)
        except Exception as error:
            failures.append(error)

    with CopyThreadPool(CopyLimits("chunks", 512, UNLIMITED_RATE), threads=3) as copy_pool:
        users = [threading.Thread(target=copy_chain, args=(copy_pool, seed)) for seed in range(6)]
        for user in users:
            user.start()
        for user in users:
            user.join(WATCHDOG)
    assert failures == []


BUFFER = torch.zeros(1000, dtype=torch.uint8)
OTHER = torch.zeros(1000, dtype=torch.uint8)
BAD_COPIES: dict[str, tuple[list[HostCopy], str]] = {
    "sizes": ([HostCopy(OTHER[:9], BUFFER[:8])], "copy 0: 9 bytes do not fit into 8"),
    "device": ([HostCopy(OTHER, BUFFER.to("meta"))], "copy 0: its destination is .* on meta"),
    "sparse": ([HostCopy(OTHER.to_sparse(), BUFFER)], "its source is torch.sparse_coo"),
    "strides": ([HostCopy(OTHER[::2], BUFFER[:500])], r"its source has strides \(2,\)"),
    "expanded": ([HostCopy(OTHER[:10], BUFFER[:1].expand(10))], "its destination has strides"),
    "second": ([HostCopy(OTHER, BUFFER), HostCopy(OTHER, BUFFER[:1])], "copy 1: 1000 bytes do not"),
    "itself": ([HostCopy(BUFFER, BUFFER)], "a destination overlaps a source"),
    "shifted": ([HostCopy(BUFFER[:500], BUFFER[499:999])], "a destination overlaps a source"),
    "swap": (
        [HostCopy(BUFFER[:500], BUFFER[500:]), HostCopy(BUFFER[500:], BUFFER[:500])],
        "a destination overlaps a source",
    ),
    "twice": (
        [HostCopy(OTHER[:9], BUFFER[:9]), HostCopy(OTHER[:9], BUFFER[8:17])],
        "two destinations",
    ),
}


@pytest.mark.parametrize(("copies", "message"), BAD_COPIES.values(), ids=BAD_COPIES)
def test_copy_threads_refuses_bad_copies_before_any_effect(
    copy_pool: CopyThreadPool, copies: list[HostCopy], message: str
) -> None:
    first = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(HostCopyError, match=message) as error:
        copy_pool.submit([*copies, HostCopy(noise(100), first)])
    assert "\n" not in str(error.value)
    assert int(first.sum()) == int(BUFFER.sum()) == 0


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 20))
def test_copy_threads_refuses_overlapping_but_not_adjacent_ranges(
    copy_pool: CopyThreadPool, a: int, b: int, nbytes: int
) -> None:
    memory = noise(60)
    copy = HostCopy(memory[a : a + nbytes], memory[b : b + nbytes])
    if abs(a - b) < nbytes:
        with pytest.raises(HostCopyError, match="overlaps"):
            copy_pool.submit([copy])
        return
    expected = copy.source.clone()
    copy_pool.submit([copy]).wait(WATCHDOG)
    assert torch.equal(copy.destination, expected)


def test_copy_threads_rate_holds_back_chunks() -> None:
    """Of 100 chunks at one a day the first is begun at once, and no other."""
    destination = guarded(6400)
    copy_pool = CopyThreadPool(STILL, threads=4)
    copy_handle = copy_pool.submit([HostCopy(torch.zeros(6400, dtype=torch.uint8), destination)])
    expiry = time.monotonic() + WATCHDOG
    while not int((destination == 0).sum()) and time.monotonic() < expiry:
        time.sleep(0.01)
    assert not copy_handle.done()
    with pytest.raises(CopyAbandoned):
        copy_pool.close(0.0)
    assert 0 < int((destination == 0).sum()) <= 64


@pytest.mark.parametrize("which", ["write on write", "write on read", "read on write"])
def test_copy_threads_refuses_ticket_that_conflicts_with_running_one(which: str) -> None:
    a, b, c = (noise(256, seed) for seed in range(3))
    copy_pool = CopyThreadPool(STILL, threads=1)
    copy_pool.submit([HostCopy(a, b)])
    second = {
        "write on write": HostCopy(c, b),
        "write on read": HostCopy(c, a),
        "read on write": HostCopy(b, c),
    }[which]
    with pytest.raises(HostCopyError, match="still runs"):
        copy_pool.submit([second])
    copy_pool.submit([HostCopy(a, c)])  # reading what another reads is no harm
    with pytest.raises(CopyAbandoned, match="2 copies"):
        copy_pool.close(0.0)


def test_copy_threads_accepts_memory_again_after_its_ticket_ended(
    copy_pool: CopyThreadPool,
) -> None:
    a, b = noise(4096, 1), noise(4096, 2)
    expected = a.clone()
    for _ in range(20):
        copy_pool.submit([HostCopy(a, b)]).wait(WATCHDOG)
        copy_pool.submit([HostCopy(b, a)]).wait(WATCHDOG)
    assert torch.equal(a, expected)
    assert torch.equal(b, expected)
