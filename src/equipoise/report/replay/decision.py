"""What to do: the first line of `equipoise replay`."""

from dataclasses import dataclass

from equipoise.report.advice.inputs import chance_imbalance
from equipoise.report.replay.inputs import OURS
from equipoise.report.replay.replay import Outcome, Replay

LEAST_GAIN = 0.02
"""Of throughput: below it is not worth a change."""
AS_GOOD = 0.005
"""Of throughput: outcomes so near to each other are as good."""
BUSY_LINK = 0.05
"""Of the time: moves on a link for longer delay dispatch and combine, which is not priced."""
MANY_COPIES = 0.01
"""Likewise of all slots in a mean step, where the time of moves is not known."""
LOWERED = 0.25
"""Of the imbalance: a balancer that does not lower it by so much has not followed the load."""


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        best: what gains most, or the cheapest of those that are as good; None to leave it off.
        by_engine: the best of each engine, by name, or None where it should be left off.
        reason: why, in a sentence; None where the trace is too short to say it.
    """

    best: Outcome | None
    by_engine: dict[str, Outcome | None]
    reason: str | None


def decide(replay: Replay) -> Decision:
    """By throughput; of what is as good, the fewest slots, then ours."""
    engines = dict.fromkeys(one.engine for one in replay.outcomes[1:])
    by_engine = {
        engine: _best(replay, [one for one in replay.outcomes if one.engine == engine])
        for engine in engines
    }
    best = _best(replay, list(replay.outcomes[1:]))
    return Decision(best, by_engine, _reason(replay, best))


def steps_to_first_plan(replay: Replay, engine: str = "") -> int | None:
    """Steps after which the first plans of an engine, or of all, serve in all layers.

    None where one of the engine's, or of each engine, does so within the trace.
    """
    first: dict[str, int] = {}
    for one in replay.outcomes:
        if one.cadence and engine in ("", one.engine):
            step = one.rebalances[0].committed if one.rebalances else one.cadence.first
            first[one.engine] = min(step, first.get(one.engine, step))
    late = [step for step in first.values() if step >= replay.steps]
    return max(late, default=None)


def _best(replay: Replay, outcomes: list[Outcome]) -> Outcome | None:
    # Without a plan it is its first placement that differs, which says nothing of a balancer.
    planned = [one for one in outcomes if one.rebalances]
    # What has a cost that is not priced has to gain so much more than what has none.
    plain = [one for one in planned if unpriced_cost(replay, one) is None]
    if _most(replay, planned) < _most(replay, plain) + LEAST_GAIN:
        planned = plain
    most = _most(replay, planned)
    if most < LEAST_GAIN:
        return None
    good = [one for one in planned if replay.gain(one) >= most - AS_GOOD]
    return min(good, key=lambda one: (one.slots, one.engine != OURS))


def unpriced_cost(replay: Replay, outcome: Outcome) -> str | None:
    """What a candidate costs that its throughput leaves out, where that is much; else None."""
    if outcome.collective:
        return "its ranks exchange counts in every layer and step"
    share = outcome.link_share(replay.steps_in_seconds)
    if share is not None:
        return f"its moves take {share:.0%} of the link's time" if share >= BUSY_LINK else None
    part = outcome.copies / outcome.served / (outcome.shape.layers * outcome.slots)
    return f"it moves {part:.0%} of all slots in every step" if part >= MANY_COPIES else None


def _most(replay: Replay, outcomes: list[Outcome]) -> float:
    return max((replay.gain(one) for one in outcomes), default=0.0)


def _reason(replay: Replay, best: Outcome | None) -> str | None:
    now = replay.now
    if best is not None:
        why = f"imbalance falls from {now.mean_imbalance:.3f} to {best.mean_imbalance:.3f}"
        if best.slots > now.slots:
            return why
        if _cache_decides(replay, best):
            return f"{why}; redundant slots would cost more KV cache than they gain"
        return f"{why}, without a redundant slot"
    others = [one for one in replay.outcomes[1:] if one.rebalances]
    if not others:
        return None if steps_to_first_plan(replay) else "there is no balancer to compare with"
    top = max(others, key=replay.gain)
    obstacle = _obstacle(replay, top, others)
    if obstacle is None:
        return None
    would = f"the best, {top.name} in {top.slots:,} slots, would change throughput by"
    return f"{would} {replay.gain(top):+.1%}: {obstacle}"


def _obstacle(replay: Replay, top: Outcome, others: list[Outcome]) -> str | None:
    """Why no balancer gains anything that is worth it; None where some have not planned yet."""
    now = replay.now
    cost = unpriced_cost(replay, top)
    if replay.gain(top) >= LEAST_GAIN and cost is not None:
        return f"{cost}, which is not priced"
    fastest = min(others, key=lambda one: one.mean_seconds)
    if now.mean_seconds / fastest.mean_seconds - 1 >= LEAST_GAIN:
        if fastest.batch < 1:
            return "redundant slots cost more KV cache than balance gains"
        return "pauses for moving weights cost what balance gains"
    least = min(one.mean_imbalance for one in others)
    if least <= now.mean_imbalance * (1 - LOWERED):
        return f"a step takes hardly longer for an imbalance of {now.mean_imbalance:.3f}"
    chance = chance_imbalance(max(1, round(replay.rows)), replay.inputs.ranks)
    if now.mean_imbalance <= chance * (1 + LOWERED):
        return f"chance alone makes {chance:.3f} of so few rows, and the imbalance is no more"
    if steps_to_first_plan(replay) is not None:
        return None
    return f"load changes faster than balancers follow, imbalance stays at {least:.3f}"


def _cache_decides(replay: Replay, best: Outcome) -> bool:
    """Whether more slots would make steps shorter, and yet gain less."""
    return any(
        one.mean_seconds < best.mean_seconds
        and one.batch < 1
        and replay.gain(one) < replay.gain(best)
        for one in replay.outcomes
    )
