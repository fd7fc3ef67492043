"""Why epochs are aborted, in a closed set of words: what a label of a metric may be.

Reasons are free text: some name ranks, and a peer may say what this version has never heard. A
label must not be: every new value is a new series, on every rank (vLLM's maintainers declined
metrics of its balancer over that, issue 21038).

Metrics for Prometheus: names, units and labels are those of `docs/observability.md`.

Labels have few values, known beforehand: no series a layer, an expert or a rank. A rank exports
for itself, so its number is the scraper's `instance`; its engines, one a family of layers of each
model, share a registry, and are told apart by the label `engine`.
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
    BoundaryDone,
    Event,
    EventsDropped,
    RebalanceMeasured,
    RebalanceRecord,
    RebalanceSkipped,
    StepStalled,
)
from equipoise.hal.errors import EquipoiseError, UsageError

OTHER_LABEL = "other"
LABEL_BY_REASON = {
    "plans differ": "plans_differ",
    "tables differ": "tables_differ",
    "staged bytes differ": "staged_bytes_differ",
    "ranks out of step": "ranks_out_of_step",
    "out of patience": "out_of_patience",
    "no ballot from rank": "ballot_missing",
    "planner failed": "planner_failed",
    "move failed": "move_failed",
    "a rank still drains": "still_draining",
    "a rank is still in the epoch before": "still_in_epoch",
}
"""How a reason begins, and its label."""
ABORT_LABELS = (*LABEL_BY_REASON.values(), OTHER_LABEL)


def abort_label(reason: str) -> str:
    """One of `ABORT_LABELS`."""
    found = (label for start, label in LABEL_BY_REASON.items() if reason.startswith(start))
    return next(found, OTHER_LABEL)


if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PHASES = ("planning", "proposed", "transferring", "staged", "updating", "failed")
"""States of the engine in which an epoch spends its time."""
PHASE_BUCKETS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
BOUNDARY_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.01, 0.1)
ENGINE_LABELS = ("engine",)
"""The label that every metric has."""
LOOPBACK = "127.0.0.1"
MISSING_MESSAGE = f"prometheus_client is missing: {install_command('serve')}"


class MetricsMissing(UsageError):
    """prometheus_client, which is optional, is not installed."""


class PortTaken(EquipoiseError):
    """Metrics cannot be served there."""


def require_prometheus() -> None:
    """Raises `MetricsMissing` where there is nothing to export with."""
    try:
        import prometheus_client
    except ImportError as error:
        raise MetricsMissing(MISSING_MESSAGE) from error
    del prometheus_client


class PrometheusSink:
    """A journal that keeps what Prometheus asks for, of one engine.

    A gauge is nan until its figure is known, and again once the engine is closed: an alert compares
    what is known, and with nan every comparison is false.

    Args:
        registry: where the metrics are registered; several engines may share it.
        engine: the value of the label `engine`: the configuration's label, or another short name.
            Two journals of one name and registry add to the same counters.

    Raises:
        MetricsMissing: prometheus_client is not installed.
    """

    def __init__(self, registry: "CollectorRegistry", engine: str) -> None:
        require_prometheus()
        found = _instruments(registry)
        self._gauges = {name: one.labels(engine=engine) for name, one in found.gauges.items()}
        self._counters = {name: one.labels(engine=engine) for name, one in found.counters.items()}
        self._aborted = {
            reason: found.aborted.labels(engine=engine, reason=reason) for reason in ABORT_LABELS
        }
        self._phases = {phase: found.phases.labels(engine=engine, phase=phase) for phase in PHASES}
        self._boundaries = found.boundaries.labels(engine=engine)
        self._reset_gauges()

    def emit(self, entry: Event) -> None:
        """See `StatLogger`."""
        match entry:
            case BoundaryDone(_, begin, end):
                self._boundaries.observe(end - begin)
            case BalanceMeasured():
                self._gauges["balancedness"].set(entry.balancedness)
                self._gauges["actual_imbalance"].set(entry.imbalance)
            case StepStalled(_, seconds):
                self._counters["stall_seconds"].inc(seconds)
            case RebalanceMeasured(record):
                self._count_rebalance(record)
            case RebalanceSkipped():
                self._counters["epochs_skipped"].inc()
            case EventsDropped(entries):
                self._counters["journal_lost"].inc(entries)

    def close(self) -> None:
        """What was counted stays as it is; of what is now, nothing more is known."""
        self._reset_gauges()

    def _reset_gauges(self) -> None:
        for gauge in self._gauges.values():
            gauge.set(nan)

    def _count_rebalance(self, record: RebalanceRecord) -> None:
        self._counters["epochs"].inc()
        self._counters["slot_copy_bytes"].inc(record.bytes_received)
        for phase, seconds in record.phase_seconds.items():
            self._phases[phase].observe(seconds)
        if record.outcome not in COMPLETED:
            self._aborted[abort_label(record.outcome)].inc()
            return
        if record.outcome == UNCHANGED:
            self._counters["epochs_unchanged"].inc()
        self._gauges["layers_short_of_staging"].set(record.short_of_staging)
        if record.imbalance_predicted is not None:
            self._gauges["predicted_imbalance"].set(record.imbalance_predicted)


@dataclass(frozen=True)
class _Instruments:
    """What is registered once in a registry; each engine has series of its own in them."""

    gauges: dict[str, Any]
    counters: dict[str, Any]
    aborted: Any
    phases: Any
    boundaries: Any


_REGISTERED: MutableMapping["CollectorRegistry", _Instruments] = WeakKeyDictionary()
_REGISTERING = Lock()
"""A registry refuses a name that it has already."""


def _instruments(registry: "CollectorRegistry") -> _Instruments:
    with _REGISTERING:
        found = _REGISTERED.get(registry)
        if found is None:
            found = _Instruments(_gauges(registry), _counters(registry), *_by_label(registry))
            _REGISTERED[registry] = found
    return found


def _gauges(registry: "CollectorRegistry") -> dict[str, Any]:
    from prometheus_client import Gauge

    what = {
        "balancedness": "mean/max of rows over ranks, both summed over layers, last sub-window",
        "actual_imbalance": "max/mean - 1 of rows over ranks, mean over layers, last sub-window",
        "predicted_imbalance": "the same as the last plan has it that was not aborted",
        "layers_short_of_staging": "layers that more staging would have brought lower in it",
    }
    return {
        name: Gauge(f"equipoise_{name}", text, ENGINE_LABELS, registry=registry)
        for name, text in what.items()
    }


def _counters(registry: "CollectorRegistry") -> dict[str, Any]:
    from prometheus_client import Counter

    what = {
        "epochs": "epochs that ended: committed, unchanged or aborted",
        "epochs_unchanged": "epochs whose plan left every slot as it was",
        "epochs_skipped": "epochs that were due while the one before was still open here",
        "slot_copy_bytes": "weights that this rank installed and did not hold",
        "stall_seconds": "what steps within epochs took longer than the median step outside",
        "journal_lost": "entries of the journal that were dropped",
    }
    return {
        name: Counter(f"equipoise_{name}", text, ENGINE_LABELS, registry=registry)
        for name, text in what.items()
    }


def _by_label(registry: "CollectorRegistry") -> tuple[Any, Any, Any]:
    from prometheus_client import Counter, Histogram

    aborted = Counter(
        "equipoise_epochs_aborted",
        "epochs that were left",
        [*ENGINE_LABELS, "reason"],
        registry=registry,
    )
    phases = Histogram(
        "equipoise_epoch_seconds",
        "seconds of an epoch by phase",
        [*ENGINE_LABELS, "phase"],
        buckets=PHASE_BUCKETS,
        registry=registry,
    )
    boundaries = Histogram(
        "equipoise_boundary_seconds",
        "host seconds of a boundary that had something to do",
        ENGINE_LABELS,
        buckets=BOUNDARY_BUCKETS,
        registry=registry,
    )
    return aborted, phases, boundaries


def check_port_free(port: int, address: str = LOOPBACK) -> None:
    """See whether metrics could be served there, by taking the port for a moment.

    Raises:
        PortTaken: somebody else is there, or the address is not of this machine.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as one:
            # As the server does: a port that was served on a moment ago is free.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(where)
    except (OSError, UnicodeError) as error:  # a label of more than 63 letters is no name
        raise _port_taken(port, address, error) from error


def _port_taken(port: int, address: str, error: OSError | UnicodeError) -> PortTaken:
    why = getattr(error, "strerror", None) or error
    return PortTaken(f"metrics cannot be served on {address}:{port}: {why}")


@dataclass(frozen=True)
class MetricsServer:
    """Serves a registry over HTTP, until it is closed.

    Attributes:
        port: on which it is served.
    """

    port: int
    _stop: Callable[[], None]
    _thread: Thread

    def close(self, timeout: float = 5.0) -> None:
        """Serve no more; bounded."""
        self._stop()
        self._thread.join(timeout)


def serve_metrics(
    registry: "CollectorRegistry", port: int, address: str = LOOPBACK
) -> MetricsServer:
    """Serve `registry` on `address`:`port`; 0 picks a free port.

    Raises:
        MetricsMissing: prometheus_client is not installed.
        PortTaken: somebody else is there, or the address is not of this machine.
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
