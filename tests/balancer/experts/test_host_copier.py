"""The host copier: every byte arrives, no other is touched, nothing waits for ever."""

import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancer.experts import numa
from equipoise.balancer.experts.copy_profile import C2C, PCIE, PLAIN, UNLIMITED, Profile
from equipoise.balancer.experts.host_copier import Copy, HostCopier, Ticket
from equipoise.hal.accelerator import Topology
from equipoise.hal.errors import CopierError, CopyAbandoned, CopyPending

SOON = 20.0
GUARD = 251
"""What stands where nothing is copied to."""
SMALL = Profile("small", 64, UNLIMITED)
STILL = Profile("still", 64, 1e-3)
"""Begins one chunk, and the next a day later."""


@pytest.fixture(scope="module")
def copier() -> Iterator[HostCopier]:
    with HostCopier(SMALL, threads=4) as made:
        yield made


def noise(nbytes: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (nbytes,), dtype=torch.uint8, generator=random)


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


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
def test_every_byte_arrives_and_no_other_is_touched(copier: HostCopier, where: Places) -> None:
    source = noise(where.nbytes)
    found, wanted = (torch.full((where.nbytes,), GUARD, dtype=torch.uint8) for _ in range(2))
    copies = [Copy(source[a : a + n], found[b : b + n]) for a, b, n in where.copies]
    for a, b, n in where.copies:
        wanted[b : b + n] = source[a : a + n]
    ticket = copier.submit(copies)
    ticket.wait(SOON)
    assert ticket.done()
    assert torch.equal(found, wanted)
    assert torch.equal(source, noise(where.nbytes))


@pytest.mark.parametrize("profile", [PLAIN, PCIE, C2C, SMALL])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1 << 16, (1 << 20) + 7, (1 << 22) + 65])
def test_every_profile_copies_every_size(profile: Profile, nbytes: int) -> None:
    source, destination = noise(nbytes), torch.full((nbytes,), GUARD, dtype=torch.uint8)
    with HostCopier(profile, threads=3) as copier:
        copier.submit([Copy(source, destination)]).wait(SOON)
    assert torch.equal(source, destination)


def test_tensors_of_any_type_are_copied_as_bytes(copier: HostCopier) -> None:
    source = torch.randn(3, 5, dtype=torch.bfloat16)
    destination = torch.empty(15, dtype=torch.int16)
    scalar, place = torch.tensor(2.5), torch.tensor(0.0)
    copier.submit([Copy(source, destination), Copy(scalar, place)]).wait(SOON)
    assert torch.equal(destination.view(torch.bfloat16), source.reshape(-1))
    assert float(place) == 2.5


def test_many_tickets_of_many_threads_all_arrive() -> None:
    """Each thread copies down a chain of buffers of its own."""
    wrong: list[object] = []

    def chain(copier: HostCopier, seed: int) -> None:
        try:
            buffers = [noise(5000 + seed, seed), *(torch.empty(5000 + seed, dtype=torch.uint8)
                       for _ in range(12))]  # fmt: skip
            for source, destination in itertools.pairwise(buffers):
                copier.submit([Copy(source, destination)]).wait(SOON)
            if not torch.equal(buffers[-1], buffers[0]):
                wrong.append(seed)
        except Exception as error:
            wrong.append(error)

    with HostCopier(Profile("chunks", 512, UNLIMITED), threads=3) as copier:
        users = [threading.Thread(target=chain, args=(copier, seed)) for seed in range(6)]
        for user in users:
            user.start()
        for user in users:
            user.join(SOON)
    assert wrong == []


BUFFER = torch.zeros(1000, dtype=torch.uint8)
OTHER = torch.zeros(1000, dtype=torch.uint8)
REFUSED: dict[str, tuple[list[Copy], str]] = {
    "sizes": ([Copy(OTHER[:9], BUFFER[:8])], "copy 0: 9 bytes do not fit into 8"),
    "device": ([Copy(OTHER, BUFFER.to("meta"))], "copy 0: its destination is .* on meta"),
    "sparse": ([Copy(OTHER.to_sparse(), BUFFER)], "its source is torch.sparse_coo"),
    "strides": ([Copy(OTHER[::2], BUFFER[:500])], r"its source has strides \(2,\)"),
    "expanded": ([Copy(OTHER[:10], BUFFER[:1].expand(10))], "its destination has strides"),
    "second": ([Copy(OTHER, BUFFER), Copy(OTHER, BUFFER[:1])], "copy 1: 1000 bytes do not"),
    "itself": ([Copy(BUFFER, BUFFER)], "a destination overlaps a source"),
    "shifted": ([Copy(BUFFER[:500], BUFFER[499:999])], "a destination overlaps a source"),
    "swap": (
        [Copy(BUFFER[:500], BUFFER[500:]), Copy(BUFFER[500:], BUFFER[:500])],
        "a destination overlaps a source",
    ),
    "twice": ([Copy(OTHER[:9], BUFFER[:9]), Copy(OTHER[:9], BUFFER[8:17])], "two destinations"),
}


