"""What a mutant is: the engine with one behaviour broken."""

from dataclasses import dataclass, field

from exploration.engine.patches import Patches


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken behaviour, and who is to notice.

    Attributes:
        name: words with hyphens, unique.
        broken: one sentence: what it does instead.
        property: the property that must reject it.
        patches: what stands in the place of the engine's own, by `module.name`.
    """

    name: str
    broken: str
    property: str
    patches: Patches = field(hash=False)
