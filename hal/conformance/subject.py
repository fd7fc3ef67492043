"""A backend under test, together with the executor that plays cases on it."""

from collections.abc import Sequence
from typing import Any, Protocol

from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, PropertyScope, Traits
from equipoise.hal.errors import Violation


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
        """Play one case of a property; returns what it reports. Raises `Violation`."""
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
    return Violation(prop.clauses[0], describe_error(error))


def describe_error(error: BaseException) -> str:
    """What was raised, and because of what."""
    what = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    because = f" (because of {type(cause).__name__}: {cause})" if cause is not None else ""
    return f"raised {what}{because}"


def missing_capability(prop: Property, traits: Traits) -> str | None:
    """What the subject does not declare and the property needs, or None."""
    if prop.scope is PropertyScope.GROUP and traits.communicator is None:
        return "communicator"
    return prop.needs(traits)
