"""Operations beside streams, and the ends of communicators and ranks."""

import pytest
from helpers.strategies.worlds import SECONDS, Worlds, filled, opened, settle, works_of_a_sum

from equipoise.hal.errors import (
    CommunicatorFailed,
    OperationTimeout,
    StreamFailed,
    Unsupported,
)
from equipoise.hal.stream import Role


def test_an_operation_behind_a_failed_stream_fails(make_world: Worlds) -> None:
    world = make_world(2)
    left, stream = opened(world)[0], world.accelerator(0).stream(Role.COMM)
    stream.launch(lambda: 1 // 0)
    with stream.current():
        work = left.isend(filled(world, 0, 1), 1)
    settle(world)
    with pytest.raises(CommunicatorFailed, match="its stream failed"):
        work.result(0.0)


def test_a_refused_operation_takes_no_number(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    stream = world.accelerator(0).stream(Role.COMM)
    stream.launch(lambda: 1 // 0)
    settle(world)
    with stream.current(), pytest.raises(StreamFailed):
        left.barrier()
    works = [left.barrier(), right.barrier()]
    settle(world)
    for work in works:
        work.result(0.0)


def test_an_operation_cannot_be_captured(make_world: Worlds) -> None:
    world = make_world(2)
    left, device = opened(world)[0], world.accelerator(0)
    stream = device.stream(Role.COMM)
    with stream.current(), pytest.raises(Unsupported, match="captured"):
        device.graph().capture(stream, lambda: left.barrier())


def test_a_stream_that_waits_for_a_failed_work_fails(make_world: Worlds) -> None:
    world = make_world(2)
    stream = world.accelerator(1).stream(Role.COMPUTE)
    opened(world)[1].irecv(filled(world, 1, 0), 0).wait(stream)
    world.expire()
    with pytest.raises(StreamFailed, match="deadline"):
        stream.synchronize(SECONDS)


def test_abort_ends_what_is_in_flight_here_and_what_it_had_met(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    met = [left.isend(filled(world, 0, 3), 1), right.irecv(filled(world, 1, 0), 0)]
    alone = left.irecv(filled(world, 0, 0), 1)
    for _ in range(3):
        world.advance(0)
    left.abort()
    for work, how in ((met[0], "aborted"), (met[1], "lost its peer"), (alone, "aborted")):
        with pytest.raises(CommunicatorFailed, match=how):
            work.result(0.0)
    with pytest.raises(CommunicatorFailed, match="aborted"):
        left.barrier()
    assert world.leftovers()["operations"] == 0


def test_what_was_aborted_meets_nobody_any_more(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    left.irecv(filled(world, 0, 0), 1)
    settle(world)
    left.abort()
    late = right.isend(filled(world, 1, 3), 0)
    settle(world)
    assert not late.done()


def test_what_fails_late_says_nothing_of_the_rebuilt_communicator(make_world: Worlds) -> None:
    world = make_world(2)
    ends = opened(world)
    old = ends[0].irecv(filled(world, 0, 0), 1)
    for end in ends:
        end.rebuild((0, 1))
    assert world.expire()
    with pytest.raises(OperationTimeout):
        old.result(0.0)
    works = [end.barrier() for end in ends]
    settle(world)
    for work in works:
        work.result(0.0)


def test_a_purpose_may_be_opened_anew_after_its_end(make_world: Worlds) -> None:
    world = make_world(2)
    for _ in range(3):
        ends = opened(world)
        works = [end.barrier() for end in ends]
        settle(world)
        for work in works:
            work.result(0.0)
        for end in ends:
            end.close()


def test_ranks_of_a_subgroup_are_counted_in_its_order(make_world: Worlds) -> None:
    world = make_world(3)
    ends = opened(world, (2, 0))
    assert [(end.rank, end.size) for end in ends] == [(0, 2), (1, 2)]
    with pytest.raises(Unsupported):
        world.fabric(1).open("other", (2, 0))


def test_the_peers_of_a_killed_rank_learn_it_one_by_one(make_world: Worlds) -> None:
    world = make_world(3)
    ends = opened(world)
    works = [end.barrier() for end in ends[:2]]
    settle(world)
    world.kill(2)
    assert world.movable() == 1
    world.advance(0)
    assert [work.done() for work in works] == [True, False]
    settle(world)
    for work in works:
        with pytest.raises(CommunicatorFailed, match="barrier of 'main' lost its peer"):
            work.result(0.0)
    lost = world.fabric(0).control.lost(0.0)
    assert lost is not None
    assert lost.rank == 2
    late = world.fabric(0).open("other").irecv(filled(world, 0, 0), 2)
    settle(world)
    with pytest.raises(CommunicatorFailed, match="lost its peer"):
        late.result(0.0)


def test_nothing_of_a_stopped_rank_moves_and_time_makes_it_silent(make_world: Worlds) -> None:
    world = make_world(2)
    works = works_of_a_sum(world)
    world.accelerator(1).stream(Role.COMPUTE).launch(lambda: None)
    world.stop(1)
    settle(world)
    control = world.fabric(0).control
    control.enter("the sum")
    assert (works[0].done(), control.lost(SECONDS)) == (False, None)
    assert world.expire()
    with pytest.raises(OperationTimeout, match="all_reduce of 'main'"):
        works[0].result(0.0)
    lost = control.lost(0.0)
    assert lost is not None
    assert (lost.rank, lost.operation) == (1, "the sum")
    assert world.fabric(1).control.lost(0.0) is None


def test_time_tells_a_stopped_rank_even_when_nothing_is_pending(make_world: Worlds) -> None:
    world = make_world(2)
    world.stop(1)
    assert world.expire()
    assert not world.expire()
