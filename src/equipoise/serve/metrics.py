"""What Prometheus is told; names and units are those of `docs/route.md`.

What is now is read when it is asked for: a token costs nothing here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.call import Call
from equipoise.serve.desk import Desk
from equipoise.serve.fleet import balance_of
from equipoise.serve.outcomes import Outcome
from equipoise.serve.ticket import Running

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WAIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
ADDED_SECONDS = (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DECISION_SECONDS = (0.000003, 0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1)
FIRST_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PREFIX = "equipoise_route_"


class Metrics:
    """Of one proxy.

    Args:
        workers: their names, by number.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        self._workers = tuple(workers)
        ended = self._counter("requests", "requests that ended", ["outcome"])
        self._ended = {outcome: ended.labels(outcome=outcome.value) for outcome in Outcome}
        self._tokens = self._counter("output_tokens", "tokens of answers that were passed on")
        self._retries = self._counter("retries", "attempts behind the first one of a request")
        self._wait = self._histogram(
            "queue_wait_seconds", "from a request's being read to its last binding", WAIT_SECONDS
        )
        self._added = self._histogram(
            "added_latency_seconds", "the proxy's own part in the first of an answer", ADDED_SECONDS
        )
        self._first = self._histogram(
            "first_answer_seconds", "from arrival to the first of an answer", FIRST_SECONDS
        )
        self._decision = self._histogram(
            "decision_seconds", "one call of the policy", DECISION_SECONDS
        )

    def decided(self, seconds: float) -> None:
        """The policy was called, and took so long."""
        self._decision.observe(seconds)

    def ended(self, call: Call) -> None:
        """A request is over."""
        self._ended[call.outcome or Outcome.FAILED].inc()
        self._tokens.inc(call.output)
        self._retries.inc(max(0, call.attempts - 1))
        if call.bound is not None:
            self._wait.observe(call.waited)
        if call.first is not None:
            self._first.observe(call.first - call.arrival)
        if call.added is not None:
            self._added.observe(call.added)

    def turned_away(self, outcome: Outcome) -> None:
        """A client came no further than its connection."""
        self._ended[outcome].inc()

    def watch(self, desk: Desk, dropped: Callable[[], int]) -> None:
        """Show what `desk` knows, and how many records were dropped, from now on."""
        self._registry.register(_Now(desk, self._workers, dropped))

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Any:
        return Counter(PREFIX + name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Any:
        return Histogram(PREFIX + name, what, buckets=buckets, registry=self._registry)


class _Now:
    """What others count, and gauges, read when they are asked for."""

    def __init__(self, desk: Desk, names: Sequence[str], dropped: Callable[[], int]) -> None:
        self._desk, self._names, self._dropped = desk, names, dropped

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        desk = self._desk
        balance = balance_of(desk.workers)
        yield _gauge("in_flight_requests", "requests in the proxy", len(desk.tickets))
        yield _gauge("pooled_requests", "of them, those that no worker has", desk.held)
        yield _gauge("imbalance_tokens", "workers x largest load - all load", balance.imbalance)
        yield _gauge("idle_ratio", "imbalance over workers x largest load", balance.idle)
        yield _count("policy_errors", "events that the policy could not take", desk.errors)
        yield _count("log_dropped_records", "records that were not written", self._dropped())
        yield from self._by_worker()

    def _by_worker(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        load = _family("worker_load_tokens", "prompt and output tokens of its requests", "worker")
        bound = _family("worker_bound_requests", "requests that it has", "worker")
        running = _family("worker_running_requests", "of them, those with a token", "worker")
        state = _family("worker_state", "1 for the state that it is in", "worker", "state")
        failed = CounterMetricFamily(
            PREFIX + "worker_report_failures", "reports that did not come", labels=["worker"]
        )
        for name, view in zip(self._names, self._desk.workers, strict=True):
            begun = sum(isinstance(one.state, Running) for one in view.tickets.values())
            load.add_metric([name], view.load)
            bound.add_metric([name], len(view.tickets))
            running.add_metric([name], begun)
            failed.add_metric([name], view.report_failures)
            for one in WorkerState:
                state.add_metric([name, one.value], float(view.state is one))
        yield from (load, bound, running, failed, state)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, what, value=value)


def _count(name: str, what: str, value: float) -> CounterMetricFamily:
    """Exposed as `NAME_total`."""
    return CounterMetricFamily(PREFIX + name, what, value=value)


def _family(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, what, labels=labels)