@pytest.mark.parametrize(("copies", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_copied_is_refused_before_any_effect(
    copier: HostCopier, copies: list[Copy], message: str
) -> None:
    first = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(CopierError, match=message) as caught:
        copier.submit([*copies, Copy(noise(100), first)])
    assert "\n" not in str(caught.value)
    assert int(first.sum()) == int(BUFFER.sum()) == 0


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 20))
def test_neighbours_are_no_overlap_and_overlaps_are_found(
    copier: HostCopier, a: int, b: int, nbytes: int
) -> None:
    memory = noise(60)
    copy = Copy(memory[a : a + nbytes], memory[b : b + nbytes])
    if abs(a - b) < nbytes:
        with pytest.raises(CopierError, match="overlaps"):
            copier.submit([copy])
        return
    wanted = copy.source.clone()
    copier.submit([copy]).wait(SOON)
    assert torch.equal(copy.destination, wanted)


def test_a_ticket_that_takes_too_long_says_so_and_goes_on() -> None:
    source, destination = noise(1000), torch.full((1000,), GUARD, dtype=torch.uint8)
    copier = HostCopier(STILL, threads=2)
    ticket = copier.submit([Copy(source, destination)])
    with pytest.raises(CopyPending, match=r"not done within 0\.05 s"):
        ticket.wait(0.05)
    assert not ticket.done()
    with pytest.raises(CopyAbandoned, match="1 copies"):
        copier.close(0.0)
    assert ticket.done()
    with pytest.raises(CopyAbandoned):
        ticket.wait(SOON)


