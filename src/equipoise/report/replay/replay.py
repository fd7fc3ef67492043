"""Replays a trace under each candidate, and what each would gain."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.hal.errors import PlacementError
from equipoise.report.placement.spread import Reals
from equipoise.report.replay.engine_model import Cadence
from equipoise.report.replay.inputs import ReplayInputs, candidates
from equipoise.report.replay.player import Measurements, Player, Rebalance

OnStep = Callable[[int], None]
"""Hears how many steps have been replayed."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of one candidate.

    Attributes:
        name: for people.
        engine: whose balancer it is; empty without one.
        shape: numbers of layers, experts, slots and ranks.
        cadence: when it planned; None: never.
        collective: whether ranks exchange counts in every layer and step, which is not priced.
        steps: int64 (evaluated,), numbers of the steps that the next two are of.
        imbalance: max/mean - 1 of the ranks, mean over layers.
        seconds: of each step; without hardware and --itl in steps without a balancer.
        layer_imbalance: mean over steps, (layers,), NaN where a layer had no rows.
        rank_rows: sums over the evaluated steps, (layers, ranks).
        rebalances: in order.
        served: steps in all.
        batch: part of the recorded batch that the KV cache has room for; 1 where all.
        kv_tokens: of a rank's KV cache; None where unknown.
        weight_bytes: of a rank's experts; None where unknown.
        link_seconds: that moves take on the link of those who receive most; None where unknown.
    """

    name: str
    engine: str
    shape: ExpertShape
    cadence: Cadence | None
    collective: bool
    steps: npt.NDArray[np.int64]
    imbalance: Reals
    seconds: Reals
    layer_imbalance: Reals
    rank_rows: Reals
    rebalances: tuple[Rebalance, ...]
    served: int
    batch: float
    kv_tokens: int | None
    weight_bytes: int | None
    link_seconds: float | None

    @property
    def slots(self) -> int:
        """Of a layer, over all ranks."""
        return self.shape.slots

    @property
    def mean_imbalance(self) -> float:
        """Mean over steps."""
        return float(np.nanmean(self.imbalance))

    @property
    def high_imbalance(self) -> float:
        """Of the step that one in twenty exceeds."""
        return float(np.nanquantile(self.imbalance, 0.95))

    @property
    def standard_error(self) -> float:
        """Of the mean over steps, where not all were evaluated; else 0.

        From differences of neighbours, as for samples that are evenly spaced (Wolter, 1984): what
        changes slowly is in all of them.
        """
        if len(self.steps) == self.served:
            return 0.0
        differences = np.diff(self.imbalance)
        return float(np.sqrt(np.nanmean(differences**2) / 2 / len(self.steps)))

    @property
    def mean_seconds(self) -> float:
        """Of a step."""
        return float(np.nanmean(self.seconds))

    @property
    def pauses(self) -> float:
        """Seconds that serving stood still while weights moved."""
        return sum(one.pause or 0.0 for one in self.rebalances)

    @property
    def copies(self) -> int:
        """That moved, in all rebalances."""
        return sum(one.copies for one in self.rebalances)

    def link_share(self, steps_in_seconds: bool) -> float | None:
        """Part of the trace's time that moves take on the link; None where either is unknown."""
        if self.link_seconds is None or not steps_in_seconds:
            return None
        return self.link_seconds / (self.mean_seconds * self.served + self.pauses)

    def throughput(self, steps_in_seconds: bool) -> float:
        """Batches of the recorded size in a unit of time; pauses count where both are seconds."""
        pauses = self.pauses / self.served if steps_in_seconds else 0.0
        return self.batch / (self.mean_seconds + pauses)


@dataclass(frozen=True)
class Refusal:
    """A candidate that cannot be served so.

    Attributes:
        name: of the candidate.
        slots: of a layer, over all ranks.
        reason: one line.
    """

    name: str
    slots: int
    reason: str


@dataclass(frozen=True)
class Replay:
    """All outcomes; the first is that without a balancer.

    Attributes:
        inputs: what was asked for.
        outcomes: of what could be served.
        refusals: of what could not.
        steps: that were replayed.
        rows: of a layer in a step, over all ranks, mean.
        expert_rows: int64 (layers, experts), rows summed over steps.
        steps_in_seconds: whether times are of whole steps in seconds.
        times_in_seconds: whether they are seconds at all, of whole steps or of experts alone.
        price: what the time of a step rests on, for people.
    """

    inputs: ReplayInputs
    outcomes: tuple[Outcome, ...]
    refusals: tuple[Refusal, ...]
    steps: int
    rows: float
    expert_rows: npt.NDArray[np.int64]
    steps_in_seconds: bool
    times_in_seconds: bool
    price: str

    @property
    def now(self) -> Outcome:
        """Without a balancer."""
        return self.outcomes[0]

    def gain(self, outcome: Outcome) -> float:
        """Throughput over that without a balancer, less 1."""
        now = self.now.throughput(self.steps_in_seconds)
        return outcome.throughput(self.steps_in_seconds) / now - 1.0


