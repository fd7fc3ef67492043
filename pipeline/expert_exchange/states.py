"""The states of a room: one frozen dataclass each.

Idle --dispatch--> Sending --wait--> Arrived --combine--> Returning --wait--> Returned
  ^                                                                              |
  +----------------------------------- release ----------------------------------+
"""

from dataclasses import dataclass

from equipoise.hal.work import Work


@dataclass(frozen=True)
class Idle:
    """Nobody has it; what may still be read of it is behind the room's events."""


@dataclass(frozen=True)
class Sending:
    """Rows are on their way."""

    ticket: int
    tokens: int
    work: Work


@dataclass(frozen=True)
class Arrived:
    """A stream has waited for the rows and lists the entries."""

    ticket: int
    tokens: int


@dataclass(frozen=True)
class Returning:
    """Results are on their way."""

    ticket: int
    tokens: int
    work: Work


@dataclass(frozen=True)
class Returned:
    """A stream has waited for the results, and somebody reads them."""

    ticket: int
    tokens: int


State = Idle | Sending | Arrived | Returning | Returned
"""Where a room is."""
