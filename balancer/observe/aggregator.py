"""Works out what entries come to: how even a sub-window was, and how an epoch really went.

A courier asks it on its own thread, and tells all journals, so that all show the same. Formulas:
`docs/metrics.md`.
"""

from collections import deque
from dataclasses import replace
from statistics import median

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, Load, Placement
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    BalanceMeasured,
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
"""Steps outside epochs whose median is the usual length of a step."""
MIN_BASELINE_STEPS = 5
"""Of them, before anything is called a stall."""


class StallMeter:
    """By how much steps within epochs are longer than those outside, lately."""

    def __init__(self) -> None:
        self._baseline: deque[float] = deque(maxlen=BASELINE_STEPS)
        self._outside_rebalance = True
        self._stall: float | None = None

    def on_state_change(self, entry: StateChanged) -> None:
        """Steps from now on are of an epoch, or are not."""
        self._outside_rebalance = entry.rebalance is None and entry.state == "idle"
        if entry.rebalance is None:
            return
        if self._stall is None:
            self._stall = 0.0 if len(self._baseline) >= MIN_BASELINE_STEPS else None

    def on_step(self, step: StepDone) -> float:
        """Seconds of stall in this step."""
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
        """Stall since it was last taken; None where nothing is known of usual steps."""
        known, self._stall = self._stall, None
        return known


class EventAggregator:
    """Reads entries in order, and says what they come to.

    An epoch's record is settled by the first sub-window that began when the epoch was over; without
    an actual imbalance, if before that another epoch has moved copies, or the engine was closed. An
    aborted epoch's is settled at once, since nothing was promised of it.
    """

    def __init__(self) -> None:
        self._stall_meter = StallMeter()
        self._unmeasured: list[RebalanceRecord] = []

    def process(self, entry: Event) -> tuple[Event, ...]:
        """What is known now that `entry` is, and was not before."""
        match entry:
            case StateChanged():
                self._stall_meter.on_state_change(entry)
            case StepDone():
                return self._step_done(entry)
            case LoadReduced():
                return self._load_reduced(entry)
            case RebalanceEnded():
                return self._rebalance_ended(entry)
            case EngineClosed():
                return self._measure(self._unmeasured, None)
        return ()

    def _step_done(self, entry: StepDone) -> tuple[Event, ...]:
        stall = self._stall_meter.on_step(entry)
        return (StepStalled(entry.step, stall),) if stall else ()

    def _load_reduced(self, entry: LoadReduced) -> tuple[Event, ...]:
        balance = measure_balance(entry)
        began = entry.step - entry.steps
        over = [record for record in self._unmeasured if record.ended_at <= began]
        return balance, *self._measure(over, balance.imbalance)

    def _rebalance_ended(self, entry: RebalanceEnded) -> tuple[Event, ...]:
        copies = slots_received(*entry.placements, entry.rank_in_group, entry.shape)
        record = replace(
            entry.record,
            bytes_received=copies * entry.slot_bytes,
            stall_seconds=self._stall_meter.take(),
        )
        left = self._measure(self._unmeasured, None) if record.copies else ()
        if record.outcome not in COMPLETED:
            return *left, RebalanceMeasured(record)
        self._unmeasured.append(record)
        return left

    def _measure(self, records: list[RebalanceRecord], actual: float | None) -> tuple[Event, ...]:
        self._unmeasured = [record for record in self._unmeasured if record not in records]
        return tuple(
            RebalanceMeasured(replace(record, imbalance_actual=actual)) for record in records
        )


def rank_loads(load: Load, layout: Layout, shape: ExpertShape) -> npt.NDArray[np.float64]:
    """(layers, ranks): rows that each rank has of `load`, by the shares of `layout`."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    parts = (rows * layout.shares).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return np.asarray(parts / SHARE_ONE, dtype=np.float64)


def measure_balance(entry: LoadReduced) -> BalanceMeasured:
    """How even the sub-window was; nan where no layer had rows."""
    shares = entry.shares(entry.load, entry.layout, entry.shape)
    loads = rank_loads(entry.load, replace(entry.layout, shares=shares), entry.shape)
    busy = loads[loads.sum(axis=1) > 0]
    mean, most = busy.mean(axis=1), busy.max(axis=1)
    average, largest = float(mean.sum()), float(most.sum())
    return BalanceMeasured(
        step=entry.step,
        at=now(),
        imbalance=float((most / mean - 1).mean()) if busy.size else float("nan"),
        balancedness=average / largest if busy.size else float("nan"),
        mean_rows=average / entry.steps,
        max_rows=largest / entry.steps,
    )


def slots_received(before: Placement, after: Placement, place: int, shape: ExpertShape) -> int:
    """Copies that the rank at `place` holds in `after` and did not hold in `before`.

    Over all ranks they add up to what an epoch says was copied.
    """
    mine = slice(place * shape.slots_per_rank, (place + 1) * shape.slots_per_rank)
    counts = np.zeros((2, shape.layers, shape.experts), dtype=np.int64)
    rows = np.arange(shape.layers)[:, None]
    for count, placement in zip(counts, (before, after), strict=True):
        np.add.at(count, (rows, placement[:, mine]), 1)
    return int(np.maximum(counts[1] - counts[0], 0).sum())
