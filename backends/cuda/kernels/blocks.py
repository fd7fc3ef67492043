"""How a batch is divided among programs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """Of a batch.

    Attributes:
        block: elements a program, a power of two.
        warps: of a program.
        programs: how many.
    """

    block: int
    warps: int
    programs: int

    @property
    def alone(self) -> bool:
        """Whether one program has it all."""
        return self.programs == 1


FEW, SOME = 256, 1024
"""Batches of up to so many elements go to one program: what the others would save in time on the
searches is less than the tickets cost."""
MANY = 512
"""Elements a program of a larger batch: few enough that a batch of thousands fills the device, and
enough that adding a histogram costs fewer additions than elements."""


def divided(elements: int) -> Division:
    """Programs for a batch of `elements`; an empty one has a program too, which clears counts."""
    if elements <= FEW:
        return Division(FEW, 4, 1)
    if elements <= SOME:
        return Division(SOME, 8, 1)
    return Division(MANY, 8, -(-elements // MANY))
