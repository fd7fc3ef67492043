"""Event sinks of a rank, as the settings ask: log lines, metrics, spans, Weights & Biases."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.runtime.events import EventSink
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.log_lines import BALANCEDNESS_LOG, REBALANCE_LOG, log_sinks
from equipoise.balancer.observe.metrics import MetricsServer, PrometheusSink, serve_metrics
from equipoise.balancer.observe.metrics import require_prometheus as require_metrics
from equipoise.balancer.observe.trace_buffer import TraceBuffer
from equipoise.balancer.observe.wandb_sink import WandbSink
from equipoise.demo.live_feed import LiveFeed
from equipoise.demo.settings import RunSettings

MetricsForEngine = Callable[[str], PrometheusSink]
"""Of the engine with a label."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@dataclass(frozen=True)
class ObservedPass:
    """One pass under observation.

    Attributes:
        events: sinks of what happens.
        spans: what is kept of it, whole once the pass is over.
    """

    events: EventSink
    spans: TraceBuffer


class Observers:
    """Lives as long as the rank; a pass after another is watched.

    Args:
        settings: what is asked for.
        rank: this rank.
        live: tells a live display; None where this rank has none.

    Raises:
        MetricsMissing, PortTaken: metrics are asked for and cannot be served.
    """

    def __init__(self, settings: RunSettings, rank: int, live: LiveFeed | None = None) -> None:
        self._settings = settings
        self._rank = rank
        self.live = live
        self._metrics, self._exporter = _serve_metrics(settings, rank)
        _write_lines(settings)

    @contextmanager
    def observe(self, config: BalancerConfig) -> Iterator[ObservedPass]:
        """The sink of one pass's events; closed when the pass is over, however it ends."""
        spans = TraceBuffer(self._rank)
        shown = () if self.live is None else (self.live,)
        sinks = [spans, *shown, *log_sinks(config, self._rank), *self._wandb(config)]
        sink = AsyncEventSink([*sinks, *(of(config.name) for of in self._metrics)])
        try:
            yield ObservedPass(sink, spans)
        finally:
            sink.close()

    def close(self) -> None:
        """Serve no more metrics."""
        if self._exporter is not None:
            self._exporter.close()

    def _wandb(self, config: BalancerConfig) -> tuple[EventSink, ...]:
        """A run a pass, of the first rank."""
        if not self._settings.wandb or self._rank:
            return ()
        facts = {key: str(value) for key, value in asdict(self._settings).items()}
        return (WandbSink(self._settings.wandb, {**facts, "variant": config.name}),)


def _serve_metrics(
    settings: RunSettings, rank: int
) -> tuple[tuple[MetricsForEngine, ...], MetricsServer | None]:
    """A registry of this rank's own, served on the port of its number; metrics by engine."""
    if settings.metrics_port is None:
        return (), None
    require_metrics()
    from prometheus_client import CollectorRegistry, disable_created_metrics

    # A second series for each counter, which is not wanted.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    exporter = serve_metrics(registry, settings.metrics_port + rank, settings.metrics_address)
    return (partial(PrometheusSink, registry),), exporter


def _write_lines(settings: RunSettings) -> None:
    """Lines that are asked for go to standard error; aborts do so anyway, as any warning."""
    loggers = [REBALANCE_LOG] if settings.log_rebalances else []
    if settings.log_balancedness:
        loggers.append(BALANCEDNESS_LOG)
    for logger in loggers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
