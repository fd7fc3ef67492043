"""Log lines: one an epoch, and how even the load is, now and then. In logfmt: `key=value`."""

import json
import logging
import math

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    BalanceMeasured,
    Event,
    EventSink,
    RebalanceMeasured,
    RebalanceRecord,
)

REBALANCE_LOG = logging.getLogger("equipoise.epochs")
"""INFO for an epoch that was committed or changed nothing, WARNING for an aborted one."""
BALANCEDNESS_LOG = logging.getLogger("equipoise.balancedness")
"""INFO."""


class RebalanceLogSink:
    """One line an epoch, when all is known of it.

    Args:
        label: whose epochs they are.
    """

    def __init__(self, label: str) -> None:
        self._engine = label

    def emit(self, entry: Event) -> None:
        """See `StatLogger`."""
        if isinstance(entry, RebalanceMeasured):
            level = logging.INFO if entry.record.outcome in COMPLETED else logging.WARNING
            fields = {"engine": self._engine, **rebalance_fields(entry.record)}
            REBALANCE_LOG.log(level, "%s", logfmt(fields), extra={"equipoise": fields})

    def close(self) -> None:
        """See `StatLogger`."""


class BalancednessLogSink:
    """A line every `interval` steps, or with the first sum behind them.

    The word, its meaning and the interval are vLLM's; sums are those that the engine takes anyway,
    so there is no further collective.

    Args:
        label: whose load it is.
        interval: steps.
    """

    def __init__(self, label: str, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"log_balancedness_interval must be positive, got {interval}")
        self._engine = label
        self._interval = interval
        self._next_step = 0

    def emit(self, entry: Event) -> None:
        """See `StatLogger`."""
        if isinstance(entry, BalanceMeasured) and entry.step >= self._next_step:
            self._next_step = (entry.step // self._interval + 1) * self._interval
            fields = {
                "engine": self._engine,
                "step": entry.step,
                "avg_tokens": entry.mean_rows,
                "max_tokens": entry.max_rows,
                "balancedness": entry.balancedness,
                "imbalance": entry.imbalance,
            }
            BALANCEDNESS_LOG.info("%s", logfmt(fields), extra={"equipoise": fields})

    def close(self) -> None:
        """See `StatLogger`."""


def log_sinks(config: BalancerConfig, rank: int) -> tuple[EventSink, ...]:
    """The lines that a configuration asks for, of the rank that writes them: the first.

    All ranks know the same, and seventy copies of a line help nobody.
    """
    if rank:
        return ()
    epochs = RebalanceLogSink(config.name)
    if not config.log_balancedness:
        return (epochs,)
    return epochs, BalancednessLogSink(config.name, config.log_balancedness_interval)


def rebalance_fields(record: RebalanceRecord) -> dict[str, object]:
    """What a line, or a point of a chart, says of an epoch; None is left out."""
    aborted = record.outcome not in COMPLETED
    fields: dict[str, object | None] = {
        "epoch": record.number,
        "outcome": "aborted" if aborted else record.outcome,
        "reason": record.outcome if aborted else None,
        "opened": record.opened_at,
        "ended": record.ended_at,
        "layers": record.layers,
        "layers_short_of_staging": record.short_of_staging or None,
        "lots": record.chunks,
        "copies": record.copies,
        "bytes": record.bytes,
        **{f"{phase}_s": seconds for phase, seconds in record.phase_seconds.items()},
        "stall_s": record.stall_seconds,
        "imbalance_before": record.imbalance_before,
        "imbalance_predicted": record.imbalance_predicted,
        "imbalance_actual": record.imbalance_actual,
    }
    return {key: value for key, value in fields.items() if value is not None}


def logfmt(fields: dict[str, object]) -> str:
    """`key=value`, blanks between; a value with a blank, a quote or an equals sign is quoted."""
    return " ".join(f"{key}={_format_value(value)}" for key, value in fields.items())


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
