"""Cases to explore: each is read off bytes that hypothesis draws.

Not composed of strategies: hypothesis would make most cases by repeating parts of others, and few
of them differ in what matters here. Bytes it draws evenly, and shrinks well: zeros are simplest.
"""

from collections.abc import Sequence
from typing import TypeVar

from exploration.engine.case import Cadence, Case, Fault, FaultKind, Lag, Path
from exploration.engine.world_profiles import WORLDS
from hypothesis import strategies as st

from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.placement import ExpertShape

T = TypeVar("T")
LANES = (
    "transfer",
    "transfer",
    "transfer",
    "host",
    "vote",
    "aux",
    "aux",
    "copy",
    "compute",
    "outbox",
)
"""The lanes on which most depends are there more than once."""
SELDOM = ("planner", "shares")
ON_THE_WAY = (
    FaultKind.OTHER_TABLES,
    FaultKind.BLOB_FLIPPED,
    FaultKind.STAGING_FLIPPED,
    FaultKind.MESSAGE_LOST,
    FaultKind.EXCHANGE_EXPIRES,
)
"""Faults of weights that come from peers."""
IN_PLACE = (FaultKind.WRITE_FLIPPED, FaultKind.WRITE_FAILS)
"""Faults of weights that are written in place."""
OFTEN = (
    FaultKind.HASTY_VOTE,
    FaultKind.HASTY_VOTE,
    FaultKind.STORE_CUT,
    FaultKind.OTHER_PLAN,
    FaultKind.STAGING_FLIPPED,
)
"""Faults that matter at few moments only are tried at more."""
BLOCKING = ("serial-off-stream",)
"""Worlds where a boundary blocks for its own device, which others may hold up."""
STEPS = (5, 6, 7, 8, 9, 10)
LENGTHS = (0, 1, 3, 8, 16, 32, 64, 64)
"""Bytes of a schedule, which is played over and over."""
LAGS = 4
FAULTS = 2
SHAPES = [
    ExpertShape(layers, experts, ranks * size, ranks)
    for ranks in (2, 3)
    for layers in (2, 3)
    for experts in (4, 5, 6)
    for size in (2, 3)
    if ranks * size >= experts
]
SIZE = 128
"""Bytes that a case is read off."""


class Reader:
    """Choices, read off bytes one after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._read = 0

    def below(self, limit: int) -> int:
        """In [0, limit)."""
        return self.byte() % limit

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def byte(self) -> int:
        """In [0, 256)."""
        self._read += 1
        return self._data[self._read - 1]

    def rest(self, length: int) -> bytes:
        """So many of the bytes that are left."""
        return self._data[self._read : self._read + length]


def read(data: bytes, faults: int) -> Case:
    """The case that `SIZE` bytes stand for, with at most so many faults, but one at least."""
    reader = Reader(data)
    shape = reader.pick(SHAPES)
    path = reader.pick((*[Path.STAGED] * 4, Path.BY_STREAM, Path.BY_HOST))
    size, ranks = shape.slots_per_rank, shape.ranks
    world, ahead = reader.pick(_worlds(path)), reader.below(3)
    return Case(
        shape=shape,
        path=path,
        staging=reader.pick((size, size + 1, shape.layers * size, size - 1, size - 1)),
        slots_per_message=1 + reader.below(4),
        world=world,
        shares=reader.pick((ShareMode.STATIC, ShareMode.LAGGED)),
        cadence=reader.pick((Cadence(1, 1, 1), Cadence(1, 1, 2), Cadence(2, 2, 2))),
        max_stalled_steps=reader.pick((64, 2, 4)),
        readers=reader.pick(((), (0,), tuple(range(ranks)))),
        ahead=ahead if world not in BLOCKING else 0,
        steps=reader.pick(STEPS),
        script=reader.byte() * 256 + reader.byte(),
        hot=tuple(reader.below(shape.experts) for _ in range(4)),
        lags=_lags(reader, ranks),
        faults=_faults(reader, ranks, _kinds(path), faults),
        schedule=reader.rest(reader.pick(LENGTHS)),
    )


def _lags(reader: Reader, ranks: int) -> tuple[Lag, ...]:
    count, lags = reader.below(LAGS + 1), []
    for _ in range(LAGS):
        kind, rank = reader.pick((*LANES, *SELDOM)), reader.below(ranks)
        first = 1 + reader.below(STEPS[-1])
        lags.append(Lag(kind, rank, first, first + reader.below(9)))
    return tuple(lags[:count])


def _faults(reader: Reader, ranks: int, kinds: Sequence[FaultKind], most: int) -> tuple[Fault, ...]:
    count, faults = 1 + reader.below(FAULTS), []
    for _ in range(FAULTS):
        kind, rank = reader.pick(kinds), reader.below(ranks)
        faults.append(Fault(kind, rank, 1 + reader.below(STEPS[-1]), reader.below(40)))
    return tuple(faults[: min(count, most)])


def _kinds(path: Path) -> list[FaultKind]:
    missing = IN_PLACE if path is Path.STAGED else ON_THE_WAY
    return [kind for kind in (*FaultKind, *OFTEN) if kind not in missing]


def _worlds(path: Path) -> list[str]:
    """Those that have the locks that it takes."""
    boundary = path is Path.STAGED
    return [name for name, world in WORLDS.items() if boundary or world.capabilities.stream_lock]


def healthy(data: bytes) -> Case:
    """Nothing goes wrong, but anything may be late."""
    return read(data, 0)


def faulty(data: bytes) -> Case:
    """One or two faults at any point."""
    return read(data, FAULTS)


def mixed(data: bytes) -> Case:
    """Either, by the last byte."""
    return read(data, FAULTS * (data[-1] % 2))


_BYTES = st.binary(min_size=SIZE, max_size=SIZE)
HEALTHY, FAULTY, MIXED = map(_BYTES.map, (healthy, faulty, mixed))
