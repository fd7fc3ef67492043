"""Log lines."""

import json
import logging
import re

import pytest
from helpers.paths import ROOT
from helpers.strategies.engine_events import record, state_changed
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.runtime.events import (
    UNCHANGED,
    BalanceMeasured,
    BatchBalanceMeasured,
    RebalanceMeasured,
)
from equipoise.balancer.observe.log_lines import (
    BALANCEDNESS_LOG,
    REBALANCE_LOG,
    BalancednessLogSink,
    RebalanceLogSink,
    log_sinks,
    logfmt,
    rebalance_fields,
)
from equipoise.balancer.observe.metrics import PHASES
from equipoise.hal.errors import ConfigError

WORD = re.compile(r'([\w.]+)=("(?:[^"\\]|\\.)*"|\S*)(?: |$)')


def parse_logfmt(line: str) -> dict[str, str]:
    """Parses a logfmt line."""
    pairs = WORD.findall(line)
    return {key: json.loads(text) if text.startswith('"') else text for key, text in pairs}


def balance(step: int) -> BalanceMeasured:
    return BalanceMeasured(
        step, 0.0, imbalance=0.25, balancedness=0.8, mean_rows=80.0, max_rows=100.0
    )


def test_rebalance_line_of_commit_is_info_with_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REBALANCE_LOG.name):
        RebalanceLogSink("exact").emit(
            RebalanceMeasured(record(actual_imbalance=0.125, stall_seconds=0.5))
        )
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert parse_logfmt(line.message) == {
        **{
            "engine": "exact",
            "rebalance": "3",
            "outcome": "committed",
            "opened_at": "5",
            "ended_at": "9",
        },
        **{"layers": "2", "chunks": "1", "copies": "2", "bytes_moved": "200"},
        **{"planning_seconds": "0.25", "proposed_seconds": "0.5", "stall_seconds": "0.5"},
        **{"imbalance_before": "0.4", "predicted_imbalance": "0.1", "actual_imbalance": "0.125"},
    }
    assert vars(line)["equipoise"]["actual_imbalance"] == 0.125


def test_rebalance_line_of_unchanged_placement_is_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REBALANCE_LOG.name):
        RebalanceLogSink("exact").emit(
            RebalanceMeasured(record(outcome=UNCHANGED, layers=0, copies=0))
        )
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert parse_logfmt(line.message)["outcome"] == "unchanged"
    assert "reason" not in parse_logfmt(line.message)


def test_rebalance_line_counts_layers_short_of_staging() -> None:
    assert rebalance_fields(record(short_of_staging=7))["layers_short_of_staging"] == 7
    assert "layers_short_of_staging" not in rebalance_fields(record(short_of_staging=0))


def test_rebalance_line_of_abort_is_warning_with_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REBALANCE_LOG.name):
        RebalanceLogSink("exact").emit(RebalanceMeasured(record(outcome="staged bytes differ")))
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    fields = parse_logfmt(line.message)
    assert fields["outcome"] == "aborted"
    assert fields["reason"] == "staged bytes differ"


def test_observability_page_explains_every_log_key() -> None:
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    seconds = dict.fromkeys(set(PHASES) - {"failed"}, 0.1)
    full_record = record(
        outcome="plans differ",
        short_of_staging=1,
        actual_imbalance=0.1,
        stall_seconds=0.1,
        phase_seconds=seconds,
    )
    for key in ("engine", *rebalance_fields(full_record)):
        assert f"`{key}`" in text, key


def test_rebalance_lines_log_settled_rebalances_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REBALANCE_LOG.name):
        RebalanceLogSink("exact").emit(state_changed("planning", 3))
    assert caplog.records == []


def test_rebalance_line_omits_unknown_values() -> None:
    fields = rebalance_fields(record(imbalance_before=None, predicted_imbalance=None))
    assert not [key for key in fields if key.startswith("imbalance")]
    assert "stall_seconds" not in fields


@pytest.mark.parametrize(
    ("interval", "logged_steps"),
    [(1, [2, 4, 6, 8, 10]), (2, [2, 4, 6, 8, 10]), (4, [2, 4, 8]), (5, [2, 6, 10])],
)
def test_balancedness_is_logged_at_first_sum_after_each_interval(
    interval: int, logged_steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    lines = BalancednessLogSink("exact", interval)
    with caplog.at_level(logging.INFO, BALANCEDNESS_LOG.name):
        for step in (2, 4, 6, 8, 10):
            lines.emit(balance(step))
    assert [int(parse_logfmt(line.message)["step"]) for line in caplog.records] == logged_steps
    assert parse_logfmt(caplog.records[0].message)["balancedness"] == "0.8"


def test_balancedness_line_has_imbalances_of_last_sampled_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = BalancednessLogSink("exact", 1)
    with caplog.at_level(logging.INFO, BALANCEDNESS_LOG.name):
        lines.emit(balance(2))
        lines.emit(BatchBalanceMeasured(2, 0.0, imbalance=0.125, unlevelled_imbalance=0.5))
        lines.emit(balance(4))
    first, second = (parse_logfmt(line.message) for line in caplog.records)
    known = {"batch_imbalance": "0.125", "unlevelled_batch_imbalance": "0.5"}
    assert second.keys() - first.keys() == known.keys()
    assert {key: second[key] for key in known} == known


def test_balancedness_interval_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="log_balancedness_interval"):
        BalancednessLogSink("exact", 0)
    with pytest.raises(ConfigError, match="log_balancedness_interval"):
        config(log_balancedness_interval=0)


def config(**other: object) -> BalancerConfig:
    words = {"name": "exact", "shares": ShareMode.EXACT, "window_size": 2, "step_interval": 2}
    return BalancerConfig(**{**words, "sub_window": 1, **other})  # type: ignore[arg-type]


def test_log_sinks_are_returned_on_first_rank_only() -> None:
    balancedness_config = config(log_balancedness=True, log_balancedness_interval=7)
    assert [type(line) for line in log_sinks(config(), 0)] == [RebalanceLogSink]
    assert [type(line) for line in log_sinks(balancedness_config, 0)] == [
        RebalanceLogSink,
        BalancednessLogSink,
    ]
    assert log_sinks(balancedness_config, 1) == ()


@given(st.dictionaries(st.sampled_from("abc"), st.text() | st.integers()))
def test_logfmt_round_trips_any_text(fields: dict[str, object]) -> None:
    line = logfmt(fields)
    assert "\n" not in line
    assert parse_logfmt(line) == {key: str(value) for key, value in fields.items()}
