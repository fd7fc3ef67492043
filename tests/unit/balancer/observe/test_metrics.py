"""Metrics, as Prometheus scrapes them."""

import re
import sys
from math import isnan
from typing import Any
from urllib.request import urlopen

import pytest
from helpers.paths import ROOT
from helpers.strategies.engine_events import record
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.runtime.events import (
    UNCHANGED,
    BalanceMeasured,
    BatchBalanceMeasured,
    BoundaryDone,
    EventsDropped,
    RebalanceMeasured,
    RebalanceSkipped,
    StepStalled,
)
from equipoise.balancer.observe.metrics import (
    ABORT_LABELS,
    PHASES,
    MetricsMissing,
    PortTaken,
    PrometheusSink,
    check_port_free,
    serve_metrics,
)

PAGE = ROOT / "docs" / "observability.md"
MAX_SERIES = 110
"""Upper limit of the series that one engine exports."""
GAUGES = (
    "equipoise_balancedness",
    "equipoise_imbalance",
    "equipoise_batch_imbalance",
    "equipoise_unlevelled_batch_imbalance",
    "equipoise_predicted_imbalance",
    "equipoise_layers_short_of_staging",
)


@pytest.fixture
def registry() -> Any:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    return client.CollectorRegistry()


def value(registry: Any, name: str, engine: str = "target", **labels: str) -> float:
    sample: float | None = registry.get_sample_value(name, {"engine": engine, **labels})
    assert sample is not None, name
    return sample


def test_metrics_count_bytes_and_phases_of_committed_rebalance(registry: Any) -> None:
    metrics = PrometheusSink(registry, "target")
    metrics.emit(RebalanceMeasured(record(bytes_received=700)))
    assert value(registry, "equipoise_rebalances_total") == 1
    assert value(registry, "equipoise_slot_copy_bytes_total") == 700
    assert value(registry, "equipoise_predicted_imbalance") == 0.1
    assert value(registry, "equipoise_rebalance_seconds_sum", phase="proposed") == 0.5
    assert value(registry, "equipoise_rebalance_seconds_count", phase="transferring") == 0
    for reason in ABORT_LABELS:
        assert value(registry, "equipoise_rebalances_aborted_total", reason=reason) == 0


def test_metrics_count_aborted_rebalances_by_reason(registry: Any) -> None:
    metrics = PrometheusSink(registry, "target")
    metrics.emit(RebalanceMeasured(record(predicted_imbalance=0.3)))
    metrics.emit(
        RebalanceMeasured(record(outcome="no ballot from rank(s) 1", predicted_imbalance=0.2))
    )
    metrics.emit(RebalanceMeasured(record(outcome="the moon")))
    assert value(registry, "equipoise_rebalances_total") == 3
    assert value(registry, "equipoise_rebalances_aborted_total", reason="ballot_missing") == 1
    assert value(registry, "equipoise_rebalances_aborted_total", reason="other") == 1
    assert value(registry, "equipoise_predicted_imbalance") == 0.3


def test_metrics_count_unchanged_rebalances_and_layers_short_of_staging(registry: Any) -> None:
    metrics = PrometheusSink(registry, "target")
    metrics.emit(RebalanceMeasured(record(short_of_staging=5)))
    assert value(registry, "equipoise_layers_short_of_staging") == 5
    assert value(registry, "equipoise_rebalances_unchanged_total") == 0
    metrics.emit(RebalanceMeasured(record(outcome=UNCHANGED, short_of_staging=2)))
    assert value(registry, "equipoise_rebalances_total") == 2
    assert value(registry, "equipoise_rebalances_unchanged_total") == 1
    assert value(registry, "equipoise_layers_short_of_staging") == 2
    metrics.emit(RebalanceMeasured(record(outcome="plans differ", short_of_staging=9)))
    assert value(registry, "equipoise_layers_short_of_staging") == 2


def test_metrics_expose_load_stall_boundary_and_dropped_events(registry: Any) -> None:
    metrics = PrometheusSink(registry, "target")
    metrics.emit(
        BalanceMeasured(8, 0.0, imbalance=0.25, balancedness=0.75, mean_rows=3.0, max_rows=4.0)
    )
    metrics.emit(BatchBalanceMeasured(4, 0.0, imbalance=0.5, unlevelled_imbalance=0.875))
    metrics.emit(StepStalled(9, 0.5))
    metrics.emit(BoundaryDone(9, 1.0, 1.125))
    metrics.emit(EventsDropped(3))
    assert value(registry, "equipoise_balancedness") == 0.75
    assert value(registry, "equipoise_imbalance") == 0.25
    assert value(registry, "equipoise_batch_imbalance") == 0.5
    assert value(registry, "equipoise_unlevelled_batch_imbalance") == 0.875
    assert value(registry, "equipoise_stall_seconds_total") == 0.5
    assert value(registry, "equipoise_boundary_seconds_sum") == 0.125
    assert value(registry, "equipoise_events_dropped_total") == 3


