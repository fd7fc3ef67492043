"""The decision that advice begins with: planted loads, and figures that others published."""

import numpy as np
import pytest

from equipoise.balancer.experts import plan
from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
from equipoise.report.advice.advice import Advice, advise
from equipoise.report.advice.decision import Action
from equipoise.report.advice.hardware import Expert
from equipoise.report.advice.inputs import AdviceInputs
from equipoise.report.advice.kv_cache import KvCache
from equipoise.report.advice.worth import Cadence, Verdict

Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
RANKS, EXPERTS, LAYERS, WINDOWS = 8, 32, 3, 8
EXPERT = Expert(1000, "fp8")
SLOT = LAYERS * EXPERT.size
"""Bytes of a slot of a rank, over all layers."""


def advice(counts: Counts, **more: object) -> Advice:
    return advise(AdviceInputs(statistics=ExpertStatistics(counts), ranks=RANKS, **more))  # type: ignore[arg-type]


def load(*hot: int, rows: int = 1000, factor: int = 15) -> Counts:
    """(LAYERS, EXPERTS) of one window."""
    counts = np.full((LAYERS, EXPERTS), rows, dtype=np.int64)
    counts[:, list(hot)] *= factor
    return counts


def windows(*loads: Counts) -> Counts:
    """The loads in turn."""
    return np.stack([loads[window % len(loads)] for window in range(WINDOWS)])


def test_balanced_load_is_left_off_as_chance() -> None:
    counts = np.random.default_rng(0).multinomial(
        6400, [1 / EXPERTS] * EXPERTS, size=(WINDOWS, LAYERS)
    )
    decision = advice(counts).decision
    assert decision.action is Action.LEAVE_OFF
    assert decision.sentence.startswith("Leave it off: the imbalance of 0.0")
    assert "is chance" in decision.sentence


def test_imbalance_within_the_dead_zone_is_left_off() -> None:
    """5 % above the mean of ever so many rows is not chance, and yet no step is longer."""
    counts = np.full((WINDOWS, LAYERS, EXPERTS), 100_000, dtype=np.int64)
    counts[..., :4] = 105_700
    balanced = advice(counts)
    assert balanced.worth.verdict is Verdict.DEAD_ZONE
    assert balanced.decision.sentence == (
        "Leave it off: up to an imbalance of 0.0905 step time does not depend on it, and it is "
        "0.0495."
    )


def test_stable_hot_experts_of_one_rank_are_only_re_arranged() -> None:
    stable = advice(windows(load(0, 1, 2, 3, factor=2)))
    assert stable.decision.action is Action.REARRANGE
    assert stable.decision.sentence == (
        "Re-arrange experts only, no redundant slots: throughput +23% by this model."
    )
    assert stable.slots == EXPERTS


def test_ranks_that_do_not_divide_experts_are_told_their_slots() -> None:
    counts = windows(load(0, 1, 2, 3, factor=2))
    uneven = advise(AdviceInputs(statistics=ExpertStatistics(counts), ranks=5))
    assert uneven.decision.sentence.startswith(
        "Re-arrange experts only, in the 35 slots that 5 ranks need: throughput +"
    )


def test_stable_expert_hotter_than_a_rank_gets_redundant_slots() -> None:
    stable = advice(windows(load(0)))
    assert stable.decision.action is Action.REDUNDANT_SLOTS
    assert stable.decision.sentence.startswith(
        "Worth it with 1 redundant slot on each rank (40 slots): throughput +"
    )
    assert stable.worth.cadence is Cadence.ANY


def test_alternating_domains_are_planned_once_and_not_followed() -> None:
    alternating = advice(windows(load(0), load(9)))
    assert alternating.decision.action is Action.REDUNDANT_SLOTS
    assert "plan once, over all traffic: plans of single windows do worse" in (
        alternating.decision.sentence
    )


