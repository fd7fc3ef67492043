"""Migrations in flight: whatever the interleaving, no buffer is written before its commit."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers.strategies.migration_routes import Change, changes
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.experts.planning.migration import MigrationPlan, RankTransfers

Task = tuple[str, int, int, int]
"""What is to happen (read, arrive or turn), on which rank, for which chunk, in which round."""


@dataclass
class MigrationSimulation:
    """Slots and staging buffers of all ranks; chunks are started, then committed, in order.

    Attributes:
        slots: what each local slot holds, by rank.
        staging: (chunk, expert) that each buffer holds, by rank; None where it is free.
        wire: what a message carries, by (chunk, round, sender, receiver).
        tasks: what the chunks in flight have still to do.
        open: chunks in flight.
    """

    migration: MigrationPlan
    change: Change
    slots: list[list[int]] = field(default_factory=list)
    staging: list[list[tuple[int, int] | None]] = field(default_factory=list)
    wire: dict[tuple[int, int, int, int], list[int]] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    committed: int = 0

    def __post_init__(self) -> None:
        shape = self.change.shape
        blocks = self.change.installed.reshape(shape.layers, shape.ranks, shape.slots_per_rank)
        self.slots = blocks.transpose(1, 0, 2).reshape(shape.ranks, -1).tolist()
        self.staging = [[None] * self.change.staging for _ in range(shape.ranks)]

    def transfers(self, rank: int, chunk: int) -> RankTransfers:
        return self.migration.for_rank(rank, chunk)

    def launches(self) -> list[int]:
        """The chunk that may be started now, if any."""
        following = self.committed + len(self.open)
        if following >= self.migration.chunks or len(self.open) == 2:
            return []
        fits = not self.open or self.migration.fits_with(self.open[0], following)
        return [following] if fits else []

    def launch(self, chunk: int) -> None:
        self.open.append(chunk)
        for rank in range(self.change.shape.ranks):
            self.tasks.append(("turn", rank, chunk, 0))
            for number, step in enumerate(self.transfers(rank, chunk).rounds):
                self.tasks += [("read", rank, chunk, number)] if step.send else []
                self.tasks += [("arrive", rank, chunk, number)] if step.receive else []

    def ready(self) -> list[Task]:
        """Tasks that can be done now: a message arrives after it was read."""
        return [task for task in self.tasks if task[0] != "arrive" or self._is_on_wire(task)]

    def _is_on_wire(self, task: Task) -> bool:
        _, rank, chunk, number = task
        receive = self.transfers(rank, chunk).rounds[number].receive
        return receive is not None and (chunk, number, receive.peer, rank) in self.wire

    def do(self, task: Task) -> None:
        what, rank, chunk, number = task
        self.tasks.remove(task)
        transfers = self.transfers(rank, chunk)
        if what == "turn":
            experts = [self.slots[rank][slot] for slot in transfers.local.sources]
            self._fill(rank, chunk, transfers.local.staging, experts)
        elif what == "read":
            send = transfers.rounds[number].send
            assert send
            experts = [self.slots[rank][slot] for slot in send.slots]
            self.wire[chunk, number, rank, send.peer] = experts
        else:
            receive = transfers.rounds[number].receive
            assert receive
            experts = self.wire.pop((chunk, number, receive.peer, rank))
            self._fill(rank, chunk, receive.staging, experts)

    def _fill(self, rank: int, chunk: int, buffers: tuple[int, ...], experts: list[int]) -> None:
        for buffer, expert in zip(buffers, experts, strict=True):
            assert self.staging[rank][buffer] is None, "a buffer is written before its commit"
            self.staging[rank][buffer] = chunk, expert

    def commits(self) -> list[int]:
        """The oldest chunk in flight, once all its tasks are done."""
        return [chunk for chunk in self.open[:1] if all(task[2] != chunk for task in self.tasks)]

    def commit(self, chunk: int) -> None:
        self.open.remove(chunk)
        self.committed += 1
        for rank in range(self.change.shape.ranks):
            for buffer, slot in self.transfers(rank, chunk).copies:
                staged_entry = self.staging[rank][buffer]
                assert staged_entry is not None
                assert staged_entry[0] == chunk
                self.slots[rank][slot] = staged_entry[1]
                self.staging[rank][buffer] = None


def run_in_any_order(change: Change, data: st.DataObject) -> MigrationSimulation:
    """Runs all tasks in a drawn order until every chunk is committed."""
    simulation = MigrationSimulation(change.plan(), change)
    while simulation.committed < simulation.migration.chunks:
        steps = [
            *((simulation.do, task) for task in simulation.ready()),
            *((simulation.launch, chunk) for chunk in simulation.launches()),
            *((simulation.commit, chunk) for chunk in simulation.commits()),
        ]
        assert steps, "nothing can be done, and not everything is committed"
        operation, subject = steps[data.draw(st.integers(0, len(steps) - 1))]
        operation(subject)  # type: ignore[operator]
    return simulation


@pytest.mark.slow
@given(changes(), st.data())
def test_migration_reaches_proposed_placement_under_any_interleaving(
    change: Change, data: st.DataObject
) -> None:
    simulation = run_in_any_order(change, data)
    shape = change.shape
    blocks = change.proposed.reshape(shape.layers, shape.ranks, shape.slots_per_rank)
    assert simulation.slots == blocks.transpose(1, 0, 2).reshape(shape.ranks, -1).tolist()
    assert not any(buffer for rank in simulation.staging for buffer in rank)
    assert simulation.wire == {}


def test_third_chunk_launches_after_commit_of_first() -> None:
    before = np.array([(0, 1)] * 3, dtype=np.int32)
    after = before[:, ::-1].copy()
    change = Change(
        before, after, (0, 1, 2), ExpertShape(3, 2, 2, 2), nodes=1, staging=2, slots_per_message=1
    )
    simulation = MigrationSimulation(change.plan(), change)
    simulation.launch(0)
    assert simulation.launches() == [1]
    simulation.launch(1)
    while ready := simulation.ready():
        simulation.do(ready[-1])
    assert (simulation.launches(), simulation.commits()) == ([], [0])
    simulation.commit(0)
    assert simulation.launches() == [2]


def test_chunk_that_does_not_fit_waits_for_commit() -> None:
    before = np.array([(0, 1)] * 2, dtype=np.int32)
    after = before[:, ::-1].copy()
    change = Change(
        before, after, (0, 1), ExpertShape(2, 2, 2, 2), nodes=1, staging=1, slots_per_message=1
    )
    simulation = MigrationSimulation(change.plan(), change)
    simulation.launch(0)
    assert simulation.launches() == []
