"""Copies of slots, beside one plain copy of one block of as many bytes in the same run.

From page-locked pages of the host pool into slots (`SlotStore.write`), from staging into slots
(`SlotStore.commit`), and from slots into slots (`SlotStore.write` with slots as sources). A slot is
what an expert is: two matrices and the scales of their blocks, each a part of a tensor that holds
all slots. Several slots a call; the stream is held back until all calls are queued, so that what
is told is the device's time. Next to it stands the host's, for a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.accelerator import Page
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role
from gpu.stopwatch import (
    DEADLINE,
    GIGA,
    LEAST_HOLD,
    MICRO,
    SLACK,
    Place,
    cost,
    in_turns,
    paired,
    scaled,
)

MEBI = 1 << 20
BLOCK = 128 * 128
"""Elements that share a scale."""
SCALE = 4
"""Bytes of a scale."""
EVEN = 4
"""Blocks of a matrix are a multiple of it, so that every part and slot begins at 16 bytes, as those
of real experts do."""
MAX_CALLS = 12
"""Queued at once: a device takes about a thousand launches before the host has to wait."""
HOST, COMMIT, SLOTS = "host to device", "staging to slot", "slot to slot"
PLAIN = "plain copy"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large and how often.

    Attributes:
        slot: bytes of a slot, by size.
        batch: slots a call.
        moved: bytes that a timing copies, at least once the batch.
        rounds: in which a way and its ceiling are timed in turn.
    """

    slot: tuple[int, ...]
    batch: int
    moved_bytes: int
    rounds: int


FULL = Sizes(tuple(MEBI << power for power in range(7)), 8, 1 << 30, 7)
TRIAL = Sizes((1 << 18,), 2, 1 << 20, 2)


def measure(place: Place, sizes: Sizes) -> Figures:
    """Every size and way."""
    rows = [row for size in sizes.slot for row in Bench(place, sizes, size).rows()]
    return {"batch": sizes.batch, "rounds": sizes.rounds, "rows": rows}


def parts(size: int) -> dict[str, int]:
    """Bytes of each segment of a slot of so many bytes, or a few less."""
    blocks = size // (3 * (BLOCK + SCALE) * EVEN) * EVEN
    return {
        "w13": 2 * blocks * BLOCK,
        "w13_scale": 2 * blocks * SCALE,
        "w2": blocks * BLOCK,
        "w2_scale": blocks * SCALE,
    }


class Bench:
    """Slots of one size, with their staging and pages of host memory.

    Args:
        place: where.
        sizes: how many.
        size: bytes of a slot.
    """

    def __init__(self, place: Place, sizes: Sizes, size: int) -> None:
        self._place, self._sizes, self._size = place, sizes, size
        self._clock = place.clock(Role.COPY)
        self._parts = parts(size)
        count = sizes.batch
        tensors = {name: self._random(2 * count, part) for name, part in self._parts.items()}
        self._slots = [
            tuple(Segment(name, tensor[slot]) for name, tensor in tensors.items())
            for slot in range(2 * count)
        ]
        self._store = place.accelerator.slot_store(SlotLayout(tuple(self._slots), count))
        self._first, self._second = range(count), range(count, 2 * count)
        place.settle()

    @property
    def _bytes(self) -> int:
        """Of a call."""
        return self._sizes.batch * self._store.layout.slot_bytes

    def rows(self) -> list[Figures]:
        """Each way, beside its ceiling."""
        rows = [self._from_host(), self._from_staging(), self._between()]
        self._place.settle()
        return rows

    def _from_host(self) -> Figures:
        pool = self._place.accelerator.host_pool(self._store.layout.slot_bytes, self._sizes.batch)
        pages = [pool.take(DEADLINE) for _ in self._first]
        sources = [self._filled(page) for page in pages]

        def ours() -> None:
            self._store.write(self._first, sources, self._clock.stream)

        block = self._place.accelerator.pinned(self._bytes)
        figures = self._compare(HOST, ours, block.fill_(1))
        self._check(self._first, sources)
        for page in pages:
            page.give_back(None)
        return figures

    def _from_staging(self) -> Figures:
        blob = self._block()
        self._store.unpack(blob, self._first, self._clock.stream)
        pairs = [(buffer, buffer) for buffer in self._first]
        figures = self._compare(
            COMMIT, lambda: self._store.commit(pairs, self._clock.stream), self._block()
        )
        pieces = blob.view(self._sizes.batch, -1)
        sizes = list(self._parts.values())
        self._check(self._first, [row.split(sizes) for row in pieces])
        return figures

    def _between(self) -> Figures:
        sources = [[segment.data for segment in self._slots[slot]] for slot in self._first]
        figures = self._compare(
            SLOTS,
            lambda: self._store.write(self._second, sources, self._clock.stream),
            self._block(),
        )
        self._check(self._second, sources)
        return figures

    def _compare(self, way: str, ours: Callable[[], object], source: Tensor) -> Figures:
        """A way beside a plain copy of one block on the same stream."""
        block = self._block()
        stream = self._clock.stream

        def plain() -> None:
            stream.launch(lambda: block.copy_(source, non_blocking=True))

        times = max(1, min(MAX_CALLS, self._sizes.moved_bytes // self._bytes))
        ways = {way: ours, PLAIN: plain}
        timers = {name: self._timer(call, times) for name, call in ways.items()}
        times_of_way = in_turns(timers, self._sizes.rounds)
        rates = {
            name: scaled((self._bytes / seconds for seconds in each), 1 / GIGA)
            for name, each in times_of_way.items()
        }
        return {
            "way": way,
            "asked_bytes": self._size,
            "slot_bytes": self._store.layout.slot_bytes,
            "gigabytes_per_second": rates[way],
            "ceiling": rates[PLAIN],
            "part": paired(times_of_way[PLAIN], times_of_way[way]),
            "host_microseconds": round(cost(self._clock, ours) * MICRO, 1),
        }

    def _timer(self, call: Callable[[], object], times: int) -> Callable[[], float]:
        """Seconds of one of so many calls, all queued before the first runs."""
        call()
        hold = max(LEAST_HOLD, SLACK * times * cost(self._clock, call))

        def row() -> None:
            for _ in range(times):
                call()

        return lambda: self._clock.span(row, hold) / times

    def _random(self, rows: int, size: int) -> Tensor:
        """uint8 [rows, size] on the device: no two rows alike."""
        device = self._place.accelerator.device
        generator = torch.Generator(device).manual_seed(size)
        return torch.randint(
            0, 256, (rows, size), dtype=torch.uint8, device=device, generator=generator
        )

    def _block(self) -> Tensor:
        block = self._random(1, self._bytes)[0]
        self._place.settle()
        return block

    def _filled(self, page: Page) -> list[Tensor]:
        """The segments of a slot on a page, with something on it."""
        page.data.random_(0, 256)
        return list(page.data.split(list(self._parts.values())))

    def _check(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> None:
        """Raises `RuntimeError` where slots do not hold what was copied."""
        self._place.settle()
        for slot, source in zip(slots, sources, strict=True):
            for segment, piece in zip(self._slots[slot], source, strict=True):
                if not torch.equal(segment.data, piece.to(segment.data.device)):
                    raise RuntimeError(f"slot {slot}: {segment.name} is not what was copied")
