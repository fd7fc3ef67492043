"""Backends by name: entry points of installed distributions, FAMILY:NAME, or PACKAGE:OBJECT."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

from equipoise.hal.errors import BackendUnavailable

if TYPE_CHECKING:
    from equipoise.hal.accelerator import Backend
    from equipoise.hal.communicator import CommunicatorBackend
    from equipoise.hal.expert_parallel import ExpertParallelLibrary

ACCELERATORS = "equipoise.accelerators"
COMMUNICATORS = "equipoise.communicators"
FAMILIES = {
    ACCELERATORS: "equipoise.accelerator_families",
    COMMUNICATORS: "equipoise.communicator_families",
}
"""Groups of callables that make the backend FAMILY:NAME from NAME, by the group of its kind."""
EXPERT_PARALLEL = "equipoise.expert_parallel"
T = TypeVar("T")


def names(group: str) -> tuple[str, ...]:
    """Names registered in an entry-point group, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def accelerators() -> Mapping[str, "Backend"]:
    """Every installed accelerator backend by name; imports them, opens none."""
    return {name: accelerator(name) for name in names(ACCELERATORS)}


def communicators() -> Mapping[str, "CommunicatorBackend"]:
    """Every installed communicator backend by name."""
    return {name: communicator(name) for name in names(COMMUNICATORS)}


def accelerator(name: str) -> "Backend":
    """The accelerator backend called `name`, or named as FAMILY:NAME or PACKAGE:OBJECT.

    Raises:
        BackendUnavailable: there is none of that name, or its module does not import.
    """
    # Imported here: names can be listed where torch does not import.
    from equipoise.hal.accelerator import Backend

    return _find(ACCELERATORS, name, Backend)  # type: ignore[type-abstract]


def communicator(name: str) -> "CommunicatorBackend":
    """The communicator backend called `name`, or named as PACKAGE:OBJECT or FAMILY:NAME.

    A family is one of the entry points of `equipoise.communicator_families`; it is called with
    everything after its colon. Raises as `accelerator` does.
    """
    from equipoise.hal.communicator import CommunicatorBackend

    return _find(COMMUNICATORS, name, CommunicatorBackend)  # type: ignore[type-abstract]


def expert_parallel(name: str) -> "ExpertParallelLibrary":
    """The expert-parallel library called `name`; raises as `accelerator` does."""
    from equipoise.hal.expert_parallel import ExpertParallelCapabilities, ExpertParallelLibrary

    library = _find(EXPERT_PARALLEL, name, ExpertParallelLibrary)  # type: ignore[type-abstract]
    if not isinstance(library.capabilities, ExpertParallelCapabilities):
        raise BackendUnavailable(
            f"expert-parallel library {name!r}: capabilities are no ExpertParallelCapabilities: "
            f"{library.capabilities!r}"
        )
    return library


def _find(group: str, name: str, kind: type[T]) -> T:
    noun = _noun(group)
    try:
        backend = _load(group, name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # also ":X", ".x:X"
        raise BackendUnavailable(f"{noun} {name!r} does not import: {error}") from error
    if isinstance(backend, type) or not isinstance(backend, kind):
        raise BackendUnavailable(
            f"{noun} {name!r} is not {_article(kind.__name__)} {kind.__name__}: "
            f"{_difference(backend, kind)}"
        )
    return backend


def _noun(group: str) -> str:
    """Returns what the user calls an entry of a group: the argument that names it."""
    nouns = {COMMUNICATORS: "communicator", EXPERT_PARALLEL: "expert-parallel library"}
    return nouns.get(group, "backend")


def _article(noun: str) -> str:
    return "an" if noun[0] in "AEIOU" else "a"


def _difference(backend: object, kind: type) -> str:
    """Returns how an object differs from a protocol: the members that it lacks, by name."""
    if isinstance(backend, type):
        return f"{backend!r} is a class, not an object"
    members = (name for name in vars(kind) if not name.startswith("_"))
    lacking = ", ".join(name for name in members if not hasattr(backend, name))
    return f"{backend!r} lacks {lacking}"


def _load(group: str, name: str) -> object:
    first, colon, rest = name.partition(":")
    if colon:
        for family in entry_points(group=FAMILIES.get(group, ""), name=first):
            return family.load()(rest)
        for other, families in FAMILIES.items():
            if first in names(families):
                raise BackendUnavailable(f"{name!r} is a {_noun(other)}, not a {_noun(group)}")
        return getattr(import_module(first), rest)
    for point in entry_points(group=group, name=name):
        return point.load()
    raise BackendUnavailable(
        f"unknown {_noun(group)} {name!r}; known: {', '.join(names(group)) or 'none'} "
        f"(or {' or '.join(ways_to_name(group))})"
    )


def ways_to_name(group: str) -> list[str]:
    """How an entry of a group is named that is not registered: PACKAGE:OBJECT, FAMILY:NAME."""
    families = names(FAMILIES.get(group, ""))
    return ["PACKAGE:OBJECT", *(f"{family}:NAME" for family in families)]
