"""Metrics of the proxy for Prometheus, the request log, and Weights & Biases.

Gauges are read when they are asked for, so that a token costs nothing here. Weights & Biases has a
thread of its own, because signing on takes seconds and no request waits for it. Names and units:
`docs/route.md`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from queue import Full, Queue
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from equipoise.balancer.observe.wandb_module import MODULE, require_wandb
from equipoise.balancer.requests.dispatcher import RequestDispatcher, Running, load_imbalance
from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.balancer.requests.request_router import prompt_weight_of
from equipoise.serve.health import LoopStalls
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.request_log import RequestLog, RequestStats
from equipoise.serve.settings import RouteSettings

LOG = logging.getLogger("equipoise.route")
CHART_QUEUE_CAPACITY = 64
"""Points that wait at most: signing on takes seconds, and what is older is no longer of use."""
CHART_CLOSE_TIMEOUT = 10.0
"""Seconds at shutdown for the points that wait: Weights & Biases may not answer at all."""


class WandbLogger:
    """Logs points to a run of its own.

    Args:
        project: where it is shown.

    Raises: WandbMissing: wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        require_wandb()
        self._project = project
        self._queue: Queue[Mapping[str, float] | None] = Queue(CHART_QUEUE_CAPACITY)
        self._thread = threading.Thread(target=self._send, name="equipoise.charts", daemon=True)
        self._thread.start()

    def log(self, point: Mapping[str, float]) -> None:
        """Send it, some time; returns at once. Points that do not fit are dropped, and logged."""
        try:
            self._queue.put_nowait(point)
        except Full:
            LOG.warning("Weights & Biases does not keep up: a point is dropped")

    def close(self) -> None:
        """Send what waits; bounded."""
        try:
            self._queue.put(None, timeout=CHART_CLOSE_TIMEOUT)
        except Full:
            LOG.warning("Weights & Biases does not keep up: points are left")
            return
        self._thread.join(CHART_CLOSE_TIMEOUT)

    def _send(self) -> None:
        try:
            run = import_module(MODULE).init(project=self._project)
            while (point := self._queue.get()) is not None:
                run.log({f"route/{name}": value for name, value in point.items()})
            run.finish()
        except Exception:
            LOG.exception("Weights & Biases failed; nothing more is sent there")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WAIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
ADDED_SECONDS = (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DECISION_SECONDS = (0.000003, 0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1)
FIRST_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PREFIX = "equipoise_route_"


class ProxyMetrics:
    """Prometheus metrics of one proxy.

    Args:
        workers: their names, by number.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        # CPU seconds and memory of this process: beside the tokens they say what one costs.
        ProcessCollector(registry=self._registry)
        self._workers = tuple(workers)
        counter = self._counter("requests", "requests that ended", ["outcome"])
        self._end_counters = {
            outcome: counter.labels(outcome=outcome.value) for outcome in RequestOutcome
        }
        self._tokens = self._counter("output_tokens", "output tokens relayed to clients")
        self._retries = self._counter("retries", "attempts after the first one of a request")
        self._wait = self._histogram(
            "queue_wait_seconds",
            "from when a request has been read until its last binding",
            WAIT_SECONDS,
        )
        self._added = self._histogram(
            "proxy_latency_seconds",
            "the proxy's own part of the time to the first bytes of an answer",
            ADDED_SECONDS,
        )
        self._first = self._histogram(
            "first_answer_seconds", "from arrival to the first of an answer", FIRST_SECONDS
        )
        self._decision = self._histogram(
            "decision_seconds", "one call of the policy", DECISION_SECONDS
        )

    def observe_decision(self, seconds: float) -> None:
        """The policy was called, and took so long."""
        self._decision.observe(seconds)

    def request_ended(self, stats: RequestStats) -> None:
        """A request is over."""
        self._end_counters[stats.outcome or RequestOutcome.FAILED].inc()
        self._tokens.inc(stats.output)
        self._retries.inc(max(0, stats.attempts - 1))
        if stats.bound_at is not None:
            self._wait.observe(stats.queue_seconds)
        if stats.first_answer_at is not None:
            self._first.observe(stats.first_answer_at - stats.arrival)
        if stats.proxy_seconds is not None:
            self._added.observe(stats.proxy_seconds)

    def request_refused(self, outcome: RequestOutcome) -> None:
        """A client came no further than its connection."""
        self._end_counters[outcome].inc()

    def watch(
        self,
        dispatcher: RequestDispatcher,
        stalls: LoopStalls,
        dropped: Callable[[], int],
    ) -> None:
        """Show what `dispatcher` and `stalls` know, and how many records were dropped."""
        self._registry.register(_LiveCollector(dispatcher, stalls, self._workers, dropped))

    def exposition(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Any:
        return Counter(PREFIX + name, description, labels, registry=self._registry)

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Any:
        return Histogram(PREFIX + name, description, buckets=buckets, registry=self._registry)


class _LiveCollector:
    """What others count, and gauges, read when they are asked for."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        stalls: LoopStalls,
        names: Sequence[str],
        dropped: Callable[[], int],
    ) -> None:
        self._dispatcher, self._names, self._dropped = dispatcher, names, dropped
        self._stalls = stalls

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        dispatcher = self._dispatcher
        balance = load_imbalance(dispatcher.workers)
        yield _gauge("in_flight_requests", "requests in the proxy", len(dispatcher.requests))
        yield _gauge(
            "queued_requests", "requests in the proxy that no worker has yet", dispatcher.queued
        )
        yield _gauge("idle_tokens", "workers x largest load - all load", balance.imbalance)
        yield _gauge("idle_ratio", "imbalance over workers x largest load", balance.idle)
        joined = isinstance(dispatcher.policy, RemotePolicy)
        yield _gauge("policy_server_joined", "1 while the policy server decides", joined)
        weight = prompt_weight_of(dispatcher.policy)
        yield _gauge("prompt_weight", "KV tokens that a prompt token weighs", weight)
        yield _count(
            "policy_errors", "events that the policy could not take", dispatcher.policy_errors
        )
        yield _count("log_dropped_records", "records that were not written", self._dropped())
        yield _count(
            "loop_stall_seconds", "for which the event loop was late", self._stalls.seconds
        )
        yield from self._by_worker()

    def _by_worker(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        load = _family("worker_load_tokens", "prompt and output tokens of its requests", "worker")
        bound_family = _family("worker_bound_requests", "requests that it has", "worker")
        running = _family("worker_running_requests", "of them, those with a token", "worker")
        state = _family("worker_state", "1 for the state that it is in", "worker", "state")
        failed = CounterMetricFamily(
            PREFIX + "worker_report_failures", "load reports that failed", labels=["worker"]
        )
        for name, view in zip(self._names, self._dispatcher.workers, strict=True):
            running_count = sum(isinstance(one.status, Running) for one in view.requests.values())
            load.add_metric([name], view.load)
            bound_family.add_metric([name], len(view.requests))
            running.add_metric([name], running_count)
            failed.add_metric([name], view.report_failures)
            for one in WorkerState:
                state.add_metric([name, one.value], float(view.state is one))
        yield from (load, bound_family, running, failed, state)


def _gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, description, value=value)


