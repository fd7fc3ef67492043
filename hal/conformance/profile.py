"""How hard the suite looks, and where."""

from collections.abc import Mapping
from enum import StrEnum


class Profile(StrEnum):
    """How hard to look."""

    CI = "ci"
    DEEP = "deep"


class Executor(StrEnum):
    """Where properties are played; the value is what the tables call it."""

    VIRTUAL = "virtual"
    DEVICE = "device"
    RANKS = "ranks"


CASES: Mapping[Profile, Mapping[Executor, int]] = {
    Profile.CI: {Executor.VIRTUAL: 150, Executor.DEVICE: 30, Executor.RANKS: 12},
    Profile.DEEP: {Executor.VIRTUAL: 4000, Executor.DEVICE: 600, Executor.RANKS: 240},
}
"""How many cases of each property."""
FAULTS: Mapping[Profile, Mapping[Executor, int]] = {
    Profile.CI: {Executor.VIRTUAL: 100, Executor.RANKS: 20},
    Profile.DEEP: {Executor.VIRTUAL: 1000, Executor.RANKS: 200},
}
"""How many faults are injected."""
BRISK_SHARE = 4
"""A property that waits until deadlines strike gets so many times fewer cases on real ranks."""
SHRINKING: Mapping[Executor, float] = {
    Executor.VIRTUAL: 30.0,
    Executor.DEVICE: 15.0,
    Executor.RANKS: 15.0,
}
"""Seconds that may go into shrinking one violation."""
