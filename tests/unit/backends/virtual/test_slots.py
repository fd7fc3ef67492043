"""Slots, pages and kernels in micro-steps."""

import pytest
import torch
from helpers.strategies.virtual_worlds import Worlds

from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.world import VirtualWorld
from equipoise.hal import routing
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import SlotError, SlotLeased
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SECONDS = 1.0
WIDTH = 8


def store_in(
    world: VirtualWorld, slots: int = 2, form: SlotFormat = SlotFormat.STRIDED
) -> VirtualSlotStore:
    segments = [(Segment("w", world.empty(0, WIDTH).fill_(0), form),) for _ in range(slots)]
    return world.accelerator(0).slot_store(SlotLayout(tuple(segments), staging=1))


def slot(store: VirtualSlotStore, number: int) -> list[int]:
    return store.layout.slots[number][0].data.tolist()


def test_commit_copies_slot_in_pieces(make_world: Worlds) -> None:
    world = make_world()
    store, stream = store_in(world), world.accelerator(0).stream(Role.COMPUTE)
    store.unpack(torch.full((WIDTH,), 5, dtype=torch.uint8), [0], stream)
    stream.synchronize(SECONDS)
    store.commit([(0, 1)], stream)
    world.advance(0)
    assert slot(store, 1) == [5] * 4 + [0] * 4
    stream.synchronize(SECONDS)
    assert slot(store, 1) == [5] * 8


def test_replay_on_leased_slot_is_refused(make_world: Worlds) -> None:
    world = make_world()
    store, device = store_in(world), world.accelerator(0)
    stream, graph = device.stream(Role.COMPUTE), device.graph()
    graph.capture(stream, lambda: store.commit([(0, 0)], stream))
    lease = store.lease([0])
    with pytest.raises(SlotLeased):
        graph.replay(stream)
    assert world.movable() == 0
    lease.release()
    graph.replay(stream)
    stream.synchronize(SECONDS)


def test_write_refuses_private_source_of_other_size(make_world: Worlds) -> None:
    world = make_world()
    store = store_in(world, form=SlotFormat.PRIVATE)
    larger = world.empty(0, 2 * WIDTH)[:WIDTH]
    with pytest.raises(SlotError, match="a source is"):
        store.write([1], [[larger]], world.accelerator(0).stream(Role.COPY))


def test_write_refuses_private_source_with_offset(make_world: Worlds) -> None:
    world = make_world()
    store = store_in(world, form=SlotFormat.PRIVATE)
    inside = world.empty(0, 2 * WIDTH)[WIDTH:]
    with pytest.raises(SlotError):
        store.write([1], [[inside]], world.accelerator(0).stream(Role.COPY))


def one_table() -> tuple[Tables, TableUpdate]:
    table = routing.build_table(
        torch.tensor([0, 1], dtype=torch.int32), torch.full((2,), 65536, dtype=torch.int32), 2
    )
    arrays = (t.view(1, -1) for t in (table.start, table.replicas, table.cumulative))
    return Tables.empty(1, 2, 2, 1, torch.device("cpu")), TableUpdate((0,), *arrays)


def test_commit_tables_writes_generation_in_last_micro_step(make_world: Worlds) -> None:
    world = make_world()
    tables, update = one_table()
    device = world.accelerator(0)
    device.kernels.commit_tables(update, tables, device.stream(Role.COMPUTE))
    words = []
    while world.movable():
        words.append(int(tables.generation))
        world.advance(0)
    assert (words, int(tables.generation)) == ([0, 0, 0, 0], 1)
    assert torch.equal(tables.start[1, 0], update.start[0])


def test_routing_reads_generation_and_tables_in_two_micro_steps(
    make_world: Worlds,
) -> None:
    world = make_world()
    tables, update = one_table()
    device = world.accelerator(0)
    device.kernels.commit_tables(update, tables, device.stream(Role.COMPUTE))
    device.synchronize(SECONDS)
    ids = torch.tensor([1, 0, 7], dtype=torch.int32)
    slots, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    device.kernels.route_and_count(
        ids, tables, Salt(0, 0, 0), slots, counts, device.stream(Role.COMPUTE)
    )
    world.advance(world.movable() - 1)
    assert counts.tolist() == [0, 0]
    device.synchronize(SECONDS)
    assert (slots.tolist(), counts.tolist()) == ([1, 0, 2], [1, 1])
