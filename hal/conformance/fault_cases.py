"""Programs with a fault in them: what breaks, where, and what that may and must bring down."""

from dataclasses import dataclass
from enum import StrEnum

from hypothesis import strategies as st

from equipoise.hal.conformance.deeds import steps
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Traits

MOST_STEPS = 6
MOST_RANKS = 5


class Fault(StrEnum):
    """What happens to one rank."""

    KILL = "kill"
    """It ends at once."""
    STOP = "stop"
    """Nothing of it moves any more."""
    DELAY = "delay"
    """Nothing of it moves for less than the deadline."""
    DROP = "drop"
    """It leaves out one operation."""


LOSING = (Fault.KILL, Fault.STOP)


@dataclass(frozen=True)
class Plot:
    """What is going to happen, known to every rank.

    Attributes:
        fault: what happens.
        victim: to whom.
        at: before which step it is killed, stopped or delayed, or which step it drops. A dropped
            step is the last one: a later one would take its place, since there are no tags (P2).
        window: how many operations a rank has in flight before it waits for the oldest.
        steps: what the ranks do.
    """

    fault: Fault
    victim: int
    at: int
    window: int
    steps: tuple[Step, ...]

    @property
    def lost(self) -> frozenset[int]:
        """Who is not there any more afterwards."""
        return frozenset({self.victim} if self.fault in LOSING else ())

    def misses(self, number: int) -> bool:
        """Whether the victim's part in step `number` never comes."""
        if self.fault is Fault.DROP:
            return number == self.at
        return self.fault in LOSING and number >= self.at

    def spoils(self, number: int) -> bool:
        """Whether step `number` may fail: a rank that is lost takes with it what is in flight."""
        return self.fault in LOSING or self.misses(number)


def plot(found: Program) -> Plot:
    """The plot that the settings of a program tell."""
    fault, at = Fault(str(found.setting("fault"))), found.number("at") % len(found.steps)
    kept = found.steps[: at + 1] if fault is Fault.DROP else found.steps
    return Plot(fault, found.number("victim"), at, found.number("window"), kept)


def programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Any operations on any number of ranks, and any fault that the executor can bring about."""
    sizes = [size for size in traits.sizes if 2 <= size <= MOST_RANKS]
    faults = [fault.value for fault in Fault if traits.expendable or fault not in LOSING]

    def of(size: int) -> st.SearchStrategy[Program]:
        settings = st.fixed_dictionaries(
            {
                "fault": st.sampled_from(faults),
                "victim": st.integers(0, size - 1),
                "at": st.integers(0, MOST_STEPS - 1),
                "window": st.sampled_from([0, 1, MOST_STEPS]),
            }
        )
        drawn = st.lists(steps(traits, size), min_size=1, max_size=MOST_STEPS)
        return st.builds(lambda found, how: program(found, size, how), drawn, settings)

    return st.sampled_from(sizes).flatmap(of)
