"""What to do: the first line of `equipoise replay`."""

from dataclasses import dataclass

from equipoise.report.replay.inputs import OURS
from equipoise.report.replay.replay import Outcome, Replay

LEAST_GAIN = 0.02
"""Of throughput: below it is not worth a change."""
AS_GOOD = 0.005
"""Of throughput: outcomes so near to each other are as good."""


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        best: what gains most, or the cheapest of those that are as good; None to leave it off.
        by_engine: the best of each engine, by name, or None where it should be left off.
        reason: why, in a sentence.
    """

    best: Outcome | None
    by_engine: dict[str, Outcome | None]
    reason: str


def decide(replay: Replay) -> Decision:
    """By throughput; of what is as good, the fewest slots, then what comes first in the table."""
    engines = dict.fromkeys(one.engine for one in replay.outcomes[1:])
    by_engine = {
        engine: _best(replay, [one for one in replay.outcomes if one.engine == engine])
        for engine in engines
    }
    best = _best(replay, list(replay.outcomes[1:]))
    return Decision(best, by_engine, _reason(replay, best))


def _best(replay: Replay, outcomes: list[Outcome]) -> Outcome | None:
    if not outcomes:
        return None
    most = max(replay.gain(one) for one in outcomes)
    if most < LEAST_GAIN:
        return None
    good = [one for one in outcomes if replay.gain(one) >= most - AS_GOOD]
    # Ours before an engine's where both are as good: an engine comes first in the table.
    return min(good, key=lambda one: (one.slots, one.engine != OURS))


def _reason(replay: Replay, best: Outcome | None) -> str:
    now = replay.now
    if best is not None:
        why = f"imbalance falls from {now.mean_imbalance:.3f} to {best.mean_imbalance:.3f}"
        if best.slots == now.slots and _cache_costs(replay):
            why += "; redundant slots would cost more KV cache than they gain"
        elif best.slots == now.slots:
            why += ", without a redundant slot"
        return why
    top = max(replay.outcomes[1:], key=replay.gain, default=None)
    if top is None:
        return "there is no balancer to compare with"
    why = f"the best, {top.name} in {top.slots:,} slots, would gain {replay.gain(top):+.1%}"
    if now.mean_seconds <= min(one.mean_seconds for one in replay.outcomes) * (1 + LEAST_GAIN):
        return f"{why}: a step takes no longer for an imbalance of {now.mean_imbalance:.3f}"
    if _cache_costs(replay):
        return f"{why}: redundant slots cost more KV cache than balance gains"
    return f"{why}: load changes faster than balancers follow, or moving costs what it gains"


def _cache_costs(replay: Replay) -> bool:
    return any(one.batch < 1 for one in replay.outcomes)
