"""Derives figures from the engine's events: balance of a sub-window, result of a rebalance.

`AsyncEventSink` calls it on its own thread and gives the derived events to all sinks, so that a log
line, a metric and a chart show the same figure. Formulas: `docs/metrics.md`.
"""

from collections import deque
from dataclasses import replace
from statistics import median

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Load,
    Placement,
    RankRows,
)
from equipoise.balancer.experts.routing.drawn_rows import drawn_rank_rows
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    BalanceMeasured,
    BatchBalanceMeasured,
    BatchSampled,
    EngineClosed,
    Event,
    LoadReduced,
    RebalanceEnded,
    RebalanceMeasured,
    RebalanceRecord,
    StateChanged,
    StepDone,
    StepStalled,
    now,
)

BASELINE_STEPS = 65
"""Steps outside rebalances whose median is the usual length of a step.

Odd, so that the median is a step that was measured; small, so that it follows the traffic."""
MIN_BASELINE_STEPS = 5
"""Steps outside rebalances needed before a longer step counts as a stall."""


class StallMeter:
    """Measures how much longer steps are during a rebalance than outside of one."""

    def __init__(self) -> None:
        self._baseline: deque[float] = deque(maxlen=BASELINE_STEPS)
        self._outside_rebalance = True
        self._stall: float | None = None

    def on_state_change(self, event: StateChanged) -> None:
        """Notes whether the following steps belong to a rebalance."""
        # A step that drains an aborted rebalance has no rebalance and is not idle: it belongs to
        # neither side, since it is longer than usual through no plan that is open.
        self._outside_rebalance = event.rebalance is None and event.state == "idle"
        if event.rebalance is None:
            return
        if self._stall is None:
            self._stall = 0.0 if len(self._baseline) >= MIN_BASELINE_STEPS else None

    def on_step(self, step: StepDone) -> float:
        """Returns the seconds by which `step` stalled: 0 outside rebalances."""
        seconds = step.end - step.begin
        if self._outside_rebalance:
            self._baseline.append(seconds)
            return 0.0
        if len(self._baseline) < MIN_BASELINE_STEPS:
            return 0.0
        stall = max(0.0, seconds - median(self._baseline))
        self._stall = (self._stall or 0.0) + stall
        return stall

    def take(self) -> float | None:
        """Returns the seconds of stall since the last call, and starts anew.

        None where too few steps outside rebalances were seen to tell what is usual.
        """
        stall, self._stall = self._stall, None
        return stall


class EventAggregator:
    """Reads the events of one engine in order and derives further events from them.

    The actual imbalance of a rebalance is that of the first sub-window that began after its end. It
    stays unknown if another rebalance copies slots before that, or if the engine is closed. The
    record of an aborted rebalance is emitted at once: it predicted nothing.
    """

    def __init__(self) -> None:
        self._stall_meter = StallMeter()
        self._unmeasured_records: list[RebalanceRecord] = []

    def process(self, event: Event) -> tuple[Event, ...]:
        """Returns the events that follow from `event`, in order."""
        match event:
            case StateChanged():
                self._stall_meter.on_state_change(event)
            case StepDone():
                return self._step_done(event)
            case LoadReduced():
                return self._load_reduced(event)
            case BatchSampled():
                return (measure_batch_balance(event),)
            case RebalanceEnded():
                return self._rebalance_ended(event)
            case EngineClosed():
                return self._measure(self._unmeasured_records, None)
        return ()

    def _step_done(self, event: StepDone) -> tuple[Event, ...]:
        stall = self._stall_meter.on_step(event)
        return (StepStalled(event.step, stall),) if stall else ()

    def _load_reduced(self, event: LoadReduced) -> tuple[Event, ...]:
        balance = measure_balance(event)
        # A sub-window that began before the end holds rows that the previous layout routed.
        began = event.step - event.steps
        over = [record for record in self._unmeasured_records if record.ended_at <= began]
        return balance, *self._measure(over, balance.imbalance)

    def _rebalance_ended(self, event: RebalanceEnded) -> tuple[Event, ...]:
        copies = slots_received(*event.placements, event.rank_in_group, event.shape)
        record = replace(
            event.record,
            bytes_received=copies * event.slot_bytes,
            stall_seconds=self._stall_meter.take(),
        )
        # Once these copies are in place, no sub-window shows the effect of earlier rebalances.
        measurements = self._measure(self._unmeasured_records, None) if record.copies else ()
        if record.outcome not in COMPLETED:
            return *measurements, RebalanceMeasured(record)
        self._unmeasured_records.append(record)
        return measurements

    def _measure(self, records: list[RebalanceRecord], actual: float | None) -> tuple[Event, ...]:
        self._unmeasured_records = [
            record for record in self._unmeasured_records if record not in records
        ]
        return tuple(
            RebalanceMeasured(replace(record, actual_imbalance=actual)) for record in records
        )


def rank_loads(load: Load, layout: Layout, shape: ExpertShape) -> npt.NDArray[np.float64]:
    """Returns the rows of each rank, float64 (layers, ranks), when `layout` serves `load`."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    parts = (rows * layout.shares).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return np.asarray(parts / SHARE_ONE, dtype=np.float64)


def measure_balance(event: LoadReduced) -> BalanceMeasured:
    """Measures how even the load of a sub-window was; nan where no layer had rows."""
    shares = event.shares(event.load, event.layout, event.shape)
    loads = rank_loads(event.load, replace(event.layout, shares=shares), event.shape)
    busy = loads[loads.sum(axis=1) > 0]
    average, largest = float(busy.mean(axis=1).sum()), float(busy.max(axis=1).sum())
    return BalanceMeasured(
        step=event.step,
        at=now(),
        imbalance=mean_imbalance(loads),
        balancedness=average / largest if busy.size else float("nan"),
        mean_rows=average / event.steps,
        max_rows=largest / event.steps,
    )


def mean_imbalance(loads: RankRows | npt.NDArray[np.float64]) -> float:
    """Returns max/mean - 1 over ranks of (layers, ranks), mean over layers with rows; else nan."""
    busy = loads[loads.sum(axis=1) > 0]
    return float((busy.max(axis=1) / busy.mean(axis=1) - 1).mean()) if busy.size else float("nan")


def measure_batch_balance(event: BatchSampled) -> BatchBalanceMeasured:
    """Measures how even one step was, and how even it were without levelling; nan without rows."""
    context = event.counts, event.layout, event.shape, event.step
    return BatchBalanceMeasured(
        step=event.step,
        at=now(),
        imbalance=mean_imbalance(event.rank_rows(*context)),
        unlevelled_imbalance=mean_imbalance(drawn_rank_rows(*context)),
    )


def slots_received(before: Placement, after: Placement, rank: int, shape: ExpertShape) -> int:
    """Counts the slots that a rank had to receive to get from `before` to `after`.

    Summed over all ranks it equals the `copies` of the rebalance's record.
    """
    own = slice(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
    counts = np.zeros((2, shape.layers, shape.experts), dtype=np.int64)
    rows = np.arange(shape.layers)[:, None]
    for count, placement in zip(counts, (before, after), strict=True):
        np.add.at(count, (rows, placement[:, own]), 1)
    return int(np.maximum(counts[1] - counts[0], 0).sum())