def test_domain_that_lasts_is_followed() -> None:
    first, second = [load(0)] * (WINDOWS // 2), [load(9)] * (WINDOWS // 2)
    lasting = advice(windows(*first, *second))
    assert lasting.decision.action is Action.REDUNDANT_SLOTS
    assert "rebalance as the load changes: no plan of it all holds" in lasting.decision.sentence
    # Slots, too, are judged by plans that follow.
    following, once = lasting.worth.following, lasting.worth.planned
    assert following is not None
    # Only the first window after the switch, one of eight, is planned on the domain before.
    assert following.mean == pytest.approx(once.mean * 2 / WINDOWS, rel=0.1)
    [advised] = [one for one in lasting.slot_choices.choices if one.slots == lasting.slots]
    assert advised.measured.max() == pytest.approx(following.mean, abs=0.01)


def test_load_that_is_new_in_each_window_is_left_off() -> None:
    restless = advice(windows(*(load(4 * window) for window in range(WINDOWS))), slots=40)
    assert restless.worth.verdict is Verdict.SHIFTS
    assert restless.decision.action is Action.LEAVE_OFF
    assert "the load changes from window to window" in restless.decision.sentence


def kv_cache(tokens: int) -> dict[str, object]:
    """So many tokens beside the slots that hold every expert once; a slot is 100 of them."""
    held = EXPERTS // RANKS * SLOT
    return {"expert": EXPERT, "kv_cache": KvCache(SLOT // 100, held + tokens * SLOT // 100)}


def test_kv_bound_load_gets_no_redundant_slots() -> None:
    """One hot expert, which only copies level; a slot is half of the KV cache."""
    counts = windows(load(0))
    bound = advice(counts, **kv_cache(200))
    assert bound.slots == EXPERTS
    assert bound.worth.verdict is Verdict.KV_CACHE
    assert bound.decision.action is Action.LEAVE_OFF
    assert "redundant slots take more from the KV cache than balance gains" in (
        bound.decision.sentence
    )
    by_slots = {one.per_rank: one for one in bound.slot_choices.choices}
    assert [by_slots[size].kv_tokens for size in (4, 5, 6, 7)] == [200, 100, 0, 0]
    assert by_slots[5].throughput < 1 <= by_slots[4].throughput


def test_kv_bound_load_that_can_be_re_arranged_is() -> None:
    counts = windows(load(0, 1, factor=8))
    assert advice(counts).decision.action is Action.REDUNDANT_SLOTS
    bound = advice(counts, **kv_cache(200))
    assert bound.decision.action is Action.REARRANGE
    assert "more slots would take more from the KV cache than balance gains" in (
        bound.decision.sentence
    )


@pytest.mark.parametrize(("tokens", "usage"), [(10_000, 1.0), (200, 0.4)])
def test_kv_cache_that_is_ample_costs_no_redundant_slots(tokens: int, usage: float) -> None:
    ample = advice(windows(load(0)), **kv_cache(tokens), kv_usage=usage)
    assert ample.decision.action is Action.REDUNDANT_SLOTS


def test_installed_redundant_slots_are_given_up_where_kv_cache_is_short() -> None:
    counts = windows(load(0, 1, 2, 3, factor=2))
    placed = plan(counts, slots=48, ranks=RANKS)
    installed = ExpertPlacement(placed.placement, placed.shares, RANKS)
    assert advice(counts, installed=installed).decision.sentence.startswith(
        "Keep what is installed"
    )
    bound = advice(counts, installed=installed, **kv_cache(400))
    assert bound.decision.sentence.startswith("Re-arrange experts only, no redundant slots")
    assert bound.worth.running == pytest.approx(2.0)


def test_slots_asked_about_are_judged_beside_better_ones() -> None:
    none_gained = advice(windows(load(0)), slots=32).decision
    assert none_gained.action is Action.LEAVE_OFF
    assert none_gained.sentence == (
        "Leave it off: throughput would rise by less than 2%; throughput would be 69% higher with "
        "40 slots."
    )
    re_arranged = advice(windows(load(0, 1, 2, 3, factor=8)), slots=32).decision
    assert re_arranged.action is Action.REARRANGE
    assert "higher with 40 slots" in re_arranged.sentence


def test_load_of_a100_log_is_advised_what_gained_there() -> None:
    """OEPLB's A100 log: Qwen3-235B, 8 ranks, max/mean 1.715 as the experts come.

    Re-arranged without redundancy the requests a second rose by 21.8 %; with 2 redundant slots a
    rank, for 7.1 GB and half of the KV cache, they fell by 10.2 %.
    """
    counts = np.full((4, 2, 128), 100_000, dtype=np.int64)
    counts[..., :16] *= 191
    counts[..., :16] //= 100  # 1.715 of the mean of the ranks
    expert = Expert.of_dimensions(4096, 1536, "bf16")
    # Two layers stand for 94: their KV cache, too, is that of two.
    per_token, slot = 2 * 2 * 128 * 2, 2 * expert.size
    log = advice(
        counts,
        expert=expert,
        kv_cache=KvCache(per_token, 16 * slot + 297_000 * per_token),
        kv_usage=256 * 257 / 297_000,
    )
    assert log.worth.now.mean == pytest.approx(0.715, abs=0.001)
    assert log.decision.action is Action.REARRANGE
    assert log.worth.gain == pytest.approx(0.218, abs=0.01)
    [eighteen] = [one for one in log.slot_choices.choices if one.per_rank == 18]
    assert eighteen.kv_tokens == pytest.approx(149_000, rel=0.01)
