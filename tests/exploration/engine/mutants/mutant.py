"""What a mutant is: the engine with one behaviour broken."""

from collections.abc import Callable
from dataclasses import dataclass, field

from exploration.engine.case import Case, FaultKind
from exploration.engine.patches import Patches


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken behaviour, and who is to notice.

    Attributes:
        name: words with hyphens, unique.
        broken: one sentence: what it does instead.
        property: the property that must reject it.
        patches: what stands in the place of the engine's own, by `module.name`.
        reaches: whether a case may come to what is broken. A search plays no other: of those that
            are drawn, few come to what is done after a rare fault.
    """

    name: str
    broken: str
    property: str
    patches: Patches = field(hash=False)
    reaches: Callable[[Case], bool] = lambda case: True


def with_fault(kind: FaultKind) -> Callable[[Case], bool]:
    """Of a mutant that is wrong after such a fault."""
    return lambda case: any(fault.kind is kind for fault in case.faults)
