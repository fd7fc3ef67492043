"""What a serve loop holds."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks

from equipoise.balancer.experts.balancer import NO_REBALANCING, ExpertBalancer, open_balancer
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.load_window import Reducing
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    even_shares,
    initial_placement,
    solve_shares,
)
from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.experts.runtime.workers import ThreadWorker, Worker
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import CommunicatorFailed, EngineError, StreamTimeout
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role, Stream

SHAPE = ExpertShape(layers=1, experts=2, slots=2, ranks=1)
STEPS = 9
LAYOUT = Layout(initial_placement(SHAPE), even_shares(initial_placement(SHAPE), SHAPE.experts))
SLOTS = SlotLayout(tuple((Segment("weight", row),) for row in torch.zeros(2, 4)), staging=2)
CONFIG = BalancerConfig(
    name="test", shares=ShareMode.LAGGED, window_size=2, step_interval=4, sub_window=2
)


class ReportingWorker(ThreadWorker):
    """A worker that records the jobs it starts."""

    def __init__(self, kind: Track, started_jobs: list[str]) -> None:
        super().__init__(kind, 20.0)
        self._started_jobs = started_jobs

    def release(self) -> None:
        self._started_jobs += [self._kind] * len(self._queued)
        super().release()


@contextmanager
def open_test_balancer(
    member: GroupMember, started_jobs: list[str], deadline: float = CONFIG.timeout
) -> Iterator[ExpertBalancer]:
    balancer = open_balancer(
        member.accelerator,
        member.fabric,
        member.accelerator.slot_store(SLOTS),
        SHAPE,
        LAYOUT,
        replace(CONFIG, timeout=deadline),
        new_worker=lambda kind: ReportingWorker(kind, started_jobs),
    )
    try:
        yield balancer
    finally:
        balancer.close()


def test_balancer_step_starts_background_work_after_launch() -> None:
    def program(member: GroupMember) -> list[tuple[int, list[str]]]:
        started_jobs: list[str] = []
        jobs_by_step = []
        with open_test_balancer(member, started_jobs) as balancer:
            for step in range(STEPS):
                jobs_before = len(started_jobs)
                with balancer.step(step):
                    assert len(started_jobs) == jobs_before, f"step {step} is not launched"
                jobs_by_step.append((step, started_jobs[jobs_before:]))
        return jobs_by_step

    ((*step_jobs,),) = on_ranks(1, program)
    jobs_of_step = dict(step_jobs)
    assert {step for step in jobs_of_step if "load" in jobs_of_step[step]} == {2, 4, 6, 8}
    assert jobs_of_step[3] == ["shares"]
    assert set(jobs_of_step[5]) == {"vote", "shares", "planner"}
    assert jobs_of_step[0] == jobs_of_step[1] == []


def test_boundary_without_launch_starts_background_work_at_once() -> None:
    def program(member: GroupMember) -> list[str]:
        started_jobs: list[str] = []
        with open_test_balancer(member, started_jobs) as balancer:
            for step in range(3):
                balancer.before_step(step)
            return list(started_jobs)

    assert on_ranks(1, program) == [["load"]]


def test_failed_launch_leaves_no_job_that_never_starts() -> None:
    def program(member: GroupMember) -> list[str]:
        started_jobs: list[str] = []
        with open_test_balancer(member, started_jobs) as balancer:
            balancer.before_step(0)
            balancer.before_step(1)
            with pytest.raises(RuntimeError, match="no memory"), balancer.step(2):
                raise RuntimeError("no memory")
            return list(started_jobs)

    assert on_ranks(1, program) == [["load"]]


def test_boundary_after_close_raises_and_second_close_does_not() -> None:
    def program(member: GroupMember) -> None:
        with open_test_balancer(member, []) as balancer:
            balancer.before_step(0)
            with balancer.step(1):
                balancer.close()  # a loop that fails closes from within
            for step in (1, 2):
                with pytest.raises(EngineError, match=rf"boundary {step} .* closed"):
                    balancer.before_step(step)
            balancer.close()

    on_ranks(1, program)


def test_static_balancer_raises_at_boundary_after_close() -> None:
    def program(member: GroupMember) -> None:
        resources = member.accelerator, member.fabric, member.accelerator.slot_store(SLOTS)
        balancer = open_balancer(*resources, SHAPE, LAYOUT, CONFIG, NO_REBALANCING)
        balancer.before_step(0)
        balancer.close()
        balancer.close()
        with pytest.raises(EngineError, match=r"boundary 1 .* closed"):
            balancer.before_step(1)

    on_ranks(1, program)


@pytest.mark.parametrize("shares", ShareMode)
def test_balancer_without_rebalancing_keeps_layout_and_sums_load(shares: ShareMode) -> None:
    shape = ExpertShape(layers=1, experts=3, slots=4, ranks=2)
    placement = initial_placement(shape)
    layout = Layout(placement, even_shares(placement, shape.experts))
    slots = SlotLayout(tuple((Segment("weight", row),) for row in torch.zeros(2, 4)), staging=0)
    ids = torch.tensor([[0], [1], [1], [1]], dtype=torch.int32)
    load = np.array([[4, 12, 0]])
    assert (solve_shares(load, placement, shape) != layout.shares).any(), "others would be better"

    def program(member: GroupMember) -> list[list[int]]:
        resources = member.accelerator, member.fabric, member.accelerator.slot_store(slots)
        config = replace(CONFIG, shares=shares)
        balancer = open_balancer(*resources, shape, layout, config, NO_REBALANCING)
        compute, sums = member.accelerator.stream(Role.COMPUTE), []
        for step in range(4 * CONFIG.step_interval):
            with balancer.step(step):
                compute.launch(partial(balancer.router.route, 0, step, ids))
            sums += [load_sum[0].tolist() for load_sum in balancer.load.sums]
        balancer.close()
        assert balancer.serving_state.layout.digest == layout.digest
        assert not balancer.engine.reports
        return sums

    for sums in on_ranks(2, program):
        assert sums
        assert {*map(tuple, sums)} == {(4, 12, 0)}, "rows of two steps on two ranks"


def test_balancer_close_ends_communicators_after_failed_load_sum() -> None:
    def program(member: GroupMember) -> None:
        with open_test_balancer(member, []) as balancer:
            for step in range(3):  # behind the last a sum is under way
                balancer.before_step(step)
            loads, *others = balancer.communicators
            balancer.load._state = Reducing(torch.zeros(1), LostSum())
            with pytest.raises(CommunicatorFailed, match="lost its peer"):
                balancer.close()
            for communicator in (loads, *others):
                with pytest.raises(CommunicatorFailed, match="was closed"):
                    communicator.barrier()

    on_ranks(1, program)


def test_balancer_close_ends_communicators_after_stream_timeout() -> None:
    def program(member: GroupMember) -> None:
        stream_gate = threading.Event()
        with open_test_balancer(member, [], deadline=0.2) as balancer:
            member.accelerator.stream(Role.COMPUTE).launch(lambda: stream_gate.wait(20.0))
            with pytest.raises(StreamTimeout):
                balancer.close()
            for communicator in balancer.communicators:
                with pytest.raises(CommunicatorFailed, match="was closed"):
                    communicator.barrier()
            stream_gate.set()

    on_ranks(1, program)


OPEN_PARTS = {".loads": (0, 0), ".moves": (1, 0), "planner": (2, 0), "vote": (2, 2)}
"""Communicators and workers that are open when the named part fails."""


@pytest.mark.parametrize("failing_part", OPEN_PARTS)
def test_open_balancer_closes_opened_parts_when_the_next_fails(failing_part: str) -> None:
    def program(member: GroupMember) -> None:
        fabric, opened_workers, closed_workers = (
            FailingFabric(member.fabric, failing_part),
            list[str](),
            list[str](),
        )

        def new_worker(kind: Track) -> Worker:
            if kind == failing_part:
                raise CommunicatorFailed(f"no {kind}")
            opened_workers.append(kind)
            return ClosingWorker(kind, closed_workers)

        resources = member.accelerator, fabric, member.accelerator.slot_store(SLOTS)
        with pytest.raises(CommunicatorFailed, match=f"no .*{failing_part}"):
            open_balancer(*resources, SHAPE, LAYOUT, CONFIG, new_worker=new_worker)  # type: ignore[arg-type]
        assert (len(fabric.communicators), len(opened_workers)) == OPEN_PARTS[failing_part]
        for communicator in fabric.communicators:
            with pytest.raises(CommunicatorFailed, match="was closed"):
                communicator.barrier()
        assert closed_workers == opened_workers[::-1]

    on_ranks(1, program)


class ClosingWorker(ThreadWorker):
    """A worker that records that it was closed."""

    def __init__(self, kind: Track, closed_kinds: list[str]) -> None:
        super().__init__(kind, 20.0)
        self._closed_kinds = closed_kinds

    def close(self) -> None:
        self._closed_kinds.append(self._kind)
        super().close()


class FailingFabric:
    """A fabric that fails for one purpose and records the communicators of all others."""

    def __init__(self, inner: Fabric, failing_purpose: str) -> None:
        self._inner = inner
        self._failing_purpose = failing_purpose
        self.control = inner.control
        self.communicators: list[Communicator] = []

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        if purpose.endswith(self._failing_purpose):
            raise CommunicatorFailed(f"no {purpose}")
        self.communicators.append(self._inner.open(purpose, ranks))
        return self.communicators[-1]


class LostSum:
    """A sum whose peer is gone."""

    def done(self) -> bool:
        return True

    def wait(self, stream: Stream) -> None:
        raise CommunicatorFailed("lost its peer")

    def result(self, timeout: float) -> None:
        raise CommunicatorFailed("lost its peer")

    def cancel(self) -> None: ...
