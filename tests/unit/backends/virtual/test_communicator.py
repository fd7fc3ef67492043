"""Operations beside streams, and the ends of communicators and ranks."""

import pytest
from helpers.strategies.virtual_worlds import (
    SECONDS,
    Worlds,
    filled,
    opened,
    settle,
    works_of_a_sum,
)

from equipoise.hal.errors import (
    CommunicatorFailed,
    OperationTimeout,
    StreamFailed,
    Unsupported,
)
from equipoise.hal.stream import Role


def test_operation_after_failed_stream_fails(make_world: Worlds) -> None:
    world = make_world(2)
    left, stream = opened(world)[0], world.accelerator(0).stream(Role.COMM)
    stream.launch(lambda: 1 // 0)
    with stream.current():
        work = left.isend(filled(world, 0, 1), 1)
    settle(world)
    with pytest.raises(CommunicatorFailed, match="its stream failed"):
        work.result(0.0)


def test_refused_operation_does_not_shift_matching(make_world: Worlds) -> None:
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


def test_operation_in_capture_is_unsupported(make_world: Worlds) -> None:
    world = make_world(2)
    left, device = opened(world)[0], world.accelerator(0)
    stream = device.stream(Role.COMM)
    with stream.current(), pytest.raises(Unsupported, match="captured"):
        device.graph().capture(stream, lambda: left.barrier())


def test_stream_waiting_for_failed_work_fails(make_world: Worlds) -> None:
    world = make_world(2)
    stream = world.accelerator(1).stream(Role.COMPUTE)
    opened(world)[1].irecv(filled(world, 1, 0), 0).wait(stream)
    world.expire()
    with pytest.raises(StreamFailed, match="deadline"):
        stream.synchronize(SECONDS)


def test_abort_fails_own_and_matched_operations(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    pair = [left.isend(filled(world, 0, 3), 1), right.irecv(filled(world, 1, 0), 0)]
    receive = left.irecv(filled(world, 0, 0), 1)
    for _ in range(3):
        world.advance(0)
    left.abort()
    for work, how in ((pair[0], "aborted"), (pair[1], "lost its peer"), (receive, "aborted")):
        with pytest.raises(CommunicatorFailed, match=how):
            work.result(0.0)
    with pytest.raises(CommunicatorFailed, match="aborted"):
        left.barrier()
    assert world.leftovers()["operations"] == 0


def test_aborted_receive_matches_no_later_send(make_world: Worlds) -> None:
    world = make_world(2)
    left, right = opened(world)
    left.irecv(filled(world, 0, 0), 1)
    settle(world)
    left.abort()
    late_send = right.isend(filled(world, 1, 3), 0)
    settle(world)
    assert not late_send.done()


def test_late_failure_does_not_affect_rebuilt_communicator(make_world: Worlds) -> None:
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


def test_purpose_can_be_reopened_after_close(make_world: Worlds) -> None:
    world = make_world(2)
    for _ in range(3):
        ends = opened(world)
        works = [end.barrier() for end in ends]
        settle(world)
        assert [work.done() for work in works] == [True, True]
        for work in works:
            work.result(0.0)
        for end in ends:
            end.close()


def test_subgroup_ranks_follow_given_order(make_world: Worlds) -> None:
    world = make_world(3)
    ends = opened(world, (2, 0))
    assert [(end.rank, end.size) for end in ends] == [(0, 2), (1, 2)]
    with pytest.raises(Unsupported):
        world.fabric(1).open("other", (2, 0))


def test_peers_learn_of_killed_rank_one_by_one(make_world: Worlds) -> None:
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
    loss = world.fabric(0).control.lost_rank(0.0)
    assert loss is not None
    assert loss.rank == 2
    late_receive = world.fabric(0).open("other").irecv(filled(world, 0, 0), 2)
    settle(world)
    with pytest.raises(CommunicatorFailed, match="lost its peer"):
        late_receive.result(0.0)


def test_stopped_rank_is_silent_after_deadline(make_world: Worlds) -> None:
    world = make_world(2)
    works = works_of_a_sum(world)
    world.accelerator(1).stream(Role.COMPUTE).launch(lambda: None)
    world.stop(1)
    settle(world)
    control = world.fabric(0).control
    control.set_operation("the sum")
    assert (works[0].done(), control.lost_rank(SECONDS)) == (False, None)
    assert world.expire()
    with pytest.raises(OperationTimeout, match="all_reduce of 'main'"):
        works[0].result(0.0)
    loss = control.lost_rank(0.0)
    assert loss is not None
    assert (loss.rank, loss.operation) == (1, "the sum")
    assert world.fabric(1).control.lost_rank(0.0) is None


def test_expire_reports_stopped_rank_without_pending_work(make_world: Worlds) -> None:
    world = make_world(2)
    world.stop(1)
    assert world.expire()
    assert not world.expire()
