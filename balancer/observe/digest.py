"""Works out what entries come to: how even a sub-window was, and how an epoch really went.

A courier asks it on its own thread, and tells all journals, so that all show the same. Formulas:
`docs/metrics.md`.
"""

from collections import deque
from dataclasses import replace
from statistics import median

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import SHARE_ONE, Layout, Load, Placement, Shape
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    Balance,
    Closed,
    Ended,
    Entered,
    Entry,
    EpochRecord,
    Settled,
    Stalled,
    Stepped,
    Summed,
    now,
)

USUAL = 65
"""Steps outside epochs whose median is the usual length of a step."""
FEWEST = 5
"""Of them, before anything is called a stall."""


class StallMeter:
    """By how much steps within epochs are longer than those outside, lately."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._quiet = True
        self._known: float | None = None

    def entered(self, entry: Entered) -> None:
        """Steps from now on are of an epoch, or are not."""
        self._quiet = entry.epoch is None and entry.state == "observing"
        if entry.epoch is None:
            return
        if self._known is None:
            self._known = 0.0 if len(self._usual) >= FEWEST else None

    def stepped(self, step: Stepped) -> float:
        """Seconds of stall in this step."""
        seconds = step.end - step.begin
        if self._quiet:
            self._usual.append(seconds)
            return 0.0
        if len(self._usual) < FEWEST:
            return 0.0
        stall = max(0.0, seconds - median(self._usual))
        self._known = (self._known or 0.0) + stall
        return stall

    def take(self) -> float | None:
        """Stall since it was last taken; None where nothing is known of usual steps."""
        known, self._known = self._known, None
        return known


class Digest:
    """Reads entries in order, and says what they come to.

    An epoch's record is settled by the first sub-window that began when the epoch was over; without
    an actual imbalance, if before that another epoch has moved copies, or the engine was closed. An
    aborted epoch's is settled at once, since nothing was promised of it.
    """

    def __init__(self) -> None:
        self._stalls = StallMeter()
        self._waiting: list[EpochRecord] = []

    def read(self, entry: Entry) -> tuple[Entry, ...]:
        """What is known now that `entry` is, and was not before."""
        match entry:
            case Entered():
                self._stalls.entered(entry)
            case Stepped():
                return self._stepped(entry)
            case Summed():
                return self._summed(entry)
            case Ended():
                return self._ended(entry)
            case Closed():
                return self._settle(self._waiting, None)
        return ()

    def _stepped(self, entry: Stepped) -> tuple[Entry, ...]:
        stall = self._stalls.stepped(entry)
        return (Stalled(entry.step, stall),) if stall else ()

    def _summed(self, entry: Summed) -> tuple[Entry, ...]:
        balance = balance_of(entry)
        began = entry.closed - entry.steps
        over = [record for record in self._waiting if record.ended <= began]
        return balance, *self._settle(over, balance.imbalance)

    def _ended(self, entry: Ended) -> tuple[Entry, ...]:
        copies = arrivals(*entry.placements, entry.place, entry.shape)
        record = replace(entry.record, here=copies * entry.slot_bytes, stall=self._stalls.take())
        left = self._settle(self._waiting, None) if record.copies else ()
        if record.outcome not in COMPLETED:
            return *left, Settled(record)
        self._waiting.append(record)
        return left

    def _settle(self, records: list[EpochRecord], actual: float | None) -> tuple[Entry, ...]:
        self._waiting = [record for record in self._waiting if record not in records]
        return tuple(Settled(replace(record, actual=actual)) for record in records)


def rank_loads(load: Load, layout: Layout, shape: Shape) -> npt.NDArray[np.float64]:
    """(layers, ranks): rows that each rank has of `load`, by the shares of `layout`."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    parts = (rows * layout.shares).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return np.asarray(parts / SHARE_ONE, dtype=np.float64)


def balance_of(entry: Summed) -> Balance:
    """How even the sub-window was; nan where no layer had rows."""
    shares = entry.shares(entry.load, entry.layout, entry.shape)
    loads = rank_loads(entry.load, replace(entry.layout, shares=shares), entry.shape)
    busy = loads[loads.sum(axis=1) > 0]
    mean, most = busy.mean(axis=1), busy.max(axis=1)
    average, largest = float(mean.sum()), float(most.sum())
    return Balance(
        step=entry.closed,
        at=now(),
        imbalance=float((most / mean - 1).mean()) if busy.size else float("nan"),
        balancedness=average / largest if busy.size else float("nan"),
        average=average / entry.steps,
        largest=largest / entry.steps,
    )


def arrivals(before: Placement, after: Placement, place: int, shape: Shape) -> int:
    """Copies that the rank at `place` holds in `after` and did not hold in `before`.

    Over all ranks they add up to what an epoch says was copied.
    """
    mine = slice(place * shape.slots_per_rank, (place + 1) * shape.slots_per_rank)
    counts = np.zeros((2, shape.layers, shape.experts), dtype=np.int64)
    rows = np.arange(shape.layers)[:, None]
    for count, placement in zip(counts, (before, after), strict=True):
        np.add.at(count, (rows, placement[:, mine]), 1)
    return int(np.maximum(counts[1] - counts[0], 0).sum())
