"""Small fleets, settings of policies and events, for comparisons with the published rules."""

from random import Random
from typing import TypeAlias

from helpers.harnesses.router_comparison import KINDS, ROOMS, SLOTS, Draw
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import Capacity
from equipoise.balancer.requests.policy_settings import Predictor, RoutingPolicySettings, WhenFull

Case: TypeAlias = tuple[RoutingPolicySettings, list[Capacity], list[Draw]]
NUMBERS = st.integers(0, 4095)
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), NUMBERS, NUMBERS), min_size=1, max_size=50)
CAPACITIES = st.builds(Capacity, slots=st.sampled_from(SLOTS), kv_tokens=st.sampled_from(ROOMS))
WORKERS = st.lists(CAPACITIES, min_size=1, max_size=5)
BUSY = (
    *("arrive",) * 8,
    *("step",) * 6,
    *("tokens", "report", "report", "abort", "lose", "serve", "drain", "decide", "finish"),
)
"""A front end that is always full, and seldom sees anything else."""


@st.composite
def choices(draw: st.DrawFn) -> RoutingPolicySettings:
    """Powers of two where sums of doubles have to be exact in any order."""
    ends = draw(st.sampled_from((1, 1, 2, 3)))
    return RoutingPolicySettings(
        when_full=draw(st.sampled_from(WhenFull)),
        predictor=draw(st.sampled_from(Predictor)),
        front_ends=ends,
        front_end=draw(st.integers(0, ends - 1)),
        seed=draw(st.integers(0, 2**64 - 1)),
        lockstep=draw(st.booleans()),
        greedy_slots=draw(st.sampled_from((0, 2, 7))),
        subset=draw(st.integers(1, 5)),
        candidates=draw(st.sampled_from((1, 3, 1024))),
        horizon=draw(st.integers(0, 9)),
        alpha=draw(st.sampled_from((1.0, 0.5, 2.0))),
        beta=draw(st.sampled_from((0.0, 4.0, 0.5))),
        gamma=draw(st.sampled_from((1.0, 0.5))),
        points=draw(st.sampled_from((2, 3, 5))),
        window=draw(st.integers(1, 6)),
        wait_bonus=draw(st.sampled_from((0.0, 0.5, 2.0))),
        slack=draw(st.sampled_from((0.0, 0.5, 1.5))),
        overshoot=draw(st.sampled_from((0.0, 1.0, 2.0))),
        prompt_weight=draw(st.sampled_from((0.0, 3.0, 0.25))),
        prefill_wait=draw(st.sampled_from((0.0, 1.0, 0.1))),
    )


def busy(seed: int) -> Case:
    """Workers of which one may have more slots, often with more requests than slots, and several
    ends at once."""
    dice = Random(seed)
    settings = RoutingPolicySettings(
        when_full=dice.choice(list(WhenFull)),
        predictor=dice.choice(list(Predictor)),
        front_ends=dice.choice((1, 1, 1, 2)),
        lockstep=dice.choice((True, False)),
        greedy_slots=dice.choice((0, 2, 7)),
        subset=dice.randint(2, 5),
        horizon=dice.randint(1, 9),
        gamma=dice.choice((1.0, 0.5)),
        points=dice.choice((2, 3, 5)),
        window=dice.randint(2, 6),
        wait_bonus=dice.choice((0.0, 0.5, 2.0)),
        slack=dice.choice((0.0, 0.5, 1.5)),
        overshoot=dice.choice((0.0, 1.0, 2.0)),
        prompt_weight=dice.choice((0.0, 3.0, 0.25)),
        prefill_wait=dice.choice((0.0, 1.0, 0.1)),
    )
    slots, room = dice.choice((1, 2, 3, 4, 12)), dice.choice((None, None, 30))
    capacity = Capacity(slots=slots, kv_tokens=room)
    workers = [capacity] * dice.randint(2, 4)
    larger = Capacity(slots=slots * dice.choice((1, 1, 4)), kv_tokens=room)
    workers[0] = larger
    kinds = ["arrive"] * 16 + [dice.choice(BUSY) for _ in range(50)]
    return settings, workers, [(kind, dice.randrange(4096), dice.randrange(4096)) for kind in kinds]


def starving(seed: int) -> Case:
    """A large request that waits among small ones, which keep coming and going."""
    dice = Random(seed)
    settings = RoutingPolicySettings(
        name="fit", lockstep=dice.choice((True, False)), window=16, wait_bonus=0.5, overshoot=4.0
    )
    workers = [Capacity(slots=2)] * dice.randint(2, 4)
    events: list[Draw] = [("arrive", dice.randrange(4), 1) for _ in range(12)]
    events.append(("arrive", 39, 1))
    for _ in range(90):
        events.append(("step", 255, dice.randrange(4096)))
        events += [("arrive", dice.randrange(4), 1)] * dice.choice((1, 1, 2))
    return settings, workers, events
