"""Exports Prometheus metrics of engines; names, units and labels are in `docs/observability.md`.

Labels have few values, known beforehand: there is no series per layer, expert or rank. A rank
exports its own metrics, so its number is the scraper's `instance`; its engines, one per layer group
of each model, share a registry and differ in the label `engine`.

The reasons of aborts are free text that may name ranks, and a peer of another version may send one
that is unknown here. `abort_label` maps them to a closed set: every further value would be another
series on every rank (vLLM's maintainers declined metrics of its balancer over that, issue 21038).
"""

import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from math import nan
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from equipoise import install_command
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    UNCHANGED,
    BalanceMeasured,
    BatchBalanceMeasured,
    BoundaryDone,
    Event,
    EventsDropped,
    RebalanceMeasured,
    RebalanceRecord,
    RebalanceSkipped,
    StepStalled,
)
from equipoise.hal.errors import EquipoiseError, UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

OTHER_LABEL = "other"
LABEL_BY_REASON = {
    "plans differ": "plans_differ",
    "tables differ": "tables_differ",
    "staged bytes differ": "staged_bytes_differ",
    "ranks out of step": "ranks_out_of_step",
    "no progress in time": "stalled",
    "no ballot from rank": "ballot_missing",
    "planner failed": "planner_failed",
    "transfer failed": "transfer_failed",
    "a rank still drains": "still_draining",
    "a rank is still in the rebalance before": "still_rebalancing",
}
"""The label of a reason that begins with the key."""
ABORT_LABELS = (*LABEL_BY_REASON.values(), OTHER_LABEL)


def abort_label(reason: str) -> str:
    """Returns the label of an abort's reason: one of `ABORT_LABELS`."""
    labels = (engine for start, engine in LABEL_BY_REASON.items() if reason.startswith(start))
    return next(labels, OTHER_LABEL)


PHASES = ("planning", "proposed", "transferring", "staged", "updating", "failed")
"""States of the engine in which a rebalance spends its time."""
PHASE_BUCKETS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
"""Upper limits in seconds; few, since each is a series for every phase of every engine."""
BOUNDARY_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.01, 0.1)
"""Upper limits in seconds: a boundary is shorter than a phase by far."""
ENGINE_LABELS = ("engine",)
"""Names of the labels that every metric has."""
LOOPBACK = "127.0.0.1"
"""Default address: metrics are not shown to the network unless asked for."""
MISSING_MESSAGE = f"prometheus_client is missing: {install_command('serve')}"


class MetricsMissing(UsageError):
    """The optional package prometheus_client is not installed."""


class PortTaken(EquipoiseError):
    """Metrics cannot be served on this address and port."""


def require_prometheus() -> None:
    """Raises `MetricsMissing` if prometheus_client cannot be imported."""
    try:
        import prometheus_client
    except ImportError as error:
        raise MetricsMissing(MISSING_MESSAGE) from error
    del prometheus_client


class PrometheusSink:
    """An event sink that keeps the Prometheus metrics of one engine.

    A gauge is nan until its figure is known, and again after the engine is closed: every comparison
    with nan is false, so no alert fires on a figure that is unknown.

    Args:
        registry: where the metrics are registered; several engines may share it.
        engine: value of the label `engine`: the name in the configuration, or another short name.
            Two sinks with the same name and registry add to the same counters.

    Raises:
        MetricsMissing: prometheus_client is not installed.
    """

    def __init__(self, registry: "CollectorRegistry", engine: str) -> None:
        require_prometheus()
        instruments = _instruments(registry)
        self._gauges = {
            name: metric.labels(engine=engine) for name, metric in instruments.gauges.items()
        }
        self._counters = {
            name: metric.labels(engine=engine) for name, metric in instruments.counters.items()
        }
        self._abort_counters = {
            reason: instruments.aborted.labels(engine=engine, reason=reason)
            for reason in ABORT_LABELS
        }
        self._phases = {
            phase: instruments.phases.labels(engine=engine, phase=phase) for phase in PHASES
        }
        self._boundaries = instruments.boundaries.labels(engine=engine)
        self._reset_gauges()

    def emit(self, event: Event) -> None:
        """Implements `EventSink`."""
        match event:
            case BoundaryDone(_, begin, end):
                self._boundaries.observe(end - begin)
            case BalanceMeasured():
                self._gauges["balancedness"].set(event.balancedness)
                self._gauges["imbalance"].set(event.imbalance)
            case BatchBalanceMeasured():
                self._gauges["batch_imbalance"].set(event.imbalance)
                self._gauges["unlevelled_batch_imbalance"].set(event.unlevelled_imbalance)
            case StepStalled(_, seconds):
                self._counters["stall_seconds"].inc(seconds)
            case RebalanceMeasured(record):
                self._count_rebalance(record)
            case RebalanceSkipped():
                self._counters["rebalances_skipped"].inc()
            case EventsDropped(count):
                self._counters["events_dropped"].inc(count)

    def close(self) -> None:
        """Resets the gauges; counters keep their values."""
        self._reset_gauges()

    def _reset_gauges(self) -> None:
        for gauge in self._gauges.values():
            gauge.set(nan)

    def _count_rebalance(self, record: RebalanceRecord) -> None:
        self._counters["rebalances"].inc()
        self._counters["slot_copy_bytes"].inc(record.bytes_received)
        for phase, seconds in record.phase_seconds.items():
            self._phases[phase].observe(seconds)
        if record.outcome not in COMPLETED:
            self._abort_counters[abort_label(record.outcome)].inc()
            return
        if record.outcome == UNCHANGED:
            self._counters["rebalances_unchanged"].inc()
        self._gauges["layers_short_of_staging"].set(record.short_of_staging)
        if record.predicted_imbalance is not None:
            self._gauges["predicted_imbalance"].set(record.predicted_imbalance)


