"""The host pool: filled together, sealed for ever, read by all; and how each step can fail.

Ranks are threads here; processes are in tests/ranks.
"""

import gc
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.harnesses.host_pool import (
    DESCRIPTOR,
    LAYOUT,
    alone,
    fill,
    holdings,
    holds,
    opened,
    refused,
    same,
    sealed,
    weights,
)
from helpers.processes.thread_control_plane import ThreadControl, meet
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.backends.cpu import BACKEND
from equipoise.balancer.experts.host_pool.layout import PoolContents, PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool
from equipoise.balancer.experts.transfer.copy_threads import PLAIN, CopyThreadPool, HostCopy
from equipoise.hal.errors import (
    EquipoiseError,
    ExpertPoolError,
    PoolCorrupted,
    PoolIncomplete,
    RanksDiffer,
)

pytestmark = pytest.mark.slow


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 5))
def test_pool_ranks_read_experts_filled_by_all_ranks(
    ranks: int, layers: int, experts: int, seed: int
) -> None:
    layout = PoolLayout(DESCRIPTOR, layers, experts)

    def program(control: ThreadControl) -> tuple[bool, tuple[int, ...]]:
        pool = sealed(control, layout, seed)
        contents_equal = holds(pool, seed)
        pool.close()
        return contents_equal, pool.ranks

    before = holdings()
    assert meet(ranks, program) == [(True, tuple(range(ranks)))] * ranks
    gc.collect()
    assert holdings() == before


def test_pool_checksum_equals_slot_store_checksum() -> None:
    from equipoise.hal.slots import Segment, SlotLayout
    from equipoise.hal.stream import Role

    slot = tuple(Segment(s.name, torch.empty(s.shape, dtype=s.dtype)) for s in DESCRIPTOR)
    accelerator = BACKEND.open(0)

    def program(control: ThreadControl) -> None:
        pool = sealed(control)
        store, stream = (
            accelerator.slot_store(SlotLayout((slot,), 1)),
            accelerator.stream(Role.COPY),
        )
        out = torch.zeros(1, dtype=torch.int64)
        store.write([0], [pool.view(2, 3)], stream)
        store.checksum_slots([0], out, stream)
        stream.synchronize(WATCHDOG)
        assert int(out) % 2**64 == pool.checksum(2, 3)
        pool.close()

    try:
        alone(program)
    finally:
        accelerator.close()


def test_copy_threads_copies_experts_from_pool() -> None:
    experts = [(0, 1), (2, 3), (0, 1)]
    places = [tuple(torch.empty(s.shape, dtype=s.dtype) for s in DESCRIPTOR) for _ in experts]

    def program(control: ThreadControl) -> None:
        pool = sealed(control)
        sources = itertools.starmap(pool.view, experts)
        with CopyThreadPool(PLAIN, threads=2) as copy_pool:
            pairs = zip(itertools.chain(*sources), itertools.chain(*places), strict=True)
            copy_pool.submit([HostCopy(source, place) for source, place in pairs]).wait(WATCHDOG)
        pool.close()

    alone(program)
    for which, place in zip(experts, places, strict=True):
        assert same(place, weights(LAYOUT, *which))


def test_pool_stores_strided_weights_contiguously() -> None:
    layout = PoolLayout(DESCRIPTOR[:1], 1, 1)
    tensor = torch.arange(30, dtype=torch.bfloat16).reshape(5, 6).t()

    def program(control: ThreadControl) -> None:
        pool = opened(control, layout)
        pool.write(0, 0, [tensor.requires_grad_()])
        pool.seal(WATCHDOG)
        (view,) = pool.view(0, 0)
        assert view.is_contiguous()
        assert torch.equal(view, tensor)
        pool.close()

    alone(program)


TENSORS = weights(LAYOUT, 0, 0)
MISFITS: dict[str, Sequence[torch.Tensor]] = {
    "few": TENSORS[:2],
    "many": [*TENSORS, TENSORS[0]],
    "shape": [TENSORS[0].reshape(5, 6), *TENSORS[1:]],
    "dtype": [TENSORS[0].half(), *TENSORS[1:]],
    "order": [TENSORS[1], TENSORS[0], TENSORS[2]],
}


@pytest.mark.parametrize("tensors", MISFITS.values(), ids=MISFITS)
def test_pool_refuses_misfit_tensors_and_accepts_right_ones_later(
    tensors: Sequence[torch.Tensor],
) -> None:
    def program(control: ThreadControl) -> None:
        pool = opened(control)
        with pytest.raises(ExpertPoolError, match="the descriptor says"):
            pool.write(0, 0, tensors)
        fill(pool)
        pool.seal(WATCHDOG)
        assert holds(pool)
        pool.close()

    alone(program)


def test_pool_expert_is_filled_once_by_its_own_rank() -> None:
    def program(control: ThreadControl) -> None:
        pool = opened(control)
        own_expert, peer = control.rank, 1 - control.rank
        pool.write(0, own_expert, TENSORS)
        with pytest.raises(
            ExpertPoolError, match=f"expert {own_expert} of layer 0 was filled before"
        ):
            pool.write(0, own_expert, TENSORS)
        with pytest.raises(ExpertPoolError, match=f"is to be filled by rank {peer}"):
            pool.write(0, peer, TENSORS)
        with pytest.raises(ExpertPoolError, match="no expert 5 of layer 0"):
            pool.write(0, 5, TENSORS)
        pool.close()

    assert meet(2, program) == [None, None]


