"""One rank of an explored world: its engine, whose jobs are lanes, and its host."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from exploration.engine.case import Case
from exploration.engine.faulty_fabric import RiggedFabric, RiggedStore, Traps
from exploration.engine.forward_model import Forward, weights
from exploration.engine.in_place_weights import update_path
from exploration.engine.lane import LaneWorker
from exploration.engine.records import After

from equipoise.backends.virtual.stream import VirtualStream
from equipoise.backends.virtual.world import VirtualWorld
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.balancer import ExpertBalancer, build
from equipoise.balancer.experts.context import BalancerContext
from equipoise.balancer.experts.engine.engine import RebalanceEngine
from equipoise.balancer.experts.engine.states import Voting, outcome_key
from equipoise.balancer.experts.placement import Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.experts.runtime.jobs import EventDone, Job
from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Event, Role


@dataclass
class ExploredRank:
    """What a rank's host works with.

    Attributes:
        world: where it sits.
        case: what it plays.
        rank: its number.
        traps: faults that wait for it.
        fabric: its connection.
        balancer: the engine under test, and what it has installed.
        tokens: stands for the exchange of tokens.
        forward: its steps.
        workers: of its engine, by kind.
        at: the boundary that it has come to; -1 before the first.
        after: what was installed behind each boundary.
        stages: what the rank voted on behind each boundary; empty where it did not.
    """

    world: VirtualWorld
    case: Case
    rank: int
    traps: Traps
    fabric: RiggedFabric
    balancer: ExpertBalancer
    tokens: Communicator
    forward: Forward
    workers: dict[str, LaneWorker]
    at: int = -1
    after: list[After] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    @property
    def engine(self) -> RebalanceEngine:
        """The engine under test."""
        return self.balancer.engine

    def serve(self, turn: Callable[[int], object]) -> Job[None]:
        """All steps; `turn` is told of each boundary before it."""
        readers = self._readers()
        forward_events: deque[Event] = deque()
        for step in range(self.case.steps + self.case.tail):
            self.at = step
            turn(step)
            self.engine.after_launch()  # what `boundary` does before it begins
            if step >= self.engine._next_step:
                yield from self.engine.run_boundary(step)
            if self.case.schedule and (step + self.rank) % 2:
                self.engine.after_launch()  # by whoever does not know when the forward is launched
            layout = self.balancer.serving_state.layout
            self.after.append(After(layout.placement.tobytes(), layout.shares.tobytes()))
            forward_events.append((yield from self._forward(step, readers)))
            self._note()
            while len(forward_events) > self.case.ahead:
                yield EventDone(forward_events.popleft())
        for event in (
            *forward_events,
            *(self._record_event(stream) for stream in readers.values()),
        ):
            yield EventDone(event)
        yield from self.balancer.load.drain()

    def _note(self) -> None:
        """What is voted on beside a step."""
        state = self.engine.state
        stage = ""
        if isinstance(state, Voting):
            stage = f"{state.rebalance.number}/{outcome_key(state)}"
        self.stages.append(stage)

    def _readers(self) -> dict[str, VirtualStream]:
        """The compute stream, and the attached one if this rank has any."""
        accelerator = self.world.accelerator(self.rank)
        readers = {"compute": accelerator.stream(Role.COMPUTE)}
        if self.rank in self.case.readers:
            readers["aux"] = accelerator.stream(Role.AUX)
            self.balancer.serving_state.attach(readers["aux"])
        return readers

    def _forward(self, step: int, readers: dict[str, VirtualStream]) -> Job[Event]:
        """One step: all layers on every reader, then the exchange of tokens with all ranks."""
        self.forward.launch(readers, step)
        compute, hot = readers["compute"], self.case.hot
        self.forward.count(compute, hot[step // 3 % len(hot)])
        self.engine.after_launch()
        if not self.tokens.capabilities.stream_ordered:
            yield EventDone(self._record_event(compute))
        with compute.current():
            work = self.tokens.barrier()
        work.wait(compute)
        return self._record_event(compute)

    def _record_event(self, stream: VirtualStream) -> Event:
        event = self.world.accelerator(self.rank).event()
        stream.record(event)
        return event


def explored_rank(
    world: VirtualWorld, case: Case, rank: int, set_acting: Callable[[int], object]
) -> ExploredRank:
    """A rank, put together; nothing has moved yet."""
    shape, traps, accelerator = case.shape, Traps(), world.accelerator(rank)
    fabric: Any = RiggedFabric(world.fabric(rank), traps)
    placement = initial_placement(shape)
    layout = Layout(placement, even_shares(placement, shape.experts))
    slots = weights(placement, rank, shape, case.staging)
    workers: dict[str, LaneWorker] = {}

    def new_worker(kind: Track) -> LaneWorker:
        workers[kind] = LaneWorker(rank, kind, set_acting)
        return workers[kind]

    store: Any = RiggedStore(accelerator.slot_store(slots), traps)
    path = update_path(case, accelerator, store)
    # Put together here: to open it all ranks would have to come at once.
    members = EPGroup(tuple(range(shape.ranks)), rank)
    context = BalancerContext(accelerator, fabric, store, case.config, path, new_worker, members)
    balancer = build(context, shape, layout)
    tables, counters = balancer.serving_state.tables, balancer.load.counters
    forward = Forward(rank, shape, slots, tables, counters, balancer.reading_slots)
    tokens = fabric.open("tokens")
    return ExploredRank(world, case, rank, traps, fabric, balancer, tokens, forward, workers)
