"""Checks before anything is opened: a start that can work here, and is the same on every rank.

A difference would show later as rebalances that abort for ever, as hangs, or not at all: a row that
is sent to a rank that does not exist goes nowhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from equipoise.balancer.experts.builder import StagedFromPeers, UpdatePathConfig
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.placement import ExpertShape, Layout, check_placement
from equipoise.balancer.experts.planning.topology import topology
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost, EngineError, PlacementError
from equipoise.hal.slots import SlotStore

Words = Mapping[str, str]
"""What a rank means, by what it is about."""
WATCHED = "watched"
"""Each rank's own business: all are told."""


@dataclass(frozen=True)
class StartupSpec:
    """What a balancer is to be opened with.

    Attributes:
        store: this rank's slots.
        shape: how many of everything.
        layout: what the slots hold.
        config: cadence, bounds and share mode.
        path: how weights come into slots.
    """

    store: SlotStore
    shape: ExpertShape
    layout: Layout
    config: BalancerConfig
    path: UpdatePathConfig

    def check(self, ranks: int) -> None:
        """See that it can work on so many ranks.

        Raises:
            PlacementError: the layout is not of the shape, the shape not of these ranks, or there
                are too few slots, ranks or nodes to survive what the aims say.
            EngineError: the store has other slots, or no staging where weights come from peers.
        """
        shape, slots, staging = self.shape, self.store.layout.slots, self.store.layout.staging
        if shape.ranks != ranks:
            raise PlacementError(f"the shape is of {shape.ranks} ranks, the group of {ranks}")
        check_placement(self.layout.placement, shape)
        topology(shape, self.config.nodes, self.config.planner.survive, None)
        wanted = shape.layers * shape.slots_per_rank
        if len(slots) != wanted:
            raise EngineError(
                f"the store has {len(slots)} slots; {shape.layers} layers of "
                f"{shape.slots_per_rank} slots a rank take {wanted}"
            )
        if isinstance(self.path, StagedFromPeers) and not staging:
            raise EngineError("weights that come by the boundary need a store with staging")

    def said(self) -> Words:
        """What has to be alike."""
        return {
            "shape": str(self.shape),
            "layout": self.layout.digest,
            "config": comparable(self.config),
            "path": type(self.path).__name__,
            "staging": str(self.store.layout.staging),
        }


def check_same_on_all_ranks(control: ControlPlane, opening: StartupSpec, watched: str) -> bool:
    """See that all ranks open the same; whether any of them is watched.

    Args:
        control: of the ranks.
        opening: what this rank opens.
        watched: not empty where this rank has a journal: then all ranks sum what it is told.

    Raises:
        AgreementLost: a rank means something else; nothing has been opened.
        BallotIncomplete: a rank does not come.
    """
    config, mine = opening.config, {**opening.said(), WATCHED: watched}
    told = exchange(control, f"{config.name}/opened", config.timeout, [mine])
    for rank, (theirs,) in enumerate(told):
        if (what := first_difference(mine, theirs)) is not None:
            raise AgreementLost(
                f"balancer {config.name!r}: rank {rank} has {what} {theirs.get(what)}, rank "
                f"{control.rank} has {mine[what]}"
            )
    return any(theirs.get(WATCHED) for (theirs,) in told)


def comparable(config: BalancerConfig) -> str:
    """What ranks have to configure alike; who writes lines to a log is each one's own business."""
    return repr(replace(config, log_balancedness=False, log_balancedness_interval=1))


def exchange(
    control: ControlPlane, question: str, deadline: float, mine: Sequence[Words]
) -> list[list[Words]]:
    """What every rank says to a question, by rank. Raises `BallotIncomplete`."""
    control.cast(question, json.dumps([dict(words) for words in mine]).encode())
    return [json.loads(ballot) for ballot in control.collect(question, deadline)]


def first_difference(mine: Words, theirs: Words) -> str | None:
    """What two ranks mean differently; None where all is alike."""
    return next((what for what in mine if what != WATCHED and theirs.get(what) != mine[what]), None)