def _count(name: str, description: str, value: float) -> CounterMetricFamily:
    """Exposed as `NAME_total`."""
    return CounterMetricFamily(PREFIX + name, description, value=value)


def _family(name: str, description: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, description, labels=labels)


CHART_INTERVAL = 10.0
"""Seconds from one point of a chart to the next."""


class StatLogger:
    """Counts the ended requests of one proxy, logs them, and sends points of its charts.

    Raises: UsageError for a log that cannot be opened, or where wandb is missing.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self.metrics = ProxyMetrics([one.name for one in settings.workers])
        self._log = None if settings.log is None else RequestLog(settings.log)
        self._charts = None if settings.wandb is None else WandbLogger(settings.wandb)
        self._loop = asyncio.get_running_loop()
        self._run = time.time()
        self._clock_offset = self._run - self._loop.time()
        self._counts = dict.fromkeys(RequestOutcome, 0)
        self._dispatcher: RequestDispatcher | None = None

    def watch(self, dispatcher: RequestDispatcher, stalls: LoopStalls) -> None:
        """Show what these know, from now on."""
        self._dispatcher = dispatcher
        self.metrics.watch(dispatcher, stalls, self._dropped)

    def request_ended(self, stats: RequestStats) -> None:
        """A request is over."""
        outcome = stats.outcome or RequestOutcome.FAILED
        self._counts[outcome] += 1
        self.metrics.request_ended(stats)
        if self._log is not None:
            self._log.append(stats.to_record(self._loop.time(), self._clock_offset, self._run))

    def request_refused(self, outcome: RequestOutcome) -> None:
        """A client came no further than its connection."""
        self._counts[outcome] += 1
        self.metrics.request_refused(outcome)

    async def run(self) -> None:
        """Send points of charts, where any are asked for."""
        while True:
            await asyncio.sleep(CHART_INTERVAL)
            if self._charts is not None:
                self._charts.log(self._point())

    def close(self) -> None:
        """Write what waits; bounded."""
        if self._log is not None:
            self._log.close()
        if self._charts is not None:
            self._charts.close()

    def _dropped(self) -> int:
        return 0 if self._log is None else self._log.dropped

    def _point(self) -> dict[str, float]:
        assert self._dispatcher is not None
        dispatcher = self._dispatcher
        balance = load_imbalance(dispatcher.workers)
        outcomes = {f"requests/{one.value}": float(count) for one, count in self._counts.items()}
        return outcomes | {
            "in_flight_requests": len(dispatcher.requests),
            "queued_requests": dispatcher.queued,
            "idle_tokens": balance.imbalance,
            "idle_ratio": balance.idle,
        }
