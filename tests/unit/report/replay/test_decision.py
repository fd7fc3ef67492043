"""What replay advises, on planted traffic: the four cases that an operator meets."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.formats.routing_trace import CountsTrace
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, find_hardware
from equipoise.report.advice.kv_cache import KvCache
from equipoise.report.replay.decision import decide, unpriced_cost
from equipoise.report.replay.engines import ENGINES
from equipoise.report.replay.inputs import ReplayInputs
from equipoise.report.replay.player import Rebalance
from equipoise.report.replay.replay import Replay, replay
from equipoise.report.replay.steps import CountedSteps
from equipoise.report.replay.table import basis, engine_advice, headline

LAYERS, EXPERTS, RANKS, ROWS, STEPS = 4, 32, 8, 4096, 600
EXPERT = Expert.of_dimensions(4096, 1536, "fp8")
MOVE = (Rebalance(100, 101, 1, 1, 1, None),)
LEAST, REDUNDANT = EXPERTS, EXPERTS + RANKS


def popularity(seed: int, skew: float) -> np.ndarray:
    odds = np.exp(np.random.default_rng(seed).normal(0, skew, (LAYERS, EXPERTS)))
    chances: np.ndarray = odds / odds.sum(axis=1, keepdims=True)
    return chances


def traffic(of_step: Callable[[int], np.ndarray]) -> CountsTrace:
    steps = [np.random.default_rng(step).poisson(of_step(step) * ROWS) for step in range(STEPS)]
    counts = np.array(steps, np.int32)
    layers = tuple(range(LAYERS))
    return CountsTrace(layers, EXPERTS, 8, STEPS, "here", lambda size: iter([counts]))


def replayed(trace: CountsTrace, **more: object) -> Replay:
    options: dict[str, object] = {
        "ranks": RANKS,
        "slots": (REDUNDANT,),
        "window": 25,
        "interval": 50,
        "expert": EXPERT,
        "hardware": find_hardware("h200"),
        "step_seconds": 0.02,
        "dead_zone": DeadZone(1.09, 0.34, "measured"),
    }
    return replay(ReplayInputs(source=CountedSteps(trace), **(options | more)))  # type: ignore[arg-type]


def test_balanced_traffic_is_left_alone() -> None:
    result = replayed(traffic(lambda step: popularity(0, 0.0)))
    assert decide(result).best is None
    assert "hardly longer for an imbalance of 0.0" in headline(result, decide(result))


def test_stable_hot_experts_are_balanced() -> None:
    result = replayed(traffic(lambda step: popularity(1, 1.0)))
    best = decide(result).best
    assert best is not None
    assert best.slots == REDUNDANT
    assert best.mean_imbalance < 0.25 * result.now.mean_imbalance
    assert set(decide(result).by_engine) == {*ENGINES, "equipoise"}


def test_domains_that_alternate_within_a_window_are_left_alone() -> None:
    """Each plan is of the domain before: what a balancer moves is wrong when it arrives."""
    domains = [popularity(10 + number, 1.2) for number in range(12)]
    trace = traffic(lambda step: domains[step // 50])
    result = replayed(trace, engines=("vllm",))
    decision = decide(result)
    assert decision.best is None
    assert "load changes faster than balancers follow" in headline(result, decision)
    assert decision.by_engine == {"vllm": None}


def test_full_kv_cache_forbids_redundant_slots() -> None:
    """Of two slots' worth of KV cache, a redundant slot on each rank takes one."""
    memory = (LEAST // RANKS + 2) * LAYERS * EXPERT.size
    cache = KvCache(bytes_per_token=64 << 10, memory_bytes=memory)
    trace = traffic(lambda step: popularity(1, 1.0))
    result = replayed(trace, kv_cache=cache)
    decision = decide(result)
    assert decision.best is not None
    assert decision.best.slots == LEAST
    assert "redundant slots would cost more KV cache than they gain" in headline(result, decision)
    unbounded = replayed(trace, kv_cache=cache, kv_usage=0.4)
    assert decide(unbounded).best is not None
    assert decide(unbounded).best.slots == REDUNDANT  # type: ignore[union-attr]


def test_pauses_are_paid_for_by_throughput() -> None:
    """The same plans over a link that takes seconds for them."""
    trace = traffic(lambda step: popularity(1, 1.0))
    fast, slow = (
        replayed(trace, engines=("sglang",), link=link, expert=Expert(size, "fp8"))
        for link, size in (("node", 1 << 20), ("host", 8 << 30))
    )
    assert decide(fast).best is not None
    assert decide(slow).best is None
    assert "pauses for moving weights cost what balance gains" in headline(slow, decide(slow))


def test_moves_that_keep_the_link_busy_are_told() -> None:
    """They run beside serving, so no pause shows them."""
    trace = traffic(lambda step: popularity(1, 1.0))
    result = replayed(trace, engines=("vllm",), link="host", expert=Expert(256 << 20, "fp8"))
    one, link = result.outcomes[1], result.inputs.transfers
    assert link is not None
    received = sum(link.seconds(move.busiest) for move in one.rebalances)
    share = one.link_share(result.steps_in_seconds)
    assert share == pytest.approx(received / one.mean_seconds / one.served)
    told = f"not priced: vllm in {one.slots} slots: its moves take {share:.0%} of the link's time"
    assert told in dict(basis(result))["moves"]
    light = replayed(trace, engines=("vllm",), expert=Expert(1 << 10, "fp8"))
    assert "not priced" not in dict(basis(light))["moves"]


def test_moves_without_a_price_have_to_gain_more() -> None:
    """TensorRT-LLM's moves a part of all slots in every step, to follow what is chance."""
    trace = traffic(lambda step: popularity(step // 60, 1.0))
    unknown = {"hardware": None, "expert": None, "step_seconds": None}
    options = {"engines": ("trtllm", "equipoise"), "window": None, "interval": None}
    result = replayed(trace, **unknown, **options)
    heavy = next(one for one in result.outcomes if one.engine == "trtllm")
    part = heavy.copies / STEPS / (LAYERS * heavy.slots)
    assert part > 0.01
    assert f"it moves {part:.0%} of all slots in every step" in dict(basis(result))["moves"]
    assert unpriced_cost(result, heavy) is not None
    best = decide(result).best
    assert best is not None
    light = [one for one in result.outcomes[1:] if one.rebalances and one.engine == "equipoise"]
    most = max(map(result.gain, light))
    assert (best is heavy) == (result.gain(heavy) >= most + 0.02)


def test_even_load_of_few_rows_is_left_to_chance() -> None:
    odds = np.full((LAYERS, EXPERTS), 1 / EXPERTS)
    steps = [np.random.default_rng(step).poisson(odds * 600) for step in range(STEPS)]
    layers, counts = tuple(range(LAYERS)), np.array(steps, np.int32)
    trace = CountsTrace(layers, EXPERTS, 8, STEPS, "here", lambda size: iter([counts]))
    result = replayed(trace, engines=("vllm",))
    assert "chance alone makes" in str(decide(result).reason)


def test_engine_that_has_not_planned_is_named() -> None:
    trace = traffic(lambda step: popularity(1, 1.0))
    result = replayed(trace, engines=("vllm", "equipoise"), window=None, interval=None)
    assert not any(one.rebalances for one in result.outcomes if one.engine == "vllm")
    assert headline(result, decide(result)).endswith(
        "The trace ends before a first plan of vllm: "
        "give a longer one, or smaller --window-size and --step-interval."
    )


def gaining(result: Replay, gains: dict[str, float]) -> Replay:
    """The same outcomes, with these gains by name and slots; all others have none."""
    now = np.ones_like(result.now.seconds)
    changed = [
        replace(one, seconds=now / (1 + gains.get(f"{one.name} {one.slots}", 0.0)), rebalances=MOVE)
        for one in result.outcomes[1:]
    ]
    first = replace(result.now, seconds=now)
    return replace(result, outcomes=(first, *changed), steps_in_seconds=False)


def test_decision_among_equal_gains_takes_fewest_slots_then_ours() -> None:
    trace = traffic(lambda step: popularity(1, 1.0))
    result = replayed(trace, engines=("vllm", "equipoise"), slots=(40, 48))
    most = {"vllm 48": 0.2, "vllm 40": 0.196, "equipoise static 40": 0.196}
    best = decide(gaining(result, most)).best
    assert best is not None
    assert (best.engine, best.slots) == ("equipoise", 40)
    more = decide(gaining(result, most | {"vllm 48": 0.21})).best
    assert more is not None
    assert (more.engine, more.slots) == ("vllm", 48)
    least = decide(gaining(result, {"vllm 48": 0.019})).best
    assert least is None
    exact = decide(gaining(result, most | {"equipoise exact 40": 0.215})).best
    assert exact is not None
    assert exact.name == "equipoise static"
    exact = decide(gaining(result, most | {"equipoise exact 40": 0.225})).best
    assert exact is not None
    assert exact.name == "equipoise exact"


def test_gain_of_collective_alone_is_left_with_its_reason() -> None:
    """With so few rows chance is most of the imbalance, which only counts of all ranks level."""
    odds = np.full((LAYERS, EXPERTS), 1 / EXPERTS)
    steps = [np.random.default_rng(step).poisson(odds * 600) for step in range(STEPS)]
    counts = np.array(steps, np.int32)
    trace = CountsTrace(
        tuple(range(LAYERS)), EXPERTS, 8, STEPS, "here", lambda size: iter([counts])
    )
    result = replayed(trace, dead_zone=DeadZone(1.0, 0.2, "measured"), engines=("equipoise",))
    exact = max(result.outcomes, key=result.gain)
    assert exact.name == "equipoise exact"
    assert 0.02 < result.gain(exact) < 0.04
    decision = decide(result)
    assert decision.best is None
    assert str(decision.reason).endswith(
        f"{result.gain(exact):+.1%}: its ranks exchange counts in every layer and step, "
        "which is not priced"
    )


def test_trace_before_any_plan_decides_nothing() -> None:
    result = replayed(traffic(lambda step: popularity(1, 1.0)), window=500, interval=1000)
    assert headline(result, decide(result)).startswith(
        "Undecided: the trace is too short: it has 600 steps, and the first plans of all engines "
        "serve after 1,001. Give a longer trace"
    )


@pytest.mark.parametrize("engines", [("trtllm", "equipoise"), ("trtllm",)])
def test_stationary_load_of_a_few_steps_decides_nothing(engines: tuple[str, ...]) -> None:
    """TensorRT-LLM had planned one group of layers, and the load was said to change faster."""
    layers = 60
    odds = np.random.default_rng(0).lognormal(0, 0.6, (layers, 256))
    odds /= odds.sum(axis=1, keepdims=True)
    counts = np.random.default_rng(1).poisson(odds * 65536, (4, layers, 256)).astype(np.int32)
    trace = CountsTrace(tuple(range(layers)), 256, 8, 4, "here", lambda size: iter([counts]))
    result = replay(
        ReplayInputs(source=CountedSteps(trace), ranks=32, slots=(288,), engines=engines)
    )
    decision = decide(result)
    assert decision.best is None
    last = 256 if "equipoise" in engines else 31  # two layers in a step
    assert f"4 steps, and the first plans of all engines serve after {last}" in headline(
        result, decision
    )
    assert dict(engine_advice(result, decision))["trtllm"].startswith("undecided: its first plan")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_lowers_the_imbalance_of_stable_traffic(engine: str) -> None:
    result = replayed(traffic(lambda step: popularity(1, 0.7)), engines=(engine,))
    assert not result.refusals
    for outcome in result.outcomes[1:]:
        assert np.nanmean(outcome.imbalance[-200:]) < 0.6 * result.now.mean_imbalance, outcome.name
