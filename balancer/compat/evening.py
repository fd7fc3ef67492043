"""From what is installed to level ranks with few moves, where every expert is split evenly.

A layer at a time, and only where its fullest rank is above the target:

- As long as a copy takes more than half of what a rank should take, which no packing can hide, its
  expert gets a slot of one whose copies, one fewer, take less than half of that.
- Then, for the fullest rank, one of two changes at a time. A slot elsewhere goes over to one of its
  experts, from an expert that will not be the hotter of the two by it: one move, which relieves all
  ranks that hold the expert. Or two slots trade experts, one of them on this rank: two moves. It is
  the one that lowers the sum of squares of what ranks have above the mean most, for each move. It
  ends at the target, or where nothing lowers that sum, with the lowest peak that it came by.

First of all, in any layer, a slot whose expert is on its rank twice goes over to another expert.
All integers, the first of equals, so every rank of an engine finds the same.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import Placement

Ints = npt.NDArray[np.int64]
MEAN = 1 << 20
"""What a rank takes on average, in the units in which loads are kept here."""
GRAIN = 6
"""Squares are of loads in units of two to the power of so many, and fit into 64 bits."""
LARGE = MEAN // 2
"""A copy that takes more stands in the way."""
NEVER = int(np.iinfo(np.int64).min)
"""The gain of what is not allowed."""
LOOKED_AT = 128
"""Slots to hand over, those of the coldest copies."""
ANY, COLDER, MUCH_COLDER = 0, 1, 2
"""How often the load per copy of an expert that gives up a slot goes into that of who gets it."""


class _Change(NamedTuple):
    """What is gained, the slot that changes, and the slot or the expert that it changes with."""

    gain: int
    slot: int
    other: int


def evened(load: Ints, placement: Placement, ranks: int, target: float) -> Placement:
    """Like `placement` (layers, slots), the ranks at max/mean - 1 of `target` where that is found.

    `load` is (layers, experts). No rank has two copies of an expert, which needs slots for at most
    every expert on every rank.
    """
    goal = MEAN + round(MEAN * target)
    rows = [_evened(*layer, ranks, goal) for layer in zip(load, placement, strict=True)]
    return np.array(rows, dtype=np.int32)


def _evened(load: Ints, row: npt.NDArray[np.int32], ranks: int, goal: int) -> Ints:
    layer = _Layer(load, row, ranks)
    layer.part_doubles()
    best, least = layer.row.copy(), layer.peak()
    if not load.any() or least <= goal:
        return best
    while layer.split():
        pass
    going = True
    while going:
        if layer.peak() < least:
            best, least = layer.row.copy(), layer.peak()
        going = least > goal and layer.relieve()
    return best


class _Layer:
    """What is where; `held` counts copies by expert and rank."""

    def __init__(self, load: Ints, row: npt.NDArray[np.int32], ranks: int) -> None:
        total = max(sum(load.tolist()), 1)
        self.row = row.astype(np.int64)
        self.ranks = ranks
        self.rank = np.arange(row.size) // (row.size // ranks)
        self.load = np.array([n * MEAN * ranks // total for n in load.tolist()], dtype=np.int64)
        self.copies: Ints = np.bincount(self.row, minlength=load.size)
        self.held = np.zeros((load.size, ranks), dtype=np.int64)
        np.add.at(self.held, (self.row, self.rank), 1)

    def heights(self) -> Ints:
        """(ranks,): what each takes."""
        found: Ints = (self.load // self.copies) @ self.held
        return found

    def peak(self) -> int:
        """What the fullest rank takes."""
        return int(self.heights().max())

    def part_doubles(self) -> None:
        """Let slots whose expert is on their rank twice go over to the expert that gains most."""
        everyone = np.arange(self.load.size)
        for slot in range(self.row.size):
            if self.held[self.row[slot], self.rank[slot]] > 1:
                change = self._handover(everyone, np.array([slot]), ANY)
                self._give(change.slot, change.other)

    def split(self) -> bool:
        """One more slot for the expert whose copies are largest; False where none is large."""
        part = np.where(self.copies < self.ranks, self.load // self.copies, 0)
        hot = int(part.argmax())
        if part[hot] <= LARGE:
            return False
        spare = np.flatnonzero(self.copies[self.row] > 1)
        change = self._handover(np.array([hot]), spare, MUCH_COLDER)
        if change.gain == NEVER:
            return False
        self._give(change.slot, change.other)
        return True

    def relieve(self) -> bool:
        """One change for the fullest rank; False where nothing helps."""
        heights = self.heights()
        rank = int(heights.argmax())
        spare = np.flatnonzero((self.copies[self.row] > 1) & (self.rank != rank))
        hand = self._handover(np.unique(self.row[self.rank == rank]), spare, COLDER)
        trade = self._trade(rank, heights)
        if max(hand.gain, trade.gain) <= 0:
            return False
        if hand.gain > 0 and 2 * hand.gain >= trade.gain:
            self._give(hand.slot, hand.other)
        else:
            ours, theirs = int(self.row[trade.slot]), int(self.row[trade.other])
            self._put(trade.slot, theirs)
            self._put(trade.other, ours)
        return True

    def _handover(self, experts: Ints, slots: Ints, colder: int) -> _Change:
        """The best expert of these, and the slot of these that goes over to it."""
        if slots.size == 0:
            return _Change(NEVER, -1, -1)
        if slots.size > LOOKED_AT:
            order = np.argsort((self.load // self.copies)[self.row[slots]], kind="stable")
            slots = slots[order[:LOOKED_AT]]
        victims, homes, at = self.row[slots], self.rank[slots], np.arange(slots.size)
        now: Ints = self.load // self.copies
        fewer: Ints = self.load // np.maximum(self.copies - 1, 1)
        more: Ints = self.load // (self.copies + 1)
        heights = now @ self.held
        without = heights + (fewer - now)[victims, None] * self.held[victims]
        without[at, homes] -= fewer[victims]
        after: Ints = (
            without[None] - (now - more)[experts, None, None] * self.held[experts][:, None]
        )
        after[:, at, homes] += more[experts, None]
        gain = _excess(heights).sum() - _excess(after).sum(axis=2)
        hotter = fewer[victims][None] * colder > now[experts, None]
        gain[(self.held[experts][:, homes] > 0) | hotter] = NEVER
        best, slot = divmod(int(gain.argmax()), slots.size)
        return _Change(int(gain[best, slot]), int(slots[slot]), int(experts[best]))

    def _trade(self, rank: int, heights: Ints) -> _Change:
        """The best slot of this rank, and of another, to trade experts."""
        ours = np.flatnonzero(self.rank == rank)
        part: Ints = (self.load // self.copies)[self.row]
        lighter: Ints = part[ours][:, None] - part[None]
        before = _excess(heights)
        after = _excess(heights[rank] - lighter) + _excess(heights[self.rank][None] + lighter)
        gain = before[rank] + before[self.rank][None] - after
        twice = self.held[self.row[ours]][:, self.rank] + self.held[self.row, rank][None]
        gain[(twice > 0) | (lighter <= 0)] = 0
        best, other = divmod(int(gain.argmax()), self.row.size)
        return _Change(int(gain[best, other]), int(ours[best]), other)

    def _give(self, slot: int, expert: int) -> None:
        self.copies[self.row[slot]] -= 1
        self.copies[expert] += 1
        self._put(slot, expert)

    def _put(self, slot: int, expert: int) -> None:
        self.held[self.row[slot], self.rank[slot]] -= 1
        self.held[expert, self.rank[slot]] += 1
        self.row[slot] = expert


def _excess(heights: Ints) -> Ints:
    over = np.maximum(heights - MEAN, 0) >> GRAIN
    squared: Ints = over * over
    return squared