@dataclass(frozen=True)
class _Instruments:
    """The metrics of a registry, registered once; each engine has its own series in them."""

    gauges: dict[str, Any]
    counters: dict[str, Any]
    aborted: Any
    phases: Any
    boundaries: Any


_REGISTERED: MutableMapping["CollectorRegistry", _Instruments] = WeakKeyDictionary()
_REGISTERING = Lock()
"""Held while metrics are registered: a registry refuses a name that it has already, so two engines
that are opened at once must not both register."""


def _instruments(registry: "CollectorRegistry") -> _Instruments:
    with _REGISTERING:
        instruments = _REGISTERED.get(registry)
        if instruments is None:
            instruments = _Instruments(_gauges(registry), _counters(registry), *_by_label(registry))
            _REGISTERED[registry] = instruments
    return instruments


def _gauges(registry: "CollectorRegistry") -> dict[str, Any]:
    from prometheus_client import Gauge

    descriptions = {
        "balancedness": "mean/max of rows over ranks, both summed over layers, last sub-window",
        "imbalance": "max/mean - 1 of rows over ranks, mean over layers, last sub-window",
        "batch_imbalance": "imbalance of one step of the last sub-window, as it was routed",
        "unlevelled_batch_imbalance": "the same if its rows were drawn by the installed shares",
        "predicted_imbalance": "imbalance as the last plan that was not aborted predicts it",
        "layers_short_of_staging": "layers that more staging would have made evener in the last "
        "rebalance",
    }
    return {
        name: Gauge(f"equipoise_{name}", text, ENGINE_LABELS, registry=registry)
        for name, text in descriptions.items()
    }


def _counters(registry: "CollectorRegistry") -> dict[str, Any]:
    from prometheus_client import Counter

    descriptions = {
        "rebalances": "rebalances that ended: committed, unchanged or aborted",
        "rebalances_unchanged": "rebalances whose plan left every slot as it was",
        "rebalances_skipped": "rebalances that were due while the previous one was still open",
        "slot_copy_bytes": "weights that this rank installed and did not hold before",
        "stall_seconds": "time that steps during rebalances took beyond the median step outside",
        "events_dropped": "events that were dropped because the sinks did not keep up",
    }
    return {
        name: Counter(f"equipoise_{name}", text, ENGINE_LABELS, registry=registry)
        for name, text in descriptions.items()
    }


def _by_label(registry: "CollectorRegistry") -> tuple[Any, Any, Any]:
    from prometheus_client import Counter, Histogram

    aborted = Counter(
        "equipoise_rebalances_aborted",
        "rebalances that were aborted, by reason",
        [*ENGINE_LABELS, "reason"],
        registry=registry,
    )
    phases = Histogram(
        "equipoise_rebalance_seconds",
        "seconds of a rebalance in each of its phases",
        [*ENGINE_LABELS, "phase"],
        buckets=PHASE_BUCKETS,
        registry=registry,
    )
    boundaries = Histogram(
        "equipoise_boundary_seconds",
        "host seconds of a boundary between steps that had work to do",
        ENGINE_LABELS,
        buckets=BOUNDARY_BUCKETS,
        registry=registry,
    )
    return aborted, phases, boundaries


def check_port_free(port: int, address: str = LOOPBACK) -> None:
    """Checks that metrics can be served there, by binding the port for a moment.

    Raises:
        PortTaken: the port is in use, or the address is not one of this machine.
    """
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As the server does: a port in TIME_WAIT after an earlier run is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket_address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name label above 63 letters
        raise _port_taken(port, address, error) from error


def _port_taken(port: int, address: str, error: OSError | UnicodeError) -> PortTaken:
    why = getattr(error, "strerror", None) or error
    return PortTaken(f"metrics cannot be served on {address}:{port}: {why}")


@dataclass(frozen=True)
class MetricsServer:
    """Serves a registry over HTTP until it is closed.

    Attributes:
        port: the TCP port that it listens on.
    """

    port: int
    _stop: Callable[[], None]
    _thread: Thread

    def close(self, timeout: float = 5.0) -> None:
        """Stops serving; waits at most `timeout` seconds for the server's thread."""
        self._stop()
        self._thread.join(timeout)


def serve_metrics(
    registry: "CollectorRegistry", port: int, address: str = LOOPBACK
) -> MetricsServer:
    """Serves `registry` on `address`:`port`; port 0 picks a free one.

    Raises:
        MetricsMissing: prometheus_client is not installed.
        PortTaken: the port is in use, or the address is not one of this machine.
    """
    require_prometheus()
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise _port_taken(port, address, error) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return MetricsServer(server.server_port, stop, thread)
