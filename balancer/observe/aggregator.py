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
        self._usual: deque[float] = deque(maxlen=BASELINE_STEPS)
        self._quiet = True
        self._known: float | None = None

    def entered(self, entry: StateChanged) -> None:
        """Steps from now on are of an epoch, or are not."""
        self._quiet = entry.epoch is None and entry.state == "idle"
        if entry.epoch is None:
            return
        if self._known is None:
            self._known = 0.0 if len(self._usual) >= MIN_BASELINE_STEPS else None

    def stepped(self, step: StepDone) -> float:
        """Seconds of stall in this step."""
        seconds = step.end - step.begin
        if self._quiet:
            self._usual.append(seconds)
            return 0.0
        if len(self._usual) < MIN_BASELINE_STEPS:
            return 0.0
        stall = max(0.0, seconds - median(self._usual))
        self._known = (self._known or 0.0) + stall
        return stall

    def take(self) -> float | None:
        """Stall since it was last taken; None where nothing is known of usual steps."""
        known, self._known = self._known, None
        return known


class EventAggregator:
    """Reads entries in order, and says what they come to.

    An epoch's record is settled by the first sub-window that began when the epoch was over; without
    an actual imbalance, if before that another epoch has moved copies, or the engine was closed. An
    aborted epoch's is settled at once, since nothing was promised of it.
    """

    def __init__(self) -> None:
        self._stalls = StallMeter()
        self._waiting: list[RebalanceRecord] = []

    def read(self, entry: Event) -> tuple[Event, ...]:
        """What is known now that `entry` is, and was not before."""
        match entry:
            case StateChanged():
                self._stalls.entered(entry)
            case StepDone():
                return self._stepped(entry)
            case LoadReduced():
                return self._summed(entry)
            case RebalanceEnded():
                return self._ended(entry)
            case EngineClosed():
                return self._settle(self._waiting, None)
        return ()

    def _stepped(self, entry: StepDone) -> tuple[Event, ...]:
        stall = self._stalls.stepped(entry)
        return (StepStalled(entry.step, stall),) if stall else ()

    def _summed(self, entry: LoadReduced) -> tuple[Event, ...]:
        balance = measure_balance(entry)
        began = entry.closed - entry.steps
        over = [record for record in self._waiting if record.ended <= began]
        return balance, *self._settle(over, balance.imbalance)

    def _ended(self, entry: RebalanceEnded) -> tuple[Event, ...]:
        copies = slots_received(*entry.placements, entry.place, entry.shape)
        record = replace(entry.record, here=copies * entry.slot_bytes, stall=self._stalls.take())
        left = self._settle(self._waiting, None) if record.copies else ()
        if record.outcome not in COMPLETED:
            return *left, RebalanceMeasured(record)
        self._waiting.append(record)
        return left

    def _settle(self, records: list[RebalanceRecord], actual: float | None) -> tuple[Event, ...]:
        self._waiting = [record for record in self._waiting if record not in records]
        return tuple(RebalanceMeasured(replace(record, actual=actual)) for record in records)


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
        step=entry.closed,
        at=now(),
        imbalance=float((most / mean - 1).mean()) if busy.size else float("nan"),
        balancedness=average / largest if busy.size else float("nan"),
        average=average / entry.steps,
        largest=largest / entry.steps,
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
