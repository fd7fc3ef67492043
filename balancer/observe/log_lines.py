"""Writes log lines in logfmt (`key=value`): one per rebalance, balancedness at intervals."""

import json
import logging
import math

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    BalanceMeasured,
    BatchBalanceMeasured,
    Event,
    EventSink,
    RebalanceMeasured,
    RebalanceRecord,
)

REBALANCE_LOG = logging.getLogger("equipoise.rebalances")
"""INFO for a rebalance that was committed or changed nothing, WARNING for an aborted one."""
BALANCEDNESS_LOG = logging.getLogger("equipoise.balancedness")
"""INFO only."""


class RebalanceLogSink:
    """Writes one line per rebalance, once its actual imbalance is known.

    Args:
        engine: value of the key `engine`: the name in the configuration.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def emit(self, event: Event) -> None:
        """Implements `EventSink`."""
        if isinstance(event, RebalanceMeasured):
            level = logging.INFO if event.record.outcome in COMPLETED else logging.WARNING
            fields = {"engine": self._engine, **rebalance_fields(event.record)}
            REBALANCE_LOG.log(level, "%s", logfmt(fields), extra={"equipoise": fields})

    def close(self) -> None:
        """Implements `EventSink`."""


class BalancednessLogSink:
    """Writes a line every `interval` steps, with the first load sum after them.

    The imbalances of a batch are those of the last step that was sampled, and left out before.

    Key, meaning and interval are vLLM's. The sums are those that the engine reduces for planning,
    so no further collective is needed.

    Args:
        engine: value of the key `engine`: the name in the configuration.
        interval: steps.
    """

    def __init__(self, engine: str, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"log_balancedness_interval must be positive, got {interval}")
        self._engine = engine
        self._interval = interval
        self._next_step = 0
        self._batch_imbalances: dict[str, float] = {}

    def emit(self, event: Event) -> None:
        """Implements `EventSink`."""
        if isinstance(event, BatchBalanceMeasured):
            self._batch_imbalances = {
                "batch_imbalance": event.imbalance,
                "unlevelled_batch_imbalance": event.unlevelled_imbalance,
            }
        if isinstance(event, BalanceMeasured) and event.step >= self._next_step:
            self._next_step = (event.step // self._interval + 1) * self._interval
            fields = {
                "engine": self._engine,
                "step": event.step,
                "avg_tokens": event.mean_rows,
                "max_tokens": event.max_rows,
                "balancedness": event.balancedness,
                "imbalance": event.imbalance,
                **self._batch_imbalances,
            }
            BALANCEDNESS_LOG.info("%s", logfmt(fields), extra={"equipoise": fields})

    def close(self) -> None:
        """Implements `EventSink`."""


def log_sinks(config: BalancerConfig, rank: int) -> tuple[EventSink, ...]:
    """Returns the sinks of the lines that `config` asks for; none except on the first rank.

    All ranks have the same figures except their own seconds: one line is enough.
    """
    if rank:
        return ()
    rebalances = RebalanceLogSink(config.name)
    if not config.log_balancedness:
        return (rebalances,)
    return rebalances, BalancednessLogSink(config.name, config.log_balancedness_interval)


def rebalance_fields(record: RebalanceRecord) -> dict[str, object]:
    """Returns the fields of a log line or chart point of a rebalance; unknown ones are left out."""
    aborted = record.outcome not in COMPLETED
    fields: dict[str, object | None] = {
        "rebalance": record.number,
        "outcome": "aborted" if aborted else record.outcome,
        "reason": record.outcome if aborted else None,
        "opened_at": record.opened_at,
        "ended_at": record.ended_at,
        "layers": record.layers,
        "layers_short_of_staging": record.short_of_staging or None,
        "chunks": record.chunks,
        "copies": record.copies,
        "bytes_moved": record.bytes_moved,
        **{f"{phase}_seconds": seconds for phase, seconds in record.phase_seconds.items()},
        "stall_seconds": record.stall_seconds,
        "imbalance_before": record.imbalance_before,
        "predicted_imbalance": record.predicted_imbalance,
        "actual_imbalance": record.actual_imbalance,
    }
    return {key: value for key, value in fields.items() if value is not None}


def logfmt(fields: dict[str, object]) -> str:
    """Formats `key=value` pairs with spaces between them.

    A value with a space, a quote, an equals sign or an unprintable character is quoted as in JSON.
    """
    return " ".join(f"{key}={_format_value(value)}" for key, value in fields.items())


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
