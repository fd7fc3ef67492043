"""What a mutant is: the exchange with one behaviour broken."""

from dataclasses import dataclass, field

from exploration.engine.patches import Patches


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken behaviour, and who is to notice.

    Attributes:
        name: words with hyphens, unique.
        broken: one sentence: what it does instead.
        property: what a case must show to be wrong.
        patches: what stands in the place of the exchange's own, by `module.name`.
    """

    name: str
    broken: str
    property: str
    patches: Patches = field(hash=False)