def no_progress(steps: int) -> None:
    """Ignores it."""


def replay(inputs: ReplayInputs, on_step: OnStep = no_progress) -> Replay:
    """Plays the trace to all candidates at once: it is read a single time.

    Raises `FormatError` for what is wrong with the trace, `PlacementError` where there are no
    steps or no rows in it, or experts in their order cannot be served.
    """
    refusals: list[Refusal] = []
    players: list[Player] = []
    for candidate in candidates(inputs):
        price = inputs.price(inputs.batch(candidate.shape.slots))
        try:
            players.append(Player(candidate, price, inputs.source.every, inputs.transfers))
        except PlacementError as error:
            refusals.append(Refusal(candidate.name, candidate.shape.slots, str(error)))
    source, steps = inputs.source, 0
    rows = np.zeros((len(source.layers), source.experts), np.int64)
    for block in source.blocks():
        for player in list(players):
            try:
                player.play(block)
            except PlacementError as error:
                one = player.candidate
                refusals.append(Refusal(one.name, one.shape.slots, str(error)))
                players.remove(player)
        steps += len(block)
        rows += block.counts.sum(axis=0, dtype=np.int64)
        on_step(steps)
    if not steps:
        first = inputs.source.first
        what = f"step {first:,}: it ends before" if first else "steps"
        raise PlacementError(f"the trace has no {what}")
    if not rows.any():
        raise PlacementError("the trace has no rows: there is nothing to balance")
    return _result(inputs, players, refusals, steps, rows)


def _result(
    inputs: ReplayInputs,
    players: list[Player],
    refusals: list[Refusal],
    steps: int,
    rows: npt.NDArray[np.int64],
) -> Replay:
    if players[0].candidate.engine:
        raise PlacementError(refusals[0].reason)
    price = inputs.price(1.0)
    found = players[0].measured
    now = float(np.nanmean(np.concatenate(found.seconds)))
    outcomes = tuple(_outcome(player, inputs, now, price.in_seconds) for player in players)
    return Replay(
        inputs,
        outcomes,
        tuple(refusals),
        steps,
        float(rows.sum()) / steps / len(inputs.source.layers),
        rows,
        inputs.step_seconds is not None,
        inputs.step_seconds is not None or price.in_seconds,
        price.source,
    )


def _outcome(player: Player, inputs: ReplayInputs, now: float, experts_alone: bool) -> Outcome:
    found, one = player.measured, player.candidate
    weights = inputs.weight_bytes(one.shape.slots)
    cache, link = inputs.kv_cache, inputs.transfers
    busiest = sum(move.busiest for move in found.rebalances)
    return Outcome(
        name=one.name,
        engine=one.engine,
        shape=one.shape,
        cadence=one.cadence,
        collective=one.collective,
        steps=np.concatenate(found.steps),
        imbalance=np.concatenate(found.imbalance),
        seconds=_whole_steps(np.concatenate(found.seconds), inputs, now, experts_alone),
        layer_imbalance=_layer_means(found),
        rank_rows=found.rank_rows,
        rebalances=tuple(found.rebalances),
        served=found.served,
        batch=inputs.batch(one.shape.slots),
        kv_tokens=None if cache is None or weights is None else cache.tokens(weights),
        weight_bytes=weights,
        link_seconds=None if link is None else link.seconds(busiest),
    )


def _whole_steps(times: Reals, inputs: ReplayInputs, now: float, experts_alone: bool) -> Reals:
    """Times of whole steps in seconds where one without a balancer is known.

    Else seconds of the experts alone, or whole steps where one without a balancer takes 1.
    """
    if inputs.step_seconds is None:
        return times if experts_alone else times / now
    if experts_alone:
        return times + max(0.0, inputs.step_seconds - now)
    return times * (inputs.step_seconds / now)


def _layer_means(found: Measurements) -> Reals:
    steps = found.layer_steps
    mean: Reals = np.divide(
        found.layer_imbalance, steps, out=np.full(steps.shape, np.nan), where=steps > 0
    )
    return mean
