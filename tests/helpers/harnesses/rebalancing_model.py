"""A tiny model without a model: slots that say what they hold, and steps that look at them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.balancer import (
    ExpertBalancer,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink
from equipoise.balancer.experts.runtime.jobs import immediate
from equipoise.balancer.experts.transfer.host_writes import HostWeights, StreamWriter
from equipoise.hal import registry as hal
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.checksum import checksum
from equipoise.hal.communicator import Fabric
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
STEPS = 26
HOT = (1, 1, 1, 61)
"""Rows per expert and rank in the first half of the steps."""
LATER = (1, 61, 1, 1)
"""The same in the second half. Each is hot where one rank holds it alone, so that a copy travels,
and not back to where it was."""


@dataclass(frozen=True)
class Observation:
    """What one rank's compute stream found in one step."""

    generations: tuple[int, ...]
    digest: str
    placement: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    """(layers, local slots): the experts that the slots really hold."""


@dataclass(frozen=True)
class Story:
    """One rank's run."""

    observations: tuple[Observation, ...]
    reports: tuple[RebalanceReport, ...]
    aborts: dict[str, int]

    @property
    def commits(self) -> list[int]:
        """Boundaries at which a rebalance was committed."""
        return [report.step for report in self.reports if report.outcome == "committed"]


@dataclass(frozen=True)
class Parts:
    """What a test may replace on a rank before its balancer is put together."""

    rank: int
    fabric: Fabric
    store: SlotStore


Break = Callable[[Parts], Parts]


def healthy(parts: Parts) -> Parts:
    """Replace nothing."""
    return parts


@dataclass(frozen=True)
class Pace:
    """How steps and background work are matched, so that tests depend on no clock.

    Before each step a rank waits up to `patience` seconds until its engine has nothing to do, and
    calls `hook` with the step's number.
    """

    patience: float = WATCHDOG
    hook: Callable[[int], object] = lambda step: None


SinkOfRank = Callable[[int], EventSink]
"""The event sink of a rank."""
UpdatePathFactory = Callable[[Accelerator, SlotStore], UpdatePathConfig]


def staged_from_peers(accelerator: Accelerator, store: SlotStore) -> UpdatePathConfig:
    """Weights come from the peer."""
    return StagedFromPeers()


