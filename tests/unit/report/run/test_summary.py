"""A run's figures, its verdict and its JSON."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from equipoise.demo.run_record import RunRecord
from equipoise.demo.settings import VariantName
from equipoise.report.run.summary import summarise
from equipoise.report.run.table import render
from equipoise.report.terminal import ColourMode

PROMISED = [
    "version",
    "backend",
    "ranks",
    "layers",
    "experts",
    "slots",
    "shares",
    "steps",
    "tokens",
    "phases",
    "switch_steps",
    "imbalance_unbalanced",
    "imbalance_balanced",
    "imbalance_static",
    "imbalance_lagged",
    "imbalance_local",
    "imbalance_node",
    "imbalance_exact",
    "imbalance_placement",
    "noise_floor",
    "rebalances",
    "copies",
    "slots_total",
    "bytes_moved",
    "stall_seconds",
    "tokens_per_second",
    "outputs_identical",
]
MakeRecord = Callable[..., RunRecord]


def test_summary_json_has_every_promised_key(make_record: MakeRecord) -> None:
    summary_json = json.loads(json.dumps(summarise(make_record()).to_json(), allow_nan=False))
    assert set(PROMISED) <= set(summary_json)
    assert summary_json["outputs_identical"] is True


def test_summary_figures_equal_hand_computed_values(make_record: MakeRecord) -> None:
    summary = summarise(make_record())
    assert summary.measured_from_step == 3
    assert summary.imbalance_unbalanced == pytest.approx((0.5 + 1.0) / 2)
    assert summary.imbalance_static == pytest.approx(0.125)
    assert summary.imbalance_lagged == pytest.approx(0.05)
    assert summary.imbalance_balanced == 0.0
    assert (summary.tokens, summary.rebalances, summary.rebalances_per_phase) == (240, 4, (2, 2))
    assert (summary.copies, summary.slots_total, summary.bytes_moved) == (12, 12, 12_000)
    assert summary.tokens_per_second == pytest.approx(40.0)
    assert summary.tokens_per_second_unbalanced == pytest.approx(20.0)
    assert (summary.stall_seconds, summary.stall_noise_seconds) == (0.0, 0.0)
    assert summary.exit_code == 0


@pytest.mark.parametrize("name", VariantName)
def test_summary_has_the_imbalance_of_each_variant(make_record: MakeRecord, name: str) -> None:
    record = make_record()
    record.variants[name] = record.variants["lagged"]
    summary = summarise(record)
    assert summary.imbalance_lagged is not None
    assert summary.to_json()[f"imbalance_{name}"] == summary.imbalance_lagged


def test_summary_stall_is_relative_to_unbalanced_steps(make_record: MakeRecord) -> None:
    record = make_record()
    slow = record.variants["exact"].step_seconds.copy()
    slow[0], slow[5] = 60.0, 1.25
    record.variants["exact"] = replace(record.variants["exact"], step_seconds=slow)
    assert summarise(record).stall_seconds == pytest.approx(0.25)


def test_summary_of_missing_variant_is_null(make_record: MakeRecord) -> None:
    record = make_record()
    del record.variants["static"], record.variants["lagged"], record.variants["unbalanced"]
    summary = summarise(record)
    assert (summary.imbalance_static, summary.imbalance_lagged) == (None, None)
    assert (summary.imbalance_unbalanced, summary.tokens_per_second_unbalanced) == (None, None)


@pytest.mark.parametrize("name", ["unbalanced", "static", "lagged", "exact"])
def test_summary_fails_when_one_variant_differs(make_record: MakeRecord, name: str) -> None:
    record = make_record()
    record.variants[name] = replace(record.variants[name], outputs="b")
    summary = summarise(record)
    assert not summary.outputs_identical
    assert summary.exit_code == 1


def test_summary_fails_when_all_variants_differ_from_reference(
    make_record: MakeRecord,
) -> None:
    assert not summarise(make_record(reference_outputs="b")).outputs_identical


def test_summary_without_variants_is_not_identical(make_record: MakeRecord) -> None:
    assert not summarise(make_record(shares="none", variants={})).outputs_identical


def test_summary_run_without_moves_is_not_exercised(make_record: MakeRecord) -> None:
    record = make_record()
    still = tuple(replace(rebalance, copies=0) for rebalance in record.variants["exact"].rebalances)
    record.variants["exact"] = replace(record.variants["exact"], rebalances=still)
    summary = summarise(record)
    assert (summary.not_exercised, summary.exit_code) == ("no slot moved", 1)


def test_summary_of_one_rank_has_nothing_to_exercise(make_record: MakeRecord) -> None:
    record = replace(make_record(), ranks=1)
    record.variants["exact"] = replace(record.variants["exact"], rebalances=())
    summary = summarise(record)
    assert (summary.not_exercised, summary.exit_code) == (None, 0)
    assert summary.ranks_text == "1 rank"
    assert "one rank has every expert: nothing to balance" in render(summary, ColourMode.PLAIN)


def test_summary_counts_unchanged_rebalances_apart(make_record: MakeRecord) -> None:
    record = make_record()
    rebalances = record.variants["exact"].rebalances
    still = (
        *rebalances[:3],
        replace(rebalances[3], outcome="unchanged", copies=0, bytes_moved=0),
    )
    record.variants["exact"] = replace(record.variants["exact"], rebalances=still)
    summary = summarise(record)
    assert (summary.rebalances, summary.rebalances_per_phase, summary.rebalances_unchanged) == (
        3,
        (2, 1),
        1,
    )
    assert (summary.not_exercised, summary.exit_code) == (None, 0)


def test_summary_phase_with_one_ended_rebalance_is_not_exercised(make_record: MakeRecord) -> None:
    record = make_record()
    rebalances = record.variants["exact"].rebalances
    outcomes = (*rebalances[:3], replace(rebalances[3], outcome="timeout"))
    record.variants["exact"] = replace(record.variants["exact"], rebalances=outcomes)
    summary = summarise(record)
    assert summary.not_exercised == "phase code had 1 rebalance(s) without an abort, needs 2"
    assert (summary.rebalances_per_phase, summary.exit_code) == ((2, 1), 1)


def test_summary_without_balancing_exits_0(make_record: MakeRecord) -> None:
    record = make_record(shares="none")
    for name in ("static", "lagged", "exact"):
        del record.variants[name]
    summary = summarise(record)
    assert (summary.imbalance_balanced, summary.stall_seconds) == (None, None)
    assert (summary.measured_from_step, summary.exit_code) == (0, 0)


def test_summary_of_empty_steps_has_no_figure_and_no_nan(make_record: MakeRecord) -> None:
    record = make_record()
    empty = {
        name: replace(variant, rank_rows=np.zeros_like(variant.rank_rows))
        for name, variant in record.variants.items()
    }
    summary = summarise(replace(record, variants=empty))
    assert (summary.imbalance_balanced, summary.noise_floor) == (None, None)
    json.dumps(summary.to_json(), allow_nan=False)
