"""All mutants of the exchange."""

from exchanging.mutants import order, packing
from exchanging.mutants.mutant import Mutant


def mutants() -> tuple[Mutant, ...]:
    """In the order of the design page."""
    return (*packing.MUTANTS, *order.MUTANTS)
