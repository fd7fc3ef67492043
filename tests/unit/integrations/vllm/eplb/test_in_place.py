"""`commit: in_place`: which layer's lock is held when, and who fills the host's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.processes.thread_control_plane import ThreadControl, meet
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancer.experts.open import LayerGroupContext
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal import registry
from equipoise.hal.accelerator import open_for_rank
from equipoise.hal.errors import IntegrationError
from equipoise.hal.stream import Role
from equipoise.integrations.vllm.eplb import in_place
from equipoise.integrations.vllm.eplb.in_place import HostPools, SlotReads


class Locks:
    """Records which layer is held, and whether it was entered and left in an ordered section."""

    def __init__(self) -> None:
        self.ordered = 0
        self.log: list[tuple[str, int, int]] = []
        self.broken: int | None = None
        self.left_in_order = False

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
        self.left_in_order = bool(self.ordered)
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


def test_slot_reads_run_the_boundary_when_the_next_step_enters_its_first_layer() -> None:
    """An engine that idles between two steps would otherwise idle with a layer handed over."""
    locks, boundaries = Locks(), list[int]()
    reads = SlotReads(locks.reading_slots, cast(Any, locks))
    for step in range(3):
        for layer in range(2):
            reads.enter(layer, step)
            assert boundaries == list(range(1, step + 1))
        with locks.ordered_section():
            reads.end_step(lambda step=step: boundaries.append(step + 1))  # type: ignore[misc]
        assert locks.log[-1] == ("leave", 1, step)
        assert boundaries == list(range(1, step + 1)), "not before the next step"


def test_slot_reads_leave_the_last_layer_in_an_ordered_section_at_the_end() -> None:
    locks = Locks()
    reads = SlotReads(locks.reading_slots, cast(Any, locks))
    reads.enter(0, 0)
    reads.leave_in_order()
    assert locks.log[-1] == ("leave", 0, 0)
    assert locks.left_in_order


def test_slot_reads_leave_the_layer_before_one_that_cannot_be_entered() -> None:
    locks = Locks()
    reads = SlotReads(locks.reading_slots, cast(Any, locks))
    reads.enter(0, 7)
    locks.broken = 1
    with pytest.raises(IntegrationError, match="poisoned"):
        reads.enter(1, 7)
    reads.leave_in_order()
    assert locks.log == [("enter", 0, 7), ("leave", 0, 7)]


@given(st.integers(2, 8), st.integers(1, 8), st.data())
def test_host_pool_owners_have_their_experts_and_share_the_work(
    ranks: int, per_rank: int, data: st.DataObject
) -> None:
    """As after loading: every expert once, then the first ones again."""
    experts = data.draw(st.integers(1, ranks * per_rank))
    row = [slot % experts for slot in range(ranks * per_rank)]
    pools = HostPools(cast(Any, None), np.array([row, row], dtype=np.int32), "model0")
    owners = pools._owner_ranks(per_rank)
    assert len(owners) == experts
    for expert, owner in enumerate(owners):
        assert expert in row[owner * per_rank : (owner + 1) * per_rank]
    only_there = [
        sum(len({slot // per_rank for slot, e in enumerate(row) if e == expert}) == 1
            for expert in {*row[rank * per_rank : (rank + 1) * per_rank]})
        for rank in range(ranks)
    ]  # fmt: skip
    fair = max(-(-experts // ranks), *only_there)
    assert max(owners.count(rank) for rank in range(ranks)) <= fair + 1


def test_host_pool_holds_what_is_in_the_slots_of_every_layer_and_group() -> None:
    """Two ranks, three layers of two shapes, one redundant expert a rank."""
    placement = np.array([[0, 1, 2, 3, 4, 0]] * 3, dtype=np.int32)

    def weights(layer: int, expert: int) -> Tensor:
        return torch.full((2 + layer % 2, 3), 10.0 * layer + expert)

    def program(control: ThreadControl) -> bool:
        accelerator = open_for_rank(registry.accelerator("cpu"), 0)
        models = ModelRegistry("model", 3, 5)
        tensors = {}
        for layer in range(3):
            held = placement[layer, control.rank * 3 : control.rank * 3 + 3].tolist()
            tensors[layer] = torch.stack([weights(layer, expert) for expert in held])
            models.register(layer, w=tensors[layer])
        model = models.finalize((f"layers.{at}.w", each) for at, each in tensors.items())
        context: Any = SimpleNamespace(
            fabric=SimpleNamespace(control=control),
            deadline=WATCHDOG,
            accelerator=accelerator,
            streams=SimpleNamespace(compute_stream=accelerator.stream(Role.COMPUTE)),
        )
        pools = HostPools(context, placement, "model")
        right = []
        for number, group in enumerate(model.groups):
            store = accelerator.slot_store(group.layout(0))
            path = pools(LayerGroupContext(accelerator, model, number, store))
            right += [
                torch.equal(path.host_weights.source.view(row, expert)[0], weights(layer, expert))
                for row, layer in enumerate(group.layers)
                for expert in range(5)
            ]
        pools.close()
        accelerator.close()
        return len(right) == 15 and all(right)

    assert meet(2, program) == [True, True]


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