def test_metrics_count_skipped_rebalances_separately(registry: Any) -> None:
    metrics = PrometheusSink(registry, "target")
    metrics.emit(RebalanceSkipped(9))
    assert value(registry, "equipoise_rebalances_skipped_total") == 1
    assert value(registry, "equipoise_rebalances_total") == 0


def test_metrics_gauges_are_nan_until_known(registry: Any) -> None:
    """A predicted imbalance of 0 would make an alert fire at the first load."""
    metrics = PrometheusSink(registry, "target")
    assert all(isnan(value(registry, name)) for name in GAUGES)
    metrics.emit(
        BalanceMeasured(8, 0.0, imbalance=0.25, balancedness=0.75, mean_rows=3.0, max_rows=4.0)
    )
    assert value(registry, "equipoise_imbalance") == 0.25
    assert isnan(value(registry, "equipoise_predicted_imbalance"))


def test_metrics_close_keeps_counters_and_resets_gauges(
    registry: Any,
) -> None:
    metrics = PrometheusSink(registry, "target")
    metrics.emit(
        BalanceMeasured(8, 0.0, imbalance=0.25, balancedness=0.75, mean_rows=3.0, max_rows=4.0)
    )
    metrics.emit(RebalanceMeasured(record(predicted_imbalance=0.1)))
    metrics.close()
    assert all(isnan(value(registry, name)) for name in GAUGES)
    assert value(registry, "equipoise_rebalances_total") == 1


def test_metrics_of_engines_in_one_registry_are_separate(registry: Any) -> None:
    target, draft = PrometheusSink(registry, "target"), PrometheusSink(registry, "draft")
    target.emit(RebalanceMeasured(record(bytes_received=700)))
    draft.emit(
        RebalanceMeasured(
            record(bytes_received=30, outcome="plans differ", phase_seconds={"proposed": 2.0})
        )
    )
    assert value(registry, "equipoise_slot_copy_bytes_total") == 700
    assert value(registry, "equipoise_slot_copy_bytes_total", "draft") == 30
    reason = {"reason": "plans_differ"}
    assert value(registry, "equipoise_rebalances_aborted_total", **reason) == 0
    assert value(registry, "equipoise_rebalances_aborted_total", "draft", **reason) == 1
    assert value(registry, "equipoise_rebalance_seconds_sum", "draft", phase="proposed") == 2
    draft.close()
    assert value(registry, "equipoise_predicted_imbalance") == 0.1


def test_metrics_of_registries_are_separate(registry: Any) -> None:
    other = type(registry)()
    PrometheusSink(registry, "target").emit(StepStalled(9, 0.5))
    PrometheusSink(other, "target")
    assert value(other, "equipoise_stall_seconds_total") == 0


def test_metrics_series_count_is_bounded(registry: Any) -> None:
    metrics = PrometheusSink(registry, "target")

    def series() -> int:
        samples = (sample for metric in registry.collect() for sample in metric.samples)
        return sum(not sample.name.endswith("_created") for sample in samples)

    before = series()
    for number in range(300):
        seconds = dict.fromkeys(PHASES, 0.1)
        metrics.emit(
            RebalanceMeasured(
                record(number=number, outcome=f"reason {number}", phase_seconds=seconds)
            )
        )
        metrics.emit(RebalanceMeasured(record(number=number, phase_seconds=seconds)))
        metrics.emit(BalanceMeasured(number, 0.0, 0.1, 0.9, 1.0, 1.0))
    assert series() == before <= MAX_SERIES


def test_metrics_phases_equal_rebalance_states() -> None:
    from equipoise.balancer.experts.engine import states

    rebalance_states = (*states.Voting.__args__, states.Updating)
    assert {state.__name__.lower() for state in rebalance_states} == set(PHASES)


def test_observability_page_lists_every_metric_and_label(registry: Any) -> None:
    PrometheusSink(registry, "target")
    text = PAGE.read_text(encoding="utf-8")
    metric_names = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in registry.collect()
    }
    rows = set(re.findall(r"^\| `(equipoise_\w+)` \|", text, re.MULTILINE))
    assert rows == metric_names
    assert set(re.findall(r"equipoise_\w+", text)) <= metric_names
    for label in (*PHASES, *ABORT_LABELS):
        assert f"`{label}`" in text


def test_metrics_export_serves_until_closed(registry: Any) -> None:
    PrometheusSink(registry, "target").emit(StepStalled(9, 0.5))
    exporter = serve_metrics(registry, 0)
    try:
        with urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=WATCHDOG) as answer:
            text = answer.read().decode()
        assert 'equipoise_stall_seconds_total{engine="target"} 0.5' in text.splitlines()
        with pytest.raises(PortTaken, match=f"127.0.0.1:{exporter.port}"):
            serve_metrics(registry, exporter.port)
        with pytest.raises(PortTaken, match=f"127.0.0.1:{exporter.port}"):
            check_port_free(exporter.port)
    finally:
        exporter.close()
    check_port_free(exporter.port)
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=WATCHDOG)


def test_metrics_without_prometheus_client_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsMissing, match=r"\.\[serve\]"):
        PrometheusSink(None, "target")  # type: ignore[arg-type]
