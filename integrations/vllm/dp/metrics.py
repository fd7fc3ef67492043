"""Metrics of `dp_load_balancer`: process counters and, if installed, Prometheus metrics.

vLLM's API server serves the default registry, or with several API servers the sum over their
processes' files; metrics of the client library support both.
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
    """The metrics of this process; registered once."""

    routed_requests: Any
    aborted_requests: Any
    fallback_requests: Any
    policy_failures: Any
    queued_requests: Any
    policy_api_servers: Any


@cache
def prometheus_metrics() -> PrometheusMetrics | None:
    """Return the metrics; None without Prometheus' client library."""
    if find_spec("prometheus_client") is None:
        return None
    client: Any = import_module("prometheus_client")
    return PrometheusMetrics(
        routed_requests=client.Counter(
            PREFIX + "routed_requests", "Requests that a policy sent to a rank", ["dp_rank"]
        ),
        aborted_requests=client.Counter(PREFIX + "aborted_requests", "Requests that were aborted"),
        fallback_requests=client.Counter(
            PREFIX + "fallback_requests", "Requests queued too long, and sent by the engine's rule"
        ),
        policy_failures=client.Counter(
            PREFIX + "dp_policy_failures",
            "Failures of a policy; vLLM's own rule routes from then on",
        ),
        queued_requests=client.Gauge(
            PREFIX + "queued_requests",
            "Requests that wait for a rank; vLLM does not count them as waiting",
            multiprocess_mode="livesum",
        ),
        policy_api_servers=client.Gauge(
            PREFIX + "policy_api_servers",
            "API servers that share the policy of the first of them; 0 if it has failed",
            multiprocess_mode="livesum",
        ),
    )


class RoutingMetrics:
    """Counts the events of one client."""

    def __init__(self) -> None:
        self._prometheus = prometheus_metrics()

    def count_routed(self, rank: int) -> None:
        """Count a request that the policy sent to `rank`."""
        COUNTERS.add("routed_requests")
        if self._prometheus is not None:
            self._prometheus.routed_requests.labels(str(rank)).inc()

    def count_aborted(self) -> None:
        """Count a request that its client aborted."""
        COUNTERS.add("aborted_requests")
        if self._prometheus is not None:
            self._prometheus.aborted_requests.inc()

    def count_fallback(self) -> None:
        """Count a request that waited too long and went by vLLM's own rule."""
        COUNTERS.add("fallback_requests")
        if self._prometheus is not None:
            self._prometheus.fallback_requests.inc()

    def count_failure(self) -> None:
        """Count a failure of the policy."""
        COUNTERS.add("dp_policy_failures")
        if self._prometheus is not None:
            self._prometheus.policy_failures.inc()

    def set_api_servers(self, count: int) -> None:
        """Set the number of API servers that share the policy that this process has."""
        if self._prometheus is not None:
            self._prometheus.policy_api_servers.set(count)

    def set_queued(self, count: int) -> None:
        """Set the number of queued requests."""
        if self._prometheus is not None:
            self._prometheus.queued_requests.set(count)