class Numbers:
    """Every expert's weights in the host's memory: its number plus one."""

    def view(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        """One segment."""
        return (torch.full((5,), expert + 1.0),)

    def checksum(self, layer: int, expert: int) -> int:
        """Of its bytes."""
        return checksum(self.view(layer, expert)[0])


def in_place_from_host(accelerator: Accelerator, store: SlotStore) -> UpdatePathConfig:
    """Weights come from the host's memory."""
    supply = HostWeights(Numbers(), StreamWriter(accelerator, store))
    return InPlaceFromHost(supply, hal.accelerator("cpu").capabilities)


def rebalance(
    breakage: Break = healthy,
    shares: ShareMode = ShareMode.STATIC,
    pace: Pace | None = None,
    update_path: UpdatePathFactory = staged_from_peers,
    event_sinks: SinkOfRank = lambda rank: NO_EVENTS,
    staging: int = SHAPE.layers * SHAPE.slots_per_rank,
    **config: Any,
) -> list[Story]:
    """Run `STEPS` steps on two ranks, each with this `breakage` and this `update_path`."""
    pace = pace or Pace()
    settings = BalancerConfig(
        **{
            "name": "test",
            "shares": shares,
            "window_size": 2,
            "step_interval": 4,
            "sub_window": 2,
            "timeout": WATCHDOG,
            **config,
        }
    )
    return on_ranks(
        SHAPE.ranks,
        lambda member: _serve(member, breakage, settings, pace, update_path, event_sinks, staging),
    )


def _serve(
    member: GroupMember,
    breakage: Break,
    settings: BalancerConfig,
    pace: Pace,
    update_path: UpdatePathFactory,
    event_sinks: SinkOfRank,
    staging: int,
) -> Story:
    weights = _weights(member.rank, staging)
    store = member.accelerator.slot_store(weights)
    parts = breakage(Parts(member.rank, member.fabric, store))
    placement = initial_placement(SHAPE)
    layout = Layout(placement, even_shares(placement, SHAPE.experts))
    path = update_path(member.accelerator, parts.store)
    balancer = open_balancer(
        member.accelerator,
        parts.fabric,
        parts.store,
        SHAPE,
        layout,
        settings,
        path,
        event_sink=event_sinks(member.rank),
    )
    lockstep = member.fabric.open("lockstep")
    observations: list[Observation] = []
    for step in range(STEPS):
        pace.hook(step)
        balancer.before_step(step)
        _let_work(balancer, pace)
        observations.append(_look(member, balancer, weights, step))
        lockstep.barrier().result(WATCHDOG)  # stands for the exchange of tokens
    balancer.close()
    lockstep.barrier().result(WATCHDOG)
    return Story(tuple(observations), tuple(balancer.engine.reports), dict(balancer.engine.aborts))


def _let_work(balancer: ExpertBalancer, pace: Pace) -> None:
    """Wait until what the engine has begun is through, as it is between real steps."""
    workers = balancer.engine._workers
    through = [
        worker.start(immediate(lambda: None), "look")
        for worker in (workers.planner, workers.transfer)
    ]
    workers.release()
    for task in through:
        with suppress(TimeoutError):
            task.result(pace.patience)


def _look(
    member: GroupMember, balancer: ExpertBalancer, weights: SlotLayout, step: int
) -> Observation:
    """One step: read slots and tables on the compute stream, then add this step's load."""
    compute = member.accelerator.stream(Role.COMPUTE)
    observations: list[Observation] = []
    rows = HOT if step < STEPS // 2 else LATER

    def program() -> None:
        contents = []
        for layer in range(SHAPE.layers):
            with balancer.reading_slots(layer, step):
                contents.append(_contents(weights, layer))
        installed = balancer.serving_state
        observations.append(
            Observation(
                tuple(installed.tables.generation.tolist()),
                installed.layout.digest,
                tuple(map(tuple, installed.layout.placement.tolist())),
                tuple(contents),
            )
        )
        balancer.load.counters += torch.tensor(rows, dtype=torch.int32)

    compute.launch(program)
    compute.synchronize(WATCHDOG)
    return observations[0]


def _contents(weights: SlotLayout, layer: int) -> tuple[int, ...]:
    """The experts that this rank's slots of a layer hold."""
    per = SHAPE.slots_per_rank
    slots = weights.slots[layer * per : (layer + 1) * per]
    return tuple(int(slot[0].data[0]) - 1 for slot in slots)


def _weights(rank: int, staging: int) -> SlotLayout:
    """Slots that each hold the number of their expert plus one, in a tensor shared by all."""
    per = SHAPE.slots_per_rank
    mine = initial_placement(SHAPE)[:, rank * per : (rank + 1) * per]
    stacked = torch.tensor(mine + 1, dtype=torch.float32).reshape(-1, 1).repeat(1, 5)
    slots = tuple((Segment("weight", row),) for row in stacked)
    return SlotLayout(slots, staging)


def violations(records: list[Story]) -> list[str]:
    """Everything that must never be seen, in words; empty for a healthy engine."""
    messages = []
    for step in range(STEPS):
        observations = [record.observations[step] for record in records]
        if len({observation.generations for observation in observations}) > 1:
            messages.append(f"step {step}: generations differ")
        if len({observation.digest for observation in observations}) > 1:
            messages.append(f"step {step}: layouts differ")
        for rank, observation in enumerate(observations):
            mine = slice(rank * SHAPE.slots_per_rank, (rank + 1) * SHAPE.slots_per_rank)
            for layer, contents in enumerate(observation.contents):
                if contents != observation.placement[layer][mine]:
                    where = f"step {step}: rank {rank}, layer {layer}"
                    messages.append(
                        f"{where} holds {contents}, promised {observation.placement[layer][mine]}"
                    )
    return messages
