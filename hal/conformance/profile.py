"""What a run judges, how many cases it plays, and how far it shrinks a violation."""

from collections.abc import Mapping
from enum import StrEnum

from equipoise.hal.conformance.clauses import (
    COMMUNICATOR_FAMILIES,
    EXPERT_PARALLEL,
    FAMILIES,
)


class Profile(StrEnum):
    """How many cases to play."""

    CI = "ci"
    DEEP = "deep"


class Executor(StrEnum):
    """Where properties are played; the value is its name in the tables."""

    VIRTUAL = "virtual"
    DEVICE = "device"
    RANKS = "ranks"


class RunTarget(StrEnum):
    """What a run judges."""

    BACKEND = "backend"
    """An accelerator, and a communicator with it."""
    COMMUNICATOR = "communicator"
    """A communicator; what needs a device by itself is left out."""
    LIBRARY = "library"
    """An expert-parallel library, and nothing of what it runs on."""


def families_of(target: RunTarget) -> tuple[str, ...]:
    """The families of properties that judge it."""
    return {
        RunTarget.BACKEND: FAMILIES,
        RunTarget.COMMUNICATOR: COMMUNICATOR_FAMILIES,
        RunTarget.LIBRARY: (EXPERT_PARALLEL,),
    }[target]


CASES: Mapping[Profile, Mapping[Executor, int]] = {
    Profile.CI: {Executor.VIRTUAL: 150, Executor.DEVICE: 30, Executor.RANKS: 12},
    Profile.DEEP: {Executor.VIRTUAL: 4000, Executor.DEVICE: 600, Executor.RANKS: 240},
}
"""How many cases of each property."""
FAULT_CASES: Mapping[Profile, Mapping[Executor, int]] = {
    Profile.CI: {Executor.VIRTUAL: 100, Executor.RANKS: 20},
    Profile.DEEP: {Executor.VIRTUAL: 1000, Executor.RANKS: 200},
}
"""How many faults are injected."""
SHORT_DEADLINE_SHARE = 4
"""A property that waits until deadlines expire gets this many times fewer cases on real ranks."""
MAX_SHRINKS: Mapping[Executor, int] = {
    Executor.VIRTUAL: 2000,
    Executor.DEVICE: 500,
    Executor.RANKS: 100,
}
"""Plays that may go into shrinking one violation.

The mutants of the virtual backend need 987 at most, and all but one of them fewer than 325. Ranks
get fewer, since a case that breaks a property there may last until a deadline or the watchdog
expires. hypothesis stops shrinking after five minutes by itself; only cases that hang reach that.
"""
MAX_EXPIRED_SHRINKS: Mapping[Profile, int] = {Profile.CI: 2, Profile.DEEP: 20}
"""Plays among these that may end only when a long deadline has passed, of one property."""
MAX_EXPIRED_PLAYS: Mapping[Profile, int] = {Profile.CI: 4, Profile.DEEP: 200}
"""Such plays of a whole run, after which what waits for a deadline is reported as it was drawn."""
MAX_HUNG_PROPERTIES: Mapping[Profile, int] = {Profile.CI: 3, Profile.DEEP: 20}
"""Properties in which a rank did not answer at all, after which no other is played on ranks: the
next ones would most likely hang too, for 40 s each and more."""
