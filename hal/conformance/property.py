"""What a property is: programs, play and judge, and the capabilities that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.strategies import SearchStrategy

from equipoise.hal.capabilities import Capabilities, CommunicatorCapabilities
from equipoise.hal.conformance.context import Play, RankContext
from equipoise.hal.conformance.program import Case, Program
from equipoise.hal.expert_parallel import ExpertParallelCapabilities
from equipoise.hal.stream import Role


class PropertyScope(StrEnum):
    """How many ranks play a property."""

    DEVICE = "one"
    """A device by itself, no fabric."""
    GROUP = "group"
    """As many as the program says, with a fabric."""


class DeadlineLength(StrEnum):
    """What deadline the fabric has."""

    LONG = "calm"
    """Long: no operation of the property is meant to reach it."""
    SHORT = "brisk"
    """Short: the property waits until deadlines expire."""


@dataclass(frozen=True)
class Traits:
    """What is known about the subject before anything is drawn.

    Attributes:
        accelerator: what the device declares.
        communicator: what the communicator declares; None when there is one rank only.
        group_sizes: how many ranks a program may have, ascending.
        controlled: whether the schedule decides every interleaving.
        can_end_ranks: whether a rank, or the store, may be ended: the executor replaces it.
        steered: whether the schedule decides the order on a real or simulated device; its choices
            are many, since every small step of a library is one.
        expert_parallel: what the expert-parallel library declares; None where none is judged.
    """

    accelerator: Capabilities
    communicator: CommunicatorCapabilities | None
    group_sizes: tuple[int, ...]
    controlled: bool
    can_end_ranks: bool = False
    steered: bool = False
    expert_parallel: ExpertParallelCapabilities | None = None

    @property
    def comm_capabilities(self) -> CommunicatorCapabilities:
        """What the communicator declares, where a property needs one."""
        return self.communicator or CommunicatorCapabilities()


ProgramStrategy = Callable[[Traits], SearchStrategy[Program]]
"""A strategy of valid programs."""


@dataclass(frozen=True)
class StatefulPrograms:
    """Programs composed by a rule-based machine, which knows at each rule what can follow.

    Attributes:
        new_machine: makes a machine for these traits; its teardown plays the composed case.
    """

    new_machine: Callable[[Traits, Callable[[Case], None]], RuleBasedStateMachine]


Requirement = Callable[[Traits], str | None]
"""The name of the capability that is missing, or None."""
LostRanks = Callable[[Program], frozenset[int]]
"""Which ranks a program of the property ends for good."""
Judge = Callable[[Program, Sequence[Any]], str | None]
"""Compares what the ranks observed (by rank; by thread within a rank). Raises `Violation`.

Returns a measurement as text where one is reported, else None.
"""
AppliesTo = Callable[[Traits], bool]
"""Whether the executor can play the property; where it cannot, nothing is reported."""


def no_requirement(_: Traits) -> str | None:
    """No capability is needed."""
    return None


def every_executor(_: Traits) -> bool:
    """Every executor can play it."""
    return True


def no_comparison(_program: Program, _answers: Sequence[Any]) -> None:
    """Compares nothing: the ranks judged everything themselves."""


@dataclass(frozen=True, kw_only=True)
class Property:
    """One property.

    Attributes:
        name: words with hyphens, unique.
        family: one of `FAMILIES`.
        clauses: which clauses it judges; a `Violation` names one of them (or C8, for a hang).
        claim: one sentence.
        programs: where valid programs come from.
        play: what one thread does; raises `Violation`, returns what `judge` compares.
        judge: compares the answers of all threads.
        needs: the capability that it needs.
        applies_to: which executors can play it.
        scope: whether it needs a fabric.
        threads: threads of control on each rank.
        deadline: what deadline it needs.
        lost_ranks: set by a property that breaks things on purpose: each of its cases gets its own
            fabric, and the resources of the survivors are measured afterwards.
        ends_store: whether its cases end the store as well: a separate process then holds it.
        large: whether a case has the sizes of a real model. One case then holds every size, and
            `search` plays a sixtieth of the cases of other properties, two at least.
    """

    name: str
    family: str
    clauses: tuple[str, ...]
    claim: str
    programs: ProgramStrategy | StatefulPrograms
    play: Callable[[RankContext, Program], Play]
    judge: Judge = no_comparison
    needs: Requirement = no_requirement
    applies_to: AppliesTo = every_executor
    scope: PropertyScope = PropertyScope.DEVICE
    threads: int = 1
    deadline: DeadlineLength = DeadlineLength.LONG
    lost_ranks: LostRanks | None = None
    ends_store: bool = False
    large: bool = False


def concurrent_roles(traits: Traits) -> tuple[str, ...]:
    """The roles whose streams run concurrently: the first ones, as many as are declared (B8)."""
    return tuple(role.value for role in Role)[: traits.accelerator.streams]


def concurrent_streams(traits: Traits) -> str | None:
    """Requires two streams that run concurrently."""
    return None if len(concurrent_roles(traits)) > 1 else "streams"


def lock_support(traits: Traits) -> str | None:
    """Requires the stream lock."""
    return None if traits.accelerator.stream_lock else "stream_lock"


def holdable_stream(traits: Traits) -> str | None:
    """Requires a stream that can be held while another one runs."""
    if not traits.controlled and lock_support(traits):
        return "stream_lock"
    return concurrent_streams(traits)


def graph_support(traits: Traits) -> str | None:
    """Requires graph capture."""
    return None if traits.accelerator.graph_capture else "graph_capture"


def kernel_capture(traits: Traits) -> str | None:
    """Requires graphs that may hold kernels."""
    declared = traits.accelerator.kernel_capture
    return graph_support(traits) or (None if declared else "kernel_capture")


def all_of(*needs: Requirement) -> Requirement:
    """The first requirement that is missing."""
    return lambda traits: next(filter(None, (need(traits) for need in needs)), None)


def independent_groups(traits: Traits) -> str | None:
    """Requires communicators that progress independently of each other."""
    return None if traits.comm_capabilities.independent_groups else "independent_groups"


def independent_copies(traits: Traits) -> str | None:
    """Requires copies from the host that end while a launched stream waits."""
    declared = traits.accelerator.copy_independent_of_launch
    return None if declared else "copy_independent_of_launch"
