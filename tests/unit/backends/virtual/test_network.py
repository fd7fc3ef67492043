"""The network: who meets whom, and who owns what meanwhile."""

import pytest
import torch
from helpers.strategies.virtual_worlds import SECONDS, Worlds, filled, opened, settle

from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.errors import (
    CommunicatorFailed,
    OperationTimeout,
)


def test_send_ends_only_after_receive_is_posted(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    send = left.isend(filled(world, 0, 3), 1)
    settle(world)
    assert not send.done()
    out = filled(world, 1, 0)
    receive = right.irecv(out, 0)
    settle(world)
    assert (send.done(), receive.done(), out.tolist()) == (True, True, [3] * 8)


def test_message_bytes_arrive_in_pieces(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    out = filled(world, 1, 0)
    works = [left.isend(filled(world, 0, 3), 1), right.irecv(out, 0)]
    progress = []
    while world.movable():
        world.advance(0)
        progress.append((out.tolist().count(3), [work.done() for work in works]))
    assert (4, [False, False]) in progress
    assert all(count == 8 for count, end_states in progress if any(end_states))


def test_operation_keeps_memory_until_its_end(
    make_world: Worlds,
) -> None:
    world = make_world(2)
    left, right = opened(world)
    send = left.isend(filled(world, 0, 3), 1)
    scribble = filled(world, 0, 9)
    assert world.leftovers()["blocks"] == 2
    out = filled(world, 1, 0)
    right.irecv(out, 0)
    settle(world)
    assert out.tolist() == [3] * 8
    del scribble, out
    assert send.done()  # whoever still holds the work holds no memory
    assert world.leftovers() == {"blocks": 0, "tasks": 0, "operations": 0, "events": 0}


def test_expired_receive_still_owns_its_memory(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    work = right.irecv(filled(world, 1, 0), 0)
    settle(world)
    assert world.expire()
    assert not world.expire()
    with pytest.raises(OperationTimeout, match="irecv from 0 of 'main' passed its deadline"):
        work.result(SECONDS)
    with pytest.raises(CommunicatorFailed, match="deadline"):
        right.barrier()
    innocent = filled(world, 1, 7)
    left.isend(filled(world, 0, 3), 1)  # comes late, and lands in memory that nobody reads
    settle(world)
    assert innocent.tolist() == [7] * 8
    assert world.leftovers()["operations"] == 0


def test_cancelled_receive_still_matches_send(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    work = right.irecv(filled(world, 1, 0), 0)
    work.cancel()
    assert work.done()
    with pytest.raises(CommunicatorFailed, match="cancelled"):
        work.result(0.0)
    send = left.isend(filled(world, 0, 3), 1)
    settle(world)
    send.result(0.0)


def test_result_until_deadline_expires_operation(make_world: Worlds) -> None:
    world = make_world(2)
    work = opened(world)[0].irecv(filled(world, 0, 0), 1)
    with pytest.raises(OperationTimeout):
        work.result(SECONDS)


def test_mismatched_collectives_time_out(
    make_world: Worlds,
) -> None:
    world = make_world(2)
    left, right = opened(world)
    works = [left.barrier(), right.all_reduce(filled(world, 1, 1))]
    settle(world)
    world.expire()
    for work in works:
        with pytest.raises(OperationTimeout):
            work.result(0.0)


def test_message_size_mismatch_fails_both_ends(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    out = filled(world, 1, 0, 4)
    works = [left.isend(filled(world, 0, 3), 1), right.irecv(out, 0)]
    settle(world)
    for work in works:
        with pytest.raises(CommunicatorFailed, match="8 bytes were sent where 4 were awaited"):
            work.result(0.0)
    assert out.tolist() == [0] * 4


def test_size_mismatch_ends_the_other_messages_of_the_exchange(make_world: Worlds) -> None:
    world = make_world(3)
    first, second, _ = opened(world)
    sends = PeerBuffer(1, filled(world, 0, 1)), PeerBuffer(2, filled(world, 0, 2))
    exchange = first.exchange(Exchange(sends, ()))
    short = second.irecv(filled(world, 1, 0, 4), 0)
    del sends
    settle(world)
    for work in (exchange, short):
        with pytest.raises(CommunicatorFailed, match="8 bytes were sent where 4 were awaited"):
            work.result(0.0)
    assert world.leftovers()["blocks"] == 0, "what nobody will meet is held by nobody"


def test_empty_exchange_blob_ends_without_peer(make_world: Worlds) -> None:
    world = make_world(2)
    nothing = torch.empty(0, dtype=torch.uint8)
    work = opened(world)[0].exchange(Exchange((PeerBuffer(1, nothing),), ()))
    settle(world)
    assert work.done()
    work.result(0.0)
