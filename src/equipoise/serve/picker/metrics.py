"""Prometheus metrics of an endpoint picker. Names and units: `docs/picker.md`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from equipoise.balancer.requests.dispatcher import Running, WorkerView, load_imbalance
from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.serve.metrics import DECISION_SECONDS, WAIT_SECONDS
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.picker.endpoint_pool import EndpointPool

PREFIX = "equipoise_picker_"


class PickerMetrics:
    """Counts requests, and shows what a pool knows."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        requests = Counter(
            PREFIX + "requests", "requests that ended", ["outcome"], registry=self._registry
        )
        self._outcomes = {one: requests.labels(outcome=one.value) for one in RequestOutcome}
        self._wait = Histogram(
            PREFIX + "queue_wait_seconds",
            "from when a request has been read until it has an endpoint",
            buckets=WAIT_SECONDS,
            registry=self._registry,
        )
        self._decision = Histogram(
            PREFIX + "decision_seconds",
            "one call of the policy",
            buckets=DECISION_SECONDS,
            registry=self._registry,
        )

    def observe_decision(self, seconds: float) -> None:
        """The policy was called, and took so long."""
        self._decision.observe(seconds)

    def request_ended(self, outcome: RequestOutcome, queue_seconds: float | None) -> None:
        """A request is over; None: it never waited for an endpoint."""
        self._outcomes[outcome].inc()
        if queue_seconds is not None:
            self._wait.observe(queue_seconds)

    def watch(self, pool: EndpointPool) -> None:
        """Show what `pool` knows, from now on."""
        self._registry.register(_PoolCollector(pool))

    def exposition(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)


class _PoolCollector:
    """Gauges, read when they are asked for."""

    def __init__(self, pool: EndpointPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        dispatcher = self._pool.dispatcher
        balance = load_imbalance(dispatcher.workers)
        yield _gauge("in_flight_requests", "requests under way", len(dispatcher.requests))
        yield _gauge("queued_requests", "requests that no endpoint has yet", dispatcher.queued)
        yield _gauge("serving_endpoints", "endpoints that get requests", self._pool.serving)
        yield _gauge("idle_tokens", "endpoints x largest load - all load", balance.imbalance)
        yield _gauge("idle_ratio", "imbalance over endpoints x largest load", balance.idle)
        joined = isinstance(dispatcher.policy, RemotePolicy)
        yield _gauge("policy_server_joined", "1 while the policy server decides", joined)
        yield CounterMetricFamily(
            PREFIX + "policy_errors",
            "events that the policy could not take",
            value=dispatcher.policy_errors,
        )
        yield from self._by_endpoint()

    def _by_endpoint(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        load = _family("endpoint_load_tokens", "prompt and output tokens of its requests")
        bound = _family("endpoint_bound_requests", "requests that it has")
        running = _family("endpoint_running_requests", "of them, those that are being answered")
        state = _family("endpoint_state", "1 for the state that it is in", "state")
        failed = CounterMetricFamily(
            PREFIX + "endpoint_report_failures", "load reports that failed", labels=["endpoint"]
        )
        # One that moved to another address keeps its name, also while its old address drains:
        # Prometheus refuses a page on which a series is twice.
        named: dict[str, list[WorkerView]] = {}
        for endpoint in self._pool.endpoints:
            named.setdefault(endpoint.settings.name, []).append(self._pool.view(endpoint))
        for name, views in named.items():
            requests = [one for view in views for one in view.requests.values()]
            load.add_metric([name], sum(view.load for view in views))
            bound.add_metric([name], len(requests))
            running.add_metric([name], sum(isinstance(one.status, Running) for one in requests))
            failed.add_metric([name], sum(view.report_failures for view in views))
            for one in WorkerState:
                state.add_metric([name, one.value], any(view.state is one for view in views))
        yield from (load, bound, running, failed, state)


def _gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, description, value=value)


def _family(name: str, description: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, description, labels=["endpoint", *labels])
