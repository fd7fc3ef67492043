"""The model behind advice: its formulas, by hand, and which way they go."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts import plan
from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
from equipoise.report.advice import inputs
from equipoise.report.advice.advice import advise
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, Hardware, Roofline
from equipoise.report.advice.inputs import MAX_WINDOWS, AdviceInputs, TrainTestSplit
from equipoise.report.advice.json_output import to_json
from equipoise.report.advice.kv_cache import KvCache
from equipoise.report.advice.migration_cost import (
    TransferRate,
    break_even,
    incoming_copies,
    migration_cost,
)
from equipoise.report.advice.sizing import (
    SlotChoice,
    SlotChoiceReason,
    advise_slots,
    can_connect,
    candidate_ranks,
    connected_slots,
    layers_that_gain,
    min_slots_per_rank,
)
from equipoise.report.advice.table import render
from equipoise.report.advice.worth import (
    Cadence,
    ServingOption,
    Verdict,
    Worth,
    judge_worth,
    rows_saved,
    time_saved,
)
from equipoise.report.placement.spread import linear
from equipoise.report.run.metrics import exact_noise_floor, noise_floor
from equipoise.report.terminal import ColourMode

FIGURES = {
    "memory_gb": 1.0, "memory_bandwidth_gbs": 2.0, "fp8_tflops": 0.008, "node_link_gbs": 1.0,
}  # fmt: skip
MACHINE = Hardware("mine", FIGURES)
EXPERT = Expert(1000, "fp8")
SKEWED = np.array([[[90, 10, 10, 10, 10, 10, 10, 10]] * 2] * 4, dtype=np.int64) * 100


def question(
    counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], **more: object
) -> AdviceInputs:
    inputs_by_name = {"statistics": ExpertStatistics(counts), "ranks": 4} | more
    return AdviceInputs(**inputs_by_name)  # type: ignore[arg-type]


def test_expert_size_and_operations_follow_dimensions() -> None:
    for precision, size in (("bf16", 2.0), ("fp8", 1.0), ("fp4", 0.5)):
        expert = Expert.of_dimensions(7168, 2048, precision)
        assert expert.size == 3 * 7168 * 2048 * size
        assert expert.operations_per_row == 2 * 3 * 7168 * 2048


def test_pace_reproduces_figure_15_of_source() -> None:
    """300 experts of 24 MiB within 50 ms; a model of 58 layers, 8 slots a rank, in 2 such steps."""
    pace = TransferRate(151e9, 24 << 20, 0.05)
    assert pace.experts_per_step == 300
    assert pace.steps(300) == 1
    assert pace.steps(58 * 8) == 2
    assert pace.steps(0) == 0
    assert pace.transfer(300) == pytest.approx(0.05, rel=1e-3)


def test_pace_expert_larger_than_step_takes_several_steps() -> None:
    pace = TransferRate(1000.0, 2500, 1.0)
    assert pace.experts_per_step == 0
    assert pace.steps(2) == 6


@given(
    st.floats(1.0, 1e6), st.floats(1.0, 100.0), st.integers(1, 10**6), st.floats(1e-3, 10.0),
    st.integers(0, 1000),
)  # fmt: skip
def test_pace_is_monotone_in_rate_latency_and_size(
    rate: float, more: float, size: int, latency: float, copies: int
) -> None:
    slow = TransferRate(rate, size, latency)
    for fast in (
        TransferRate(rate * more, size, latency),
        TransferRate(rate, size, latency * more),
    ):
        assert fast.experts_per_step >= slow.experts_per_step
        assert fast.steps(copies) <= slow.steps(copies)
    small = TransferRate(rate, max(1, size // 2), latency)
    assert small.experts_per_step >= slow.experts_per_step


def test_incoming_counts_experts_new_to_rank() -> None:
    def of(*experts: int) -> ExpertPlacement:
        return ExpertPlacement.with_even_shares(np.array([experts] * 2, dtype=np.int32), 2)

    old, new = of(0, 1, 2, 3, 0, 1), of(2, 1, 0, 3, 3, 0)
    assert incoming_copies(old, new).tolist() == [[0, 0]] * 2
    assert incoming_copies(old, of(0, 3, 2, 1, 1, 0)).tolist() == [[1, 0]] * 2
    assert incoming_copies(of(0, 1, 2, 3), old).tolist() == [[1, 2]] * 2


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_incoming_equals_planner_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = plan(rng.integers(0, 100, (3, 8)), slots=12, ranks=4)
    again = plan(rng.integers(0, 100, (3, 8)), slots=12, ranks=4, installed=first.placement)
    old, new = (
        ExpertPlacement.with_even_shares(placement_plan.placement, 4)
        for placement_plan in (first, again)
    )
    assert int(incoming_copies(old, new).sum()) == again.moves


def test_move_stall_is_transfer_beyond_forward_time() -> None:
    pace = TransferRate(1000.0, 1000, 5.0)
    copies = np.array([[1, 0], [2, 7]])
    cost = migration_cost("", copies, pace, np.array([1.0, 2.0]))
    assert (cost.copies, cost.busiest, cost.steps) == (10, 7, 2)
    assert cost.bulk_stall == 7.0
    # Layer 0: 1 s within 4 s. Layer 1: 7 s within 3 s.
    assert cost.layer_stall == 4.0
    assert migration_cost("", copies * 0, pace, np.array([9.0, 9.0])).layer_stall == 0.0


def test_break_even_is_stall_over_saving_per_step() -> None:
    assert break_even(0.0, -1.0) == 0
    assert break_even(1.0, 0.0) is None
    assert break_even(1.0, -0.1) is None
    assert break_even(1.0, 0.25) == 4
    assert break_even(1.0, 0.3) == 4


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.floats(1.0, 100.0))
def test_break_even_is_monotone_in_saving(stall: float, saved: float, more: float) -> None:
    steps, faster = break_even(stall, saved), break_even(stall, saved * more)
    assert steps is not None
    assert faster is not None
    assert faster <= steps


def test_roofline_takes_longer_of_reading_and_computing() -> None:
    roofline = Roofline(EXPERT, MACHINE)
    # 2e9 bytes and 8e9 operations a second: 0.5 us to read an expert, 0.25 us for a row.
    rows = np.array([[1000.0, 0.0, 0.0, 0.0], [1e-9, 0.0, 50.0, 50.0]])
    read_us, row = 1000 / 2e9, 2000 / 8e9
    assert roofline.seconds(rows, 2) == pytest.approx(
        np.array([[1000 * row, 0.0], [1e-9 * read_us, 100 * row]]), rel=1e-6
    )
    few = roofline.seconds(np.array([[0.5, 0.5]]), 1)
    assert few[0, 0] == pytest.approx(2 * (1 - math.exp(-0.5)) * read_us)
    assert MACHINE.ridge("fp8") == pytest.approx(read_us / row)


@given(st.lists(st.floats(0.0, 1e4), min_size=4, max_size=4), st.floats(1.0, 10.0))
def test_roofline_is_monotone_in_rows(rows: list[float], more: float) -> None:
    roofline = Roofline(EXPERT, MACHINE)
    less, greater = (roofline.seconds(np.array([rows]) * factor, 2) for factor in (1.0, more))
    assert (greater >= less - 1e-18).all()


def test_trial_splits_windows_into_train_and_test() -> None:
    counts = np.arange(5 * 2 * 4, dtype=np.int64).reshape(5, 2, 4)
    split = TrainTestSplit.of(ExpertStatistics(counts))
    assert np.array_equal(split.train.counts, counts[:2])
    assert np.array_equal(split.test.counts, counts[2:])
    assert split.held_out
    alone = TrainTestSplit.of(ExpertStatistics(counts[:1]))
    assert not alone.held_out
    assert np.array_equal(alone.test.counts, counts[:1])
    many = TrainTestSplit.of(ExpertStatistics(np.ones((1000, 1, 4), dtype=np.int64)))
    assert (many.train.windows, many.test.windows) == (500, MAX_WINDOWS)


def test_trial_exact_shares_level_better_than_planned_shares() -> None:
    counts = SKEWED.copy()
    counts[2:, :, 0] = 3000
    split = TrainTestSplit.of(ExpertStatistics(counts))
    placement_plan = plan(split.train.counts, slots=12, ranks=4, policy="connected")
    layout = ExpertPlacement(placement_plan.placement, placement_plan.shares, 4)
    exact_imbalance = split.imbalance_with_exact_shares(placement_plan.placement, 4)
    assert (exact_imbalance <= split.measured_imbalance(layout) + 1e-9).all()
    assert exact_imbalance.max() < split.measured_imbalance(layout).max()


def test_trial_local_shares_level_steps_better_than_chance_and_better_with_more_rows() -> None:
    load = np.random.default_rng(0).lognormal(sigma=1.0, size=(1, 2, 64)) * 1000
    split = TrainTestSplit.of(ExpertStatistics(np.repeat(load, 4, axis=0).astype(np.int64)))
    placement = plan(split.train.counts, slots=72, ranks=8, policy="connected").placement
    now = ExpertPlacement.with_even_shares(
        np.tile(np.arange(64, dtype=np.int32), (2, 1)), 8, (0, 1)
    )
    (few, few_now), (many, many_now) = (
        split.imbalance_of_steps(placement, now, rows) for rows in (1024, 65_536)
    )
    assert (few < inputs.chance_imbalance(1024, 8)).all()
    assert (many < few).all()
    # The same rows without levelling.
    assert many_now == pytest.approx(split.measured_imbalance(now), rel=0.1)
    assert (few_now > few).all()
    assert np.array_equal(few, split.imbalance_of_steps(placement, now, 1024)[0])


def test_trial_local_shares_leave_out_layers_without_rows() -> None:
    counts = SKEWED.copy()
    counts[:, 0] = 0
    split = TrainTestSplit.of(ExpertStatistics(counts))
    placement = plan(split.train.counts, slots=12, ranks=4, policy="connected").placement
    layers = split.test.layers
    now = ExpertPlacement.with_even_shares(placement, 4, layers)
    for imbalance in split.imbalance_of_steps(placement, now, 1000):
        assert np.isnan(imbalance[0])
        assert not np.isnan(imbalance[1:]).any()


@pytest.mark.parametrize(("rows", "ranks"), [(320, 17), (1000, 20), (32 * 50, 32)])
def test_chance_floor_is_close_to_exact_floor(rows: int, ranks: int) -> None:
    assert inputs.chance_imbalance(rows, ranks) == pytest.approx(
        exact_noise_floor(rows, ranks), rel=0.01
    )
    assert inputs.chance_imbalance(rows, 4) == noise_floor(rows, 4)


def test_chance_floor_of_576_ranks_matches_simulation() -> None:
    rng = np.random.default_rng(0)
    simulated_imbalance = (
        rng.multinomial(5760, [1 / 576] * 576, size=300).max(axis=1).mean() / 10 - 1
    )
    assert inputs.chance_imbalance(5760, 576) == pytest.approx(simulated_imbalance, rel=0.03)


@given(st.integers(2, 8), st.integers(1, 1000), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_advice_equal_load_is_not_worth_balancing(size: int, rows: int, layers: int) -> None:
    advice = advise(question(np.full((2, layers, 4 * size), rows, dtype=np.int64)))
    assert advice.worth.verdict is Verdict.NOISE
    assert advice.worth.now.mean == 0
    assert advice.slot_choices.advised.planned == 0


def test_advice_uniform_random_load_is_not_worth_balancing() -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(4000, [1 / 32] * 32, size=(8, 20)).astype(np.int64)
    advice = advise(question(counts))
    assert advice.worth.verdict is Verdict.NOISE
    assert advice.worth.now.mean == pytest.approx(advice.worth.floor, rel=0.1)


def test_advice_skewed_load_gains_by_slowest_rank() -> None:
    advice = advise(question(SKEWED))
    assert advice.worth.verdict is Verdict.WORTH
    # 100 of 160 on the first of four ranks; in 12 slots, all could have 40.
    assert advice.worth.now.mean == pytest.approx(100 / 40 - 1)
    assert advice.worth.planned.mean < 0.01
    zone = DeadZone.default(4)
    assert advice.worth.gain == pytest.approx(zone.slope * (2.5 - zone.knee), abs=0.01)
    assert advice.slots == 12
    assert advice.slot_choices.reason is SlotChoiceReason.FEWEST
    assert advice.migration is None
    assert advice.rank_choices.advised is None


def option(imbalance: float, step: float, seconds: float | None = None) -> ServingOption:
    return ServingOption("", imbalance, np.array([imbalance]), step, seconds)


def worth_of(now: ServingOption, *after: ServingOption, running: float = 1.0) -> Worth:
    """What serves by one plan, and, where there is a second one, by plans of the window before."""
    plan_alone, *following = after
    options = (now, plan_alone, plan_alone, plan_alone, plan_alone, *following)
    return Worth(options, running, 0.1, 0.1, Verdict.WORTH, None)


def test_verdict_names_the_first_reason_against_balancing() -> None:
    asked = question(SKEWED)  # its dead zone ends at an imbalance of 0.032
    with_kv = replace(asked, kv_cache=KvCache(1, 10**9), expert=EXPERT)
    level, uneven, slower = option(0.0, 1.0), option(1.0, 1.3), option(0.5, 1.29)
    for worth, inputs_of_advice, verdict in (
        (worth_of(uneven, level), asked, Verdict.WORTH),
        (worth_of(option(0.12, 1.3), level), asked, Verdict.NOISE),
        (replace(worth_of(option(0.03, 1.0), level), floor=0.0), asked, Verdict.DEAD_ZONE),
        (worth_of(uneven, level, running=0.5), with_kv, Verdict.KV_CACHE),
        (worth_of(uneven, replace(slower, planned=0.0)), asked, Verdict.SHIFTS),
        (worth_of(uneven, replace(slower, planned=1.0)), asked, Verdict.SMALL),
    ):
        assert judge_worth(worth, inputs_of_advice, 1.0) is verdict


def test_verdict_heeds_roofline_beside_dead_zone() -> None:
    slow, same, fast = option(1.0, 1.3, 2.0), option(0.0, 1.0, 2.0), option(0.0, 1.0, 1.0)
    assert time_saved(slow, same) == 0.0
    assert time_saved(slow, fast) == 0.5
    assert time_saved(slow, option(0.0, 1.0)) is None
    assert rows_saved(1.0, 0.0) == 0.5
    assert judge_worth(worth_of(slow, same), question(SKEWED), 1.0) is Verdict.SMALL
    assert judge_worth(worth_of(slow, fast), question(SKEWED), 1.0) is Verdict.WORTH


def test_cadence_compares_one_plan_with_plans_of_last_window() -> None:
    now, level, uneven = option(1.0, 1.3), option(0.0, 1.0), option(0.5, 1.2)
    assert worth_of(now, level).cadence is Cadence.UNKNOWN
    assert worth_of(now, level, level).cadence is Cadence.ANY
    assert worth_of(now, level, uneven).cadence is Cadence.ONCE
    follows = worth_of(now, uneven, level)
    assert follows.cadence is Cadence.FOLLOWING
    assert follows.gain == pytest.approx(0.3)
    assert worth_of(now, level, uneven).gain == pytest.approx(0.3)


def slot_choice(more: int, throughput: float, seconds: float | None = None) -> SlotChoice:
    return SlotChoice(
        8 + 4 * more, 2 + more, more > 0, 0.0, np.zeros(1), None, None, throughput, 1.0, seconds
    )


def test_advised_slots_are_fewest_within_two_percent_of_best_throughput() -> None:
    bare, one, two = slot_choice(0, 1.0), slot_choice(1, 1.19), slot_choice(2, 1.2)
    assert advise_slots([bare, one, two]) == (one, SlotChoiceReason.FEWEST)
    assert advise_slots([slot_choice(0, 1.18), one, two])[0].slots == 8
    assert advise_slots([bare, one, slot_choice(2, 1.3)])[0].slots == 16


def test_advised_slots_are_those_installed_where_these_do_as_well() -> None:
    bare, one, two = slot_choice(0, 1.19), slot_choice(1, 1.2), slot_choice(2, 1.1)
    assert advise_slots([bare, one, two], 12) == (one, SlotChoiceReason.INSTALLED)
    assert advise_slots([bare, one, two], 16) == (bare, SlotChoiceReason.FEWEST)


def test_advised_slots_are_least_where_reading_more_weights_costs_more() -> None:
    slow = [slot_choice(0, 1.0, 1.0), slot_choice(1, 1.2, 1.1)]
    assert advise_slots(slow) == (slow[0], SlotChoiceReason.READING)


def test_layers_that_gain_are_the_skewed_ones_or_none_where_most_are() -> None:
    inputs_of_advice = question(SKEWED)
    least = replace(slot_choice(0, 1.0), measured=np.array([0.0, 1.0, 0.03, np.nan, 0.8]))
    advised = replace(slot_choice(1, 1.0), measured=np.array([0.0, 0.0, 0.0, np.nan, 0.0]))
    assert layers_that_gain(inputs_of_advice, least, advised) == (1, 4)
    assert layers_that_gain(inputs_of_advice, least, least) is None
    all_skewed = replace(least, measured=np.full(5, 1.0))
    level = replace(advised, measured=np.zeros(5))
    assert layers_that_gain(inputs_of_advice, all_skewed, level) is None


def test_target_above_dead_zone_asks_for_fewer_slots() -> None:
    assert advise(question(SKEWED)).slots == 12
    assert advise(question(SKEWED, target=0.001)).slots == 12
    assert advise(question(SKEWED, target=2.0)).slots == 8


def test_windows_without_rows_are_left_out() -> None:
    counts = np.concatenate([SKEWED, np.zeros_like(SKEWED)])
    split = TrainTestSplit.of(ExpertStatistics(counts))
    assert (split.train.windows, split.test.windows) == (2, 2)
    assert advise(question(counts)).worth.verdict is Verdict.WORTH


def test_following_serves_each_window_by_the_plan_of_the_one_before() -> None:
    counts = np.full((6, 1, 8), 100, dtype=np.int64)
    for window in range(6):
        counts[window, 0, window % 8] = 3000
    split = TrainTestSplit.of(ExpertStatistics(counts))
    served = split.following(12, 4)
    assert [windows.counts[0, 0].argmax() for windows, _ in served] == [3, 4, 5]
    for windows, layout in served:
        # The expert that was hot before has the copies.
        hot_before = windows.counts[0, 0].argmax() - 1
        assert np.bincount(layout.placement[0]).argmax() == hot_before
    assert TrainTestSplit.of(ExpertStatistics(counts[:2])).following(12, 4) == ()


def test_following_plans_by_the_neighbour_of_windows_that_are_sampled() -> None:
    """Of 400 windows 8 are drawn; domains that last 50 windows have changed before hardly any."""
    counts = np.full((400, 1, 8), 100, dtype=np.int64)
    for window in range(400):
        counts[window, 0, window // 50 % 8] = 3000
    split = TrainTestSplit.of(ExpertStatistics(counts))
    served = split.following(12, 4)
    assert len(served) == 8
    followed = [
        np.bincount(layout.placement[0]).argmax() == windows.counts[0, 0].argmax()
        for windows, layout in served
    ]
    assert sum(followed) >= 6


def test_connectable_needs_experts_plus_ranks_less_one_slots() -> None:
    assert (min_slots_per_rank(256, 32), min_slots_per_rank(256, 36)) == (8, 8)
    assert can_connect(256, 288, 32)
    assert not can_connect(256, 288, 36)
    assert (connected_slots(256, 32), connected_slots(256, 36)) == (9, 9)
    assert connected_slots(1, 4) == 1


@given(st.integers(1, 300), st.integers(1, 300))
def test_rank_candidates_divide_experts_or_are_requested(experts: int, ranks: int) -> None:
    candidates = candidate_ranks(experts, ranks)
    assert ranks in candidates
    assert candidates == sorted(set(candidates))
    assert all(experts % size == 0 for size in candidates if size != ranks)


def test_advised_ranks_are_fewest_within_memory_and_latency() -> None:
    options = {"expert": EXPERT, "hardware": MACHINE, "latency": 1.0}
    assert _advised_ranks(options) == 2
    small = replace(MACHINE, figures=FIGURES | {"memory_gb": 2 * 3 * 1000 / 1e9})
    # 3 slots of 2 layers fill it: 4 ranks have 3 slots, but 80 % is all that experts may take.
    assert _advised_ranks(options | {"hardware": small}) == 8
    assert _advised_ranks(options | {"hardware": small, "memory_share": 1.0}) == 4
    assert _advised_ranks(options | {"latency": 1e-9}) is None
    slow = Hardware("slow", FIGURES | {"fp8_tflops": 1e-9})
    assert _advised_ranks(options | {"hardware": slow, "latency": None}) == 2, "memory alone"


def _advised_ranks(options: Mapping[str, object]) -> int | None:
    rank_choices = advise(question(SKEWED, **options)).rank_choices
    return None if rank_choices.advised is None else rank_choices.advised.ranks


def test_advice_more_step_rows_change_time_not_imbalance() -> None:
    options = {"expert": EXPERT, "hardware": MACHINE}
    one, ten = (advise(question(SKEWED, step_rows=n, **options)).worth for n in (16_000, 160_000))
    assert one.now.seconds is not None
    assert ten.now.seconds == pytest.approx(10 * one.now.seconds)
    assert ten.now.mean == one.now.mean
    assert ten.step_floor < one.step_floor


def test_advice_compares_with_installed_placement() -> None:
    statistics = ExpertStatistics(SKEWED)
    placement_plan = plan(SKEWED, slots=12, ranks=4)
    layout = ExpertPlacement(placement_plan.placement, placement_plan.shares, 4)
    same = advise(question(SKEWED, installed=layout, expert=EXPERT, hardware=MACHINE, latency=1.0))
    assert same.worth.verdict is not Verdict.WORTH
    assert same.slots == 12
    assert same.migration is not None
    assert same.migration.moves[0].copies == 0
    bad = replace(linear(statistics, 4))
    other = advise(question(SKEWED, installed=bad, slots=12))
    assert other.worth.verdict is Verdict.WORTH
    assert other.slots == 12


def test_advice_json_has_plain_values() -> None:
    counts = SKEWED.copy()
    counts[:, 1] = 0
    options = {"expert": EXPERT, "hardware": MACHINE, "latency": 1.0}
    values = to_json(advise(question(counts, **options)))
    assert values["kind"] == "a model, not a measurement"
    assert values["worth"]["options"][0]["by_layer"][1] is None
    assert [one["name"] for one in values["migration"]["moves"]] == [
        "to the plan", "next, incremental", "next, greedy", "every slot",
    ]  # fmt: skip
    assert values["migration"]["moves"][1]["copies"] == 0, "the load is the same"
    assert values["rank_choices"]["judged_by"] == "memory and latency"
    alone = to_json(advise(question(counts[:1])))
    assert alone["migration"] is None
    assert alone["inputs"]["held_out"] is False


@pytest.mark.parametrize(("greedy", "saved"), [(0.270, 0.068), (0.35, 0.0), (0.4, 0.0)])
def test_advice_says_where_greedy_is_more_even_than_plan(greedy: float, saved: float) -> None:
    """Of later windows, which nothing was planned on."""
    on_progress = advise(question(SKEWED))
    ways = [
        replace(way, measured=np.full(2, value))
        for way, value in zip(
            on_progress.worth.options, (2.0, greedy, 0.363, 0.2, 0.1, 0.4), strict=True
        )
    ]
    worth = replace(on_progress.worth, options=tuple(ways))
    assert isinstance(worth, Worth)
    assert worth.greedy_gain == pytest.approx(saved, abs=5e-4)
    lines = render(replace(on_progress, worth=worth), ColourMode.PLAIN).splitlines()
    assert ("  plan --policy greedy --split even" in lines) == bool(saved)
    assert max(map(len, lines)) <= 80
