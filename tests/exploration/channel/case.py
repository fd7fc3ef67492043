"""A case of the exploration: who hands what to whom, how it is read, and who moves when."""

from dataclasses import dataclass
from enum import StrEnum

from equipoise.pipeline.channel.edge import ReadMode


class Manner(StrEnum):
    """What a reader does with the tensors of a step."""

    RELEASES = "releases"
    """It launches its reads, and then says so."""
    DROPS = "drops"
    """It says nothing; its tensors are gone when its programs have run."""
    KEEPS = "keeps"
    """It holds on to a tensor of its own, the mapping long gone, and reads it two steps later."""
    SKIPS = "skips"
    """It never reads."""


class Making(StrEnum):
    """Where a sender makes the tensors of a step."""

    OWN = "own"
    """In memory of its own, which it writes over as soon as they are sent."""
    LENT = "lent"
    """Where they are sent from, as far as they travel whole."""
    KEPT = "kept"
    """There too; and it holds on to one, and reads it some steps later."""


class Fault(StrEnum):
    """What goes wrong with one message, on the way from one sender."""

    NONE = "none"
    LOST = "lost"
    """It is never sent."""
    GARBLED = "garbled"
    """A bit of its header flips."""
    OTHER = "other"
    """It is of another class, as large as the one that is expected."""
    AGAIN = "again"
    """The message before it comes a second time, and it never does."""
    KILLED = "killed"
    """Its sender is killed instead."""


WORLD_NAMES = ("independent", "serial-groups", "off-stream", "lagging-query", "aliasing-pool")
MANNERS = tuple(Manner)
MAKINGS = tuple(Making)
READINGS = tuple(ReadMode)
FAULTS = tuple(Fault)
MAX_ROWS = 3


@dataclass(frozen=True)
class Case:
    """One play.

    Attributes:
        world: by name.
        parts: ranks at either end; they slice what is the same on all of them where there are two.
        depth: buffers at either end.
        ahead: steps that the receiver expects ahead, at most `depth`.
        rows: of each step.
        manners: of each step's reader.
        makings: of each step's sender.
        reading: how readers wait for a message.
        fault: what goes wrong; with the message `at` of the first sender.
        schedule: each byte a choice among those that can move.
    """

    world: str = "independent"
    parts: int = 1
    depth: int = 1
    ahead: int = 1
    rows: tuple[int, ...] = (1, 1)
    manners: tuple[Manner, ...] = (Manner.RELEASES, Manner.RELEASES)
    makings: tuple[Making, ...] = (Making.OWN, Making.OWN)
    reading: ReadMode = ReadMode.HOST
    fault: Fault = Fault.NONE
    at: int = 0
    schedule: bytes = b""


class _Bytes:
    """Numbers read off bytes; zeros after their end."""

    def __init__(self, data: bytes) -> None:
        self._unread = list(data)

    def below(self, bound: int) -> int:
        return (self._unread.pop(0) if self._unread else 0) % bound

    def rest(self) -> bytes:
        return bytes(self._unread)


def case_from(data: bytes, faults: tuple[Fault, ...] = (Fault.NONE,)) -> Case:
    """Read a case off bytes: zeros are the simplest one, so that shrinking leads there."""
    numbers = _Bytes(data)
    world = WORLD_NAMES[numbers.below(len(WORLD_NAMES))]
    reading = READINGS[numbers.below(len(READINGS))]
    parts = 1 + numbers.below(2)
    if reading is ReadMode.STREAM and world == "off-stream":
        reading = ReadMode.HOST
    depth = 1 + numbers.below(3)
    steps = 1 + numbers.below(6)
    return Case(
        world=world,
        parts=1 if world == "off-stream" else parts,
        depth=depth,
        ahead=1 + numbers.below(depth),
        rows=tuple(numbers.below(MAX_ROWS + 1) for _ in range(steps)),
        manners=tuple(MANNERS[numbers.below(len(MANNERS))] for _ in range(steps)),
        makings=tuple(MAKINGS[numbers.below(len(MAKINGS))] for _ in range(steps)),
        reading=reading,
        fault=faults[numbers.below(len(faults))],
        at=numbers.below(steps),
        schedule=numbers.rest(),
    )