@given(st.lists(st.integers(0, 2), min_size=LAYOUT.experts, max_size=LAYOUT.experts))
def test_pool_is_filled_by_chosen_owners(owners: list[int]) -> None:
    def program(control: ThreadControl) -> bool:
        pool = HostExpertPool.open(
            control, range(3), LAYOUT, name="model", timeout=WATCHDOG, owner_ranks=owners
        )
        assert {expert for _, expert in pool.owned_experts()} == {
            expert for expert, owner in enumerate(owners) if owner == control.rank
        }
        fill(pool)
        pool.seal(WATCHDOG)
        complete = holds(pool)
        pool.close()
        return complete

    assert meet(3, program) == [True] * 3


@pytest.mark.parametrize(
    ("owners", "kind", "message"),
    [
        ([0, 1, 0, 1], ExpertPoolError, "4 owners of 5 experts"),
        ([0, 1, 2, 5, 7], ExpertPoolError, r"ranks \[2, 5, 7\] cannot share memory with ranks"),
        (None, RanksDiffer, "owners"),
    ],
)
def test_pool_refuses_owners_that_cannot_fill_it(
    owners: list[int] | None, kind: type[EquipoiseError], message: str
) -> None:
    def program(control: ThreadControl) -> None:
        chosen = owners if owners is not None else [control.rank] * LAYOUT.experts
        HostExpertPool.open(
            control, range(2), LAYOUT, name="model", timeout=WATCHDOG, owner_ranks=chosen
        )

    for text in refused(program, 2, kind):
        assert re.search(message, text)


def test_pool_refuses_reads_before_seal_and_writes_after_it() -> None:
    def program(control: ThreadControl) -> None:
        pool = opened(control)
        reads: list[Callable[[], object]] = [
            lambda: pool.view(0, 0),
            lambda: pool.checksum(0, 0),
        ]
        for read in reads:
            with pytest.raises(ExpertPoolError, match="not sealed but Filling"):
                read()
        fill(pool)
        pool.seal(WATCHDOG)
        writes: list[Callable[[], None]] = [
            lambda: pool.write(0, 0, TENSORS),
            lambda: pool.seal(WATCHDOG),
        ]
        for write in writes:
            with pytest.raises(ExpertPoolError, match="not being filled"):
                write()
        with pytest.raises(ExpertPoolError, match="no expert 9"):
            pool.view(0, 9)
        pool.close()
        pool.close()
        for read in reads:
            with pytest.raises(ExpertPoolError, match="not sealed but PoolClosed"):
                read()

    alone(program)


def test_pool_seal_names_unfilled_expert_on_every_rank() -> None:
    def program(control: ThreadControl) -> None:
        pool = opened(control)
        for which in pool.owned_experts():
            if which not in {(1, 1), (2, 4)}:
                pool.write(*which, weights(LAYOUT, *which))
        pool.seal(WATCHDOG)

    for text in refused(program, 3, PoolIncomplete):
        assert text == ("rank 1: has not filled expert 1 of layer 1, expert 4 of layer 2")


@pytest.mark.parametrize("byte_offset", [0, 59, 64 + 14, 128 + 3])
def test_pool_seal_detects_changed_byte_on_every_rank(byte_offset: int) -> None:
    """One in each segment, by a rank that writes where it has no business."""
    ready = threading.Barrier(2)

    def program(control: ThreadControl) -> None:
        pool = opened(control)
        fill(pool)
        ready.wait(WATCHDOG)
        if control.rank == 0:
            state = pool._state
            os.pwrite(state.descriptor, b"\xff", LAYOUT.expert_offset(1, 3) + byte_offset)  # type: ignore[union-attr]
        ready.wait(WATCHDOG)
        pool.seal(WATCHDOG)

    for text in refused(program, 2, PoolCorrupted):
        assert text == "rank 1: other bytes than were written in expert 3 of layer 1"


def test_pool_seal_detects_wrong_copy_while_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    original_copy = torch.Tensor.copy_

    def copy_wrongly(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        original_copy(self, source)
        if same((source,), weights(LAYOUT, 2, 2)[:1]):
            self[-1, -1] += 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy_wrongly)
    (text,) = refused(sealed, 1, PoolCorrupted)
    assert text == "rank 0: other bytes than were written in expert 2 of layer 2"


def test_pool_views_outlive_the_pool() -> None:
    views: list[torch.Tensor] = []

    def program(control: ThreadControl) -> None:
        pool = sealed(control)
        views.extend(pool.view(1, 4))
        pool.close()

    before = holdings()
    alone(program)
    gc.collect()
    assert same(tuple(views), weights(LAYOUT, 1, 4))
    assert holdings() != before
    views.clear()
    gc.collect()
    assert holdings() == before


def test_pool_seal_fails_while_another_thread_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    original_write, write_started, write_gate = (
        PoolContents.write,
        threading.Event(),
        threading.Event(),
    )

    def write_slowly(
        self: PoolContents, layer: int, expert: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        write_started.set()
        write_gate.wait(WATCHDOG)
        original_write(self, layer, expert, tensors)

    def fill_late(pool: HostExpertPool) -> None:
        with pytest.raises(ExpertPoolError, match="was let go"):
            fill(pool)

    def program(control: ThreadControl) -> None:
        pool = opened(control, PoolLayout(DESCRIPTOR, 1, 1))
        monkeypatch.setattr(PoolContents, "write", write_slowly)
        fill_thread = threading.Thread(target=fill_late, args=(pool,))
        fill_thread.start()
        write_started.wait(WATCHDOG)
        try:
            pool.seal(WATCHDOG)
        finally:
            write_gate.set()
            fill_thread.join(WATCHDOG)

    (text,) = refused(program, 1, PoolIncomplete)
    assert "is still filling" in text