def test_a_waiter_is_told_when_the_copier_closes() -> None:
    copier = HostCopier(STILL, threads=1)
    ticket = copier.submit([Copy(noise(1000), torch.empty(1000, dtype=torch.uint8))])
    told: list[type[BaseException]] = []

    def wait() -> None:
        try:
            ticket.wait(SOON)
        except CopierError as error:
            told.append(type(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    with pytest.raises(CopyAbandoned):
        copier.close(0.05)
    waiter.join(SOON)
    assert told == [CopyAbandoned]


def test_a_rate_keeps_chunks_back_and_none_lets_them_go() -> None:
    """Of 100 chunks at one a day the first is begun at once, and no other."""
    found = torch.full((6400,), GUARD, dtype=torch.uint8)
    copier = HostCopier(STILL, threads=4)
    ticket = copier.submit([Copy(torch.zeros(6400, dtype=torch.uint8), found)])
    expiry = time.monotonic() + SOON
    while not int((found == 0).sum()) and time.monotonic() < expiry:
        time.sleep(0.01)
    assert not ticket.done()
    with pytest.raises(CopyAbandoned):
        copier.close(0.0)
    assert 0 < int((found == 0).sum()) <= 64


@pytest.mark.parametrize("which", ["write on write", "write on read", "read on write"])
def test_two_tickets_under_way_never_share_what_one_writes(which: str) -> None:
    a, b, c = (noise(256, seed) for seed in range(3))
    copier = HostCopier(STILL, threads=1)
    copier.submit([Copy(a, b)])
    second = {
        "write on write": Copy(c, b),
        "write on read": Copy(c, a),
        "read on write": Copy(b, c),
    }[which]
    with pytest.raises(CopierError, match="still runs"):
        copier.submit([second])
    copier.submit([Copy(a, c)])  # reading what another reads is no harm
    with pytest.raises(CopyAbandoned, match="2 copies"):
        copier.close(0.0)


def test_memory_is_free_again_once_its_ticket_has_ended(copier: HostCopier) -> None:
    a, b = noise(4096, 1), noise(4096, 2)
    wanted = a.clone()
    for _ in range(20):
        copier.submit([Copy(a, b)]).wait(SOON)
        copier.submit([Copy(b, a)]).wait(SOON)
    assert torch.equal(a, wanted)
    assert torch.equal(b, wanted)


def test_tensors_that_everybody_dropped_live_until_they_are_copied() -> None:
    copier = HostCopier(STILL, threads=1)
    source, destination = noise(1000), torch.empty(1000, dtype=torch.uint8)
    watched = [weakref.ref(source), weakref.ref(destination)]
    copier.submit([Copy(source, destination)])
    del source, destination
    gc.collect()
    assert all(tensor() is not None for tensor in watched)
    with pytest.raises(CopyAbandoned):
        copier.close(0.0)
    gc.collect()
    assert all(tensor() is None for tensor in watched)


def test_a_ticket_that_nobody_asks_again_does_not_keep_its_tensors(copier: HostCopier) -> None:
    source = noise(1000)
    watched = weakref.ref(source)
    ticket = copier.submit([Copy(source, torch.empty(1000, dtype=torch.uint8))])
    del source
    expiry = time.monotonic() + SOON
    while watched() is not None and time.monotonic() < expiry:
        copier.submit([]).wait(SOON)  # any later call looks after earlier ones
        gc.collect()
    assert watched() is None
    assert ticket.done()


def test_a_dropped_copier_ends_its_threads_and_says_what_it_gave_up() -> None:
    before = threads_of_this_process()
    copier = HostCopier(STILL, threads=5)
    ticket = copier.submit([Copy(noise(1000), torch.empty(1000, dtype=torch.uint8))])
    assert threads_of_this_process() == before + 5
    holder = [copier]
    del copier
    with pytest.warns(ResourceWarning, match="dropped with 1 copies"):
        holder.clear()
    assert threads_of_this_process() == before
    with pytest.raises(CopyAbandoned):
        ticket.wait(SOON)


def abandoned(ticket: Ticket) -> bool:
    try:
        ticket.wait(0.0)
    except CopyAbandoned:
        return True
    return False


def test_closing_under_load_ends_every_ticket_one_way_or_the_other() -> None:
    copier = HostCopier(Profile("load", 4096, 200e6), threads=3)
    tickets: list[tuple[Ticket, Copy]] = []
    ended: list[object] = []

    def load(seed: int) -> None:
        try:
            while True:
                copy = Copy(noise(20000, seed), torch.full((20000,), GUARD, dtype=torch.uint8))
                tickets.append((copier.submit([copy]), copy))
        except CopierError as error:
            ended.append(str(error))

    users = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
    for user in users:
        user.start()
    while not tickets:
        time.sleep(0.001)
    with pytest.raises(CopyAbandoned):
        copier.close(0.0)
    for user in users:
        user.join(SOON)
    assert ended == ["refused: the copier is closed"] * 3
    for ticket, copy in tickets:
        assert ticket.done()
        assert abandoned(ticket) or torch.equal(copy.source, copy.destination)


def test_closing_lets_copies_end_and_takes_no_more(copier: HostCopier) -> None:
    before = threads_of_this_process()
    closing = HostCopier(SMALL, threads=2)
    source, destination = noise(100_000), torch.empty(100_000, dtype=torch.uint8)
    ticket = closing.submit([Copy(source, destination)])
    closing.close(SOON)
    closing.close(0.0)
    assert torch.equal(source, destination)
    ticket.wait(0.0)
    assert threads_of_this_process() == before
    with pytest.raises(CopierError, match="closed"):
        closing.submit([])


def test_an_error_in_the_block_is_not_hidden_by_its_end() -> None:
    def fail() -> None:
        with HostCopier(STILL, threads=1) as copier:
            copier.submit([Copy(noise(1000), torch.empty(1000, dtype=torch.uint8))])
            raise KeyError

    with pytest.warns(ResourceWarning, match="1 copies"), pytest.raises(KeyError):
        fail()


def test_threads_run_where_the_topology_says(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = numa.available_cpus()
    chosen = frozenset({min(allowed)})
    monkeypatch.setattr(numa, "near_cpus", lambda node, cpus: chosen if node == 3 else frozenset())
    before = set(os.listdir("/proc/self/task"))
    with HostCopier.near(Topology(0, "here", 3)) as copier:
        mine = set(os.listdir("/proc/self/task")) - before
        assert (copier.cpus, copier.threads, len(mine)) == (chosen, 1, 1)
        assert [os.sched_getaffinity(int(thread)) for thread in mine] == [chosen]
    with HostCopier.near(Topology(0, "here", -1)) as copier:
        mine = set(os.listdir("/proc/self/task")) - before
        assert copier.cpus == frozenset()
        assert copier.threads == len(mine) == numa.thread_count(len(allowed), 1)
        assert all(os.sched_getaffinity(int(thread)) == allowed for thread in mine)


@pytest.mark.parametrize("cpu", [-1, 1023, 5000])
def test_a_processor_that_is_not_there_is_an_error_and_leaves_no_thread(cpu: int) -> None:
    before = threads_of_this_process()
    with pytest.raises(CopierError, match="copier 'plain'"):
        HostCopier(PLAIN, threads=3, cpus=frozenset({cpu}))
    assert threads_of_this_process() == before


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no threads": (lambda: HostCopier(PLAIN, threads=0), "threads: expected 1 to"),
    "no chunk": (lambda: Profile("x", 0, 1.0), "multiples of 64 bytes, not 0"),
    "odd chunk": (lambda: Profile("x", 100, 1.0), "multiples of 64 bytes, not 100"),
    "backwards": (lambda: Profile("x", 64, -1.0), "no rate: -1.0"),
    "no number": (lambda: Profile("x", 64, float("nan")), "no rate: nan"),
    "endless": (lambda: Profile("x", 64, float("inf")), "no rate: inf"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_settings_that_cannot_be_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CopierError, match=message):
        call()


def test_a_forked_process_is_told_that_no_thread_came_along() -> None:
    copier = HostCopier(SMALL, threads=2)
    ticket = copier.submit([])
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: copier.submit([]), lambda: copier.close(0.0), ticket.done):
            try:
                call()
            except CopierError:
                refused += 1
        del copier
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    copier.close(SOON)
