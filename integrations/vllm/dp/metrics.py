"""Counts of the routing of requests: the process's counters and, where it is there, Prometheus.

vLLM's API server shows the default registry on its page of metrics, or, with several API servers,
the sum of what their processes wrote to files; metrics of the client library do both.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from equipoise.integrations.vllm.counters import COUNTERS

PREFIX = "equipoise_vllm_"


@dataclass(frozen=True)
class PrometheusMetrics:
    """Of this process; registered once."""

    routed: Any
    aborted: Any
    fallback: Any
    failures: Any
    queued: Any


@cache
def prometheus_metrics() -> PrometheusMetrics | None:
    """None without Prometheus' client library."""
    if find_spec("prometheus_client") is None:
        return None
    client: Any = import_module("prometheus_client")
    return PrometheusMetrics(
        routed=client.Counter(
            PREFIX + "routed_requests", "Requests that a policy sent to a rank", ["dp_rank"]
        ),
        aborted=client.Counter(PREFIX + "aborted_requests", "Requests that were given up"),
        fallback=client.Counter(
            PREFIX + "fallback_requests", "Requests queued too long, and sent by the engine's rule"
        ),
        failures=client.Counter(
            PREFIX + "dp_policy_failures", "Mistakes of a policy; the engine's rule goes on"
        ),
        queued=client.Gauge(
            PREFIX + "queued_requests",
            "Requests that wait for a rank, and that the engine does not count as waiting",
            multiprocess_mode="livesum",
        ),
    )


class RoutingMetrics:
    """What one client counts."""

    def __init__(self) -> None:
        self._prometheus = prometheus_metrics()

    def routed(self, rank: int) -> None:
        """A policy sent a request there."""
        COUNTERS.add("routed_requests")
        if self._prometheus is not None:
            self._prometheus.routed.labels(str(rank)).inc()

    def aborted(self) -> None:
        """A request was given up."""
        COUNTERS.add("aborted_requests")
        if self._prometheus is not None:
            self._prometheus.aborted.inc()

    def fell_back(self) -> None:
        """A request was held too long."""
        COUNTERS.add("fallback_requests")
        if self._prometheus is not None:
            self._prometheus.fallback.inc()

    def failed(self) -> None:
        """A policy failed."""
        COUNTERS.add("dp_policy_failures")
        if self._prometheus is not None:
            self._prometheus.failures.inc()

    def queued(self, count: int) -> None:
        """So many requests wait now."""
        if self._prometheus is not None:
            self._prometheus.queued.set(count)
