"""`commit: in_place`: which layer's lock is held when, and who fills the host's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.eplb import in_place
from equipoise.integrations.vllm.eplb.in_place import HostPools, SlotReads


class Locks:
    """Records which layer is held, and whether it was entered and left in an ordered section."""

    def __init__(self) -> None:
        self.ordered = 0
        self.log: list[tuple[str, int, int]] = []
        self.broken: int | None = None

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        self.ordered += 1
        yield
        self.ordered -= 1

    @contextmanager
    def reading_slots(self, layer: int, step: int) -> Iterator[None]:
        assert self.ordered
        if layer == self.broken:
            raise IntegrationError("the lock is poisoned")
        self.log.append(("enter", layer, step))
        yield
        self.log.append(("leave", layer, step))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_slot_reads_hold_one_layer_at_a_time_and_none_between_steps(layers: list[int]) -> None:
    locks = Locks()
    reads = SlotReads(locks.reading_slots, cast(Any, locks))
    expected = []
    for step, count in enumerate(layers):
        for layer in range(count):
            reads.enter(layer, step)
            assert locks.log[-1] == ("enter", layer, step)
            expected += [("enter", layer, step), ("leave", layer, step)]
        reads.leave()
        reads.leave()
        assert locks.log == expected


def test_slot_reads_leave_the_layer_before_one_that_cannot_be_entered() -> None:
    locks = Locks()
    reads = SlotReads(locks.reading_slots, cast(Any, locks))
    reads.enter(0, 7)
    locks.broken = 1
    with pytest.raises(IntegrationError, match="poisoned"):
        reads.enter(1, 7)
    reads.leave()
    assert locks.log == [("enter", 0, 7), ("leave", 0, 7)]


def test_host_pool_owner_is_the_first_rank_with_the_expert() -> None:
    placement = np.tile(np.array([0, 1, 4, 2, 3, 0, 4, 1, 2], dtype=np.int32), (2, 1))
    group: Any = SimpleNamespace(model=SimpleNamespace(slots_per_rank=3))
    pools = HostPools(cast(Any, None), placement, "model0")
    assert pools._owner_ranks(group) == [0, 0, 1, 1, 0]


def test_host_pool_of_several_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "ranks_on_node", lambda *_, **__: (0, 1))
    context: Any = SimpleNamespace(
        fabric=SimpleNamespace(control=SimpleNamespace(size=4)),
        deadline=1.0,
        accelerator=SimpleNamespace(topology=lambda: None),
    )
    pools = HostPools(context, np.zeros((1, 4), np.int32), "model0")
    with pytest.raises(IntegrationError, match="4 ranks are on several machines, and this one has"):
        pools(cast(Any, SimpleNamespace(group_number=0)))
    pools.close()
