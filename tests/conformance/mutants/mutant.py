"""What a mutant is: a healthy backend with one behaviour broken."""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.hal.conformance.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken behaviour, and the property that must notice it.

    Attributes:
        name: words with hyphens, unique.
        clause: the clause that it breaks.
        broken: one sentence: what it does instead.
        property: the property that must reject it.
        also: other properties that cannot help rejecting it, because their programs use what is
            broken; the matrix shows them. Empty unless a comment gives the reason.
        subject: the mutant on its executor, fresh.
        real: whether it is of the CPU and gloo, on real threads, and not of the virtual backend.
    """

    name: str
    clause: str
    broken: str
    property: str
    subject: Callable[[], Subject]
    also: tuple[str, ...] = ()
    real: bool = False
