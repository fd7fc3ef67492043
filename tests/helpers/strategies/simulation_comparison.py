"""Small workloads and scenarios, and where the native simulator differs from the slow one."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from helpers.harnesses.native_front_end import NativeFront
from helpers.references.reference_routing_rules import slow_front
from helpers.references.reference_simulation import MakeFront, Record, SlowSimulation
from hypothesis import strategies as st

from equipoise.balancer.requests.catalogue import PrefillRule
from equipoise.balancer.requests.cluster import (
    Cluster,
    Drafting,
    Prefill,
    PrefillAlignment,
    StepTime,
)
from equipoise.balancer.requests.policy_settings import Predictor, RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.simulation import (
    SaturatedArrivals,
    Scenario,
    TimedArrivals,
    simulate,
)
from equipoise.balancer.requests.simulation_run import SimulationRun
from equipoise.balancer.requests.workload import Workload

BLOCK = 4
RELATIVE = 1e-12
"""Sums of doubles may go in another order."""
JOBS = ("arrival", "admitted", "first", "end", "worker", "admitted_step", "preemptions")


@st.composite
def workloads(draw: st.DrawFn, most: int = 14) -> Workload:
    """Small requests, that share beginnings, at times that often coincide."""
    count = draw(st.integers(1, most))
    prompts = draw(_counts(count, 30))
    gaps = draw(
        st.lists(st.sampled_from((0.0, 0.0, 1.0, 3.5, 40.0)), min_size=count, max_size=count)
    )
    arrivals = np.cumsum([0.0, *gaps[1:]])
    return Workload(
        name="drawn",
        arrivals=arrivals,
        prompts=np.array(prompts),
        outputs=np.array(draw(_counts(count, 12))),
        hashes=draw(_hashes(prompts)),
        block=BLOCK,
    )


def _counts(count: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, most), min_size=count, max_size=count)


@st.composite
def _hashes(draw: st.DrawFn, prompts: Sequence[int]) -> Any:
    if draw(st.booleans()):
        return None
    rows = [
        [family * 100 + i for i in range(-(-prompt // BLOCK))]
        for prompt in prompts
        for family in [draw(st.integers(0, 2))]
    ]
    offsets = np.cumsum([0, *map(len, rows)])
    return np.array([h for row in rows for h in row], dtype=np.int64), offsets


@st.composite
def clusters(draw: st.DrawFn, plain: bool = False) -> Cluster:
    """From one worker with one slot on; a plain one only decodes, a token each a step."""
    if plain:
        workers, plain_slots = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        return Cluster(workers=workers, slots=plain_slots, step=StepTime(fixed=1.0))
    alignments = st.builds(PrefillAlignment, st.sampled_from(PrefillRule), st.integers(1, 4))
    chunks = st.builds(
        Prefill,
        chunk=st.integers(1, 40),
        cached_blocks=st.sampled_from((0, 3, 9)),
        alignment=st.none() | alignments,
    )
    drafts = st.builds(Drafting, tokens=st.integers(1, 3), acceptance=st.sampled_from((0.5, 1.0)))
    slots = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return Cluster(
        workers=len(slots),
        slots=tuple(slots) if draw(st.booleans()) else slots[0],
        kv_tokens=draw(st.sampled_from((None, None, 25, 50, 90))),
        step=StepTime(
            fixed=draw(st.sampled_from((0.0, 1.0))),
            per_token=draw(st.sampled_from((0.125, 0.1))),
            per_mean=draw(st.sampled_from((0.0, 0.25))),
            prompt_weight=draw(st.sampled_from((0.0, 1.0))),
            noise=draw(st.sampled_from((0.0, 0.0, 0.3))),
        ),
        prefill=draw(st.none() | chunks),
        drafting=draw(st.none() | drafts),
    )


@st.composite
def policies(draw: st.DrawFn) -> RoutingPolicySettings:
    """Powers of two where sums of doubles have to be exact in any order."""
    return RoutingPolicySettings(
        when_full=draw(st.sampled_from(WhenFull)),
        predictor=draw(st.sampled_from(Predictor)),
        greedy_slots=draw(st.sampled_from((0, 2, 7))),
        horizon=draw(st.integers(0, 6)),
        gamma=draw(st.sampled_from((1.0, 0.5))),
        window=draw(st.integers(1, 6)),
        wait_bonus=draw(st.sampled_from((0.0, 0.5))),
        overshoot=draw(st.sampled_from((0.0, 1.0))),
        prompt_weight=draw(st.sampled_from((0.0, 3.0))),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Everything that a scenario may say."""
    saturated = st.builds(SaturatedArrivals, st.sampled_from((None, 1, 3)))
    return Scenario(
        cluster=draw(clusters()),
        policy=draw(policies()),
        arrivals=draw(saturated | st.just(TimedArrivals())),
        front_ends=draw(st.sampled_from((1, 1, 2, 3))),
        report_interval=draw(st.sampled_from((None, 0.0, 3.0, 20.0))),
        token_delay=draw(st.sampled_from((0.0, 0.0, 4.0, 30.0))),
        queue_timeout=draw(st.sampled_from((None, None, 6.0, 0.1))),
        trajectory=1 << 20,
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def difference(workload: Workload, scenario: Scenario) -> str | None:
    """Of the native simulation from the specification."""
    slow = SlowSimulation(workload, scenario, front_of(scenario)).run()
    return differs(simulate(workload, scenario), slow)


def front_of(scenario: Scenario) -> MakeFront:
    """Sums of `fast_phi` that should be equal may not be: there, only the simulator is slow."""
    return NativeFront if scenario.policy.name == "fast_phi" else slow_front


def differs(native: SimulationRun, slow: SlowSimulation) -> str | None:
    """What does, by step first."""
    pairs = [
        (f.name, getattr(native.steps, f.name), getattr(slow.record, f.name))
        for f in fields(Record)
    ]
    for name in JOBS:
        pairs.append((name, getattr(native.requests, name), [getattr(j, name) for j in slow.jobs]))
    pairs.append(("failed", native.requests.failed, [job.state == "failed" for job in slow.jobs]))
    for name, actual, expected in pairs:
        alike = len(actual) == len(expected)
        if not alike or (
            len(actual) and not np.allclose(actual, expected, rtol=RELATIVE, atol=RELATIVE)
        ):
            return f"{name}: {np.asarray(actual).tolist()}, not {expected}"
    return None


def same(one: SimulationRun, other: SimulationRun) -> bool:
    """Bit for bit."""
    columns = [(one.requests, other.requests, f.name) for f in fields(one.requests)]
    steps = [(one.steps, other.steps, f.name) for f in fields(one.steps)]
    pairs = [(getattr(a, name), getattr(b, name)) for a, b, name in (*columns, *steps)]
    return all(np.array_equal(a, b) for a, b in pairs)


def drawn_of(seed: int) -> tuple[Workload, Scenario]:
    """As `workloads` and `scenarios`, but more of it, and always the same of a seed."""
    dice = np.random.default_rng(seed)
    count = int(dice.integers(8, 24))
    prompts = dice.integers(1, 25, count)
    rows = [np.arange(-(-size // BLOCK)) + 100 * dice.integers(0, 3) for size in prompts]
    for number, row in enumerate(rows):
        row[0] += 1000 * number * int(dice.random() < 0.25)
    hashes = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
    arrivals = np.cumsum([0.0, *dice.choice((0.0, 0.0, 1.0, 3.5), count - 1)])
    workload = Workload("drawn", arrivals, prompts, dice.integers(1, 12, count), hashes, BLOCK)
    return workload, _scenario_of(dice)


def _scenario_of(dice: np.random.Generator) -> Scenario:
    def pick(*of: Any) -> Any:
        return of[int(dice.integers(0, len(of)))]

    step = StepTime(fixed=1.0, per_token=0.125, prompt_weight=1.0)
    rules = [PrefillAlignment(rule, pick(2, 3, 5)) for rule in PrefillRule]
    cluster = Cluster(
        workers=pick(1, 2, 3),
        slots=pick(1, 2, 3),
        kv_tokens=pick(None, 40, 60),
        step=step,
        prefill=pick(
            None,
            None,
            Prefill(chunk=9, cached_blocks=4),
            Prefill(chunk=30),
            Prefill(chunk=9, alignment=pick(*rules)),
        ),
        drafting=pick(None, None, Drafting(tokens=2, acceptance=0.5)),
    )
    return Scenario(
        cluster=cluster,
        policy=RoutingPolicySettings(name=pick("jsq", "vllm_legacy", "br0", "fit", "jsq_load")),
        arrivals=pick(SaturatedArrivals(), SaturatedArrivals(1), TimedArrivals()),
        front_ends=pick(1, 2),
        report_interval=pick(None, 0.0, 9.0),
        token_delay=pick(0.0, 5.0),
        queue_timeout=pick(None, None, 12.0),
        trajectory=1 << 20,
        seed=int(dice.integers(0, 1 << 40)),
    )
