"""A backend under test, together with the executor that plays cases on it."""

import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from equipoise.hal.conformance.clauses import SIGNATURES
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, PropertyScope, Traits
from equipoise.hal.errors import Violation

MAX_COMPARED = 200
"""Characters of a cause that a message is searched for: adapters shorten long lines."""
SUITE = "equipoise.hal.conformance."
ASKERS = (SUITE, "equipoise.hal.accelerator")
"""Modules that ask the objects of a backend for what the protocols name."""


class NotJudgeable(Exception):
    """Raised by `Subject.play` where nothing that the case shows would mean anything; says why."""


class Subject(Protocol):
    """Plays cases; one at a time."""

    @property
    def name(self) -> str:
        """What is under test, and how."""
        ...

    @property
    def traits(self) -> Traits:
        """What properties may ask of it."""
        ...

    def play(self, prop: Property, case: Case) -> str | None:
        """Play one case of a property; returns what it reports.

        Raises `Violation`, or `NotJudgeable` where an earlier case has spoilt the subject.
        """
        ...

    def close(self) -> None:
        """Give everything back; bounded."""
        ...


def compare_answers(prop: Property, case: Case, answers: Sequence[Any]) -> str | None:
    """Let the property compare what all threads observed; returns what it reports."""
    return prop.judge(case.program, answers)


def to_violation(prop: Property, error: BaseException) -> Violation:
    """The violation that an error means: itself if it is one, else that of an unexpected error."""
    if isinstance(error, Violation):
        return error
    missing = missing_member(error)
    if missing is not None:
        return Violation(SIGNATURES, missing)
    return Violation(prop.clauses[0], describe_error(error))


def missing_member(error: BaseException) -> str | None:
    """ "CLASS has no NAME" where the suite asked a backend's object for what it lacks, else None.

    Only where the suite itself asked: what a backend misses among its own objects says nothing of
    the protocols.
    """
    if not isinstance(error, AttributeError) or not error.name or error.__traceback__ is None:
        return None
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    kind = error.obj if isinstance(error.obj, type) else type(error.obj)
    asked = str(frame.f_globals.get("__name__", "")).startswith(ASKERS)
    if not asked or error.obj is None or kind.__module__.startswith(SUITE):
        return None
    return f"{kind.__name__} has no {error.name}"


def describe_error(error: BaseException) -> str:
    """What was raised, and because of what, unless the message repeats its cause."""
    what = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    if cause is None or _repeats(str(error), str(cause)):
        return f"raised {what}"
    return f"raised {what} (because of {type(cause).__name__}: {cause})"


def _repeats(message: str, cause: str) -> bool:
    """Whether a message holds the first line of its cause; libraries append stacks to it."""
    first_line = cause.strip().partition("\n")[0][:MAX_COMPARED]
    return bool(first_line) and first_line in message


def missing_capability(prop: Property, traits: Traits) -> str | None:
    """What the subject does not declare and the property needs, or None."""
    if prop.scope is PropertyScope.GROUP and traits.communicator is None:
        return "communicator"
    return prop.needs(traits)
