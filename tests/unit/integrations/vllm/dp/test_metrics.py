"""What is counted stands among the process's counters, and on the engine's page of metrics."""

import pytest
from prometheus_client import REGISTRY

from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.dp import metrics
from equipoise.integrations.vllm.dp.metrics import PREFIX, RoutingMetrics, prometheus_metrics

NAMES = ("routed_requests", "aborted_requests", "fallback_requests", "dp_policy_failures")


@pytest.fixture
def without_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "prometheus_metrics", lambda: None)


def count_all(meters: RoutingMetrics) -> dict[str, int]:
    """What one of each adds to the counters."""
    before = COUNTERS.read()
    meters.count_routed(1)
    meters.count_aborted()
    meters.count_fallback()
    meters.count_failure()
    meters.set_queued(3)
    after = COUNTERS.read()
    return {name: after[name] - before[name] for name in NAMES}


def metric_value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(PREFIX + name, labels) or 0.0


def test_meters_count_event_in_counters_and_prometheus() -> None:
    meters = RoutingMetrics()
    rank = metric_value("routed_requests_total", dp_rank="1")
    others = {name: metric_value(f"{name}_total") for name in NAMES[1:]}
    assert count_all(meters) == dict.fromkeys(NAMES, 1)
    assert metric_value("routed_requests_total", dp_rank="1") == rank + 1
    assert {name: metric_value(f"{name}_total") for name in NAMES[1:]} == {
        name: count + 1 for name, count in others.items()
    }
    assert metric_value("queued_requests") == 3
    meters.set_queued(0)
    assert metric_value("queued_requests") == 0


def test_meters_of_two_clients_share_prometheus_metrics() -> None:
    assert prometheus_metrics() is prometheus_metrics()
    RoutingMetrics().count_aborted()
    before = metric_value("aborted_requests_total")
    RoutingMetrics().count_aborted()
    assert metric_value("aborted_requests_total") == before + 1


def test_meters_count_without_prometheus(without_prometheus: None) -> None:
    assert count_all(RoutingMetrics()) == dict.fromkeys(NAMES, 1)
