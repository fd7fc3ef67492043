"""Sequences of numbers that depend on an element's index in its batch alone, kept on the device.

A pass takes a slice of one, which launches nothing. They grow to the largest batch; what was
outgrown is kept, since streams and graphs may still read it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from equipoise.backends.ascend.bits import mix32, shift
from equipoise.backends.ascend.replica_tables import copy_to_device, is_captured
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.routing import MASK32, POSITION_BITS, POSITIONS, WINDOWS
from equipoise.hal.routing_rules import KNUTH32
from equipoise.hal.stream import Stream

SHORT_RUNS = 22
"""Length of a run up to which turns fit in int32."""
TURNS32 = 232792560
"""The least common multiple of 1 to 22: a turn modulo it is the same entry of each shorter run."""
LEAST = 4096
"""Elements that a sequence begins with."""

Make = Callable[[Tensor], Tensor]
"""From places, int64 [n], to what stands there; on any device, without a scalar from the host."""


class BatchIndices:
    """Draws, rows and turns by index, of one accelerator."""

    def __init__(self) -> None:
        self._latest: dict[object, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def draws(self, experts: int, begin: int, count: int, stream: Stream) -> Tensor:
        """`count` draws from place `begin` on, int32: the row for padding plus the position."""
        make = partial(_draws, (experts + 1) * POSITIONS)
        return self._slice(("draws", experts), make, begin, count, stream, WINDOWS)

    def rows(self, top_k: int, count: int, stream: Stream) -> Tensor:
        """The row of each element, int32."""
        return self._slice(("rows", top_k), partial(_rows, top_k), 0, count, stream)

    def turns(self, top_k: int, longest: int, count: int, stream: Stream) -> Tensor:
        """vLLM's turn of each element, for runs of up to `longest` entries; int32 or int64."""
        short = longest <= SHORT_RUNS
        make = partial(_turns, top_k, short)
        return self._slice(("turns", top_k, short), make, 0, count, stream)

    def _slice(
        self, key: object, make: Make, begin: int, count: int, stream: Stream, windows: int = 0
    ) -> Tensor:
        end, own = begin + count, own_stream(stream)
        held = self._latest.get(key)
        if held is None or held.numel() < end:
            if is_captured(stream):
                # Nothing can be copied from the host now: the graph computes its own.
                return make(torch.arange(begin, end, device=own.device.torch))
            held = self._grown(key, make, end, stream, windows)
        own.keep(held)
        return held[begin:end]

    def _grown(self, key: object, make: Make, end: int, stream: Stream, windows: int) -> Tensor:
        """At least `end` elements. The gate is held: no two threads make the same."""
        with own_stream(stream).gate:
            held = self._latest.get(key)
            if held is not None and held.numel() >= end:
                return held
            if held is not None:
                self._outgrown.append(held)
            size = windows + LEAST
            while size < end:
                size = windows + 2 * (size - windows)
            self._latest[key] = made = copy_to_device(make(torch.arange(size)), stream)
            return made


def _draws(base: int, places: Tensor) -> Tensor:
    return (shift(mix32(places, 0, 0, 0), 32 - POSITION_BITS) + base).int()


def _rows(top_k: int, places: Tensor) -> Tensor:
    return torch.div(places, top_k, rounding_mode="floor").int()


def _turns(top_k: int, short: bool, places: Tensor) -> Tensor:
    turns = (torch.div(places, top_k, rounding_mode="floor") * KNUTH32) & MASK32
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    return torch.fmod(turns, TURNS32).int() if short else turns
