"""All mutants of the exchange."""

from exploration.exchange.mutants import order, packing
from exploration.exchange.mutants.mutant import Mutant


def mutants() -> tuple[Mutant, ...]:
    """In the order of the design page."""
    return (*packing.MUTANTS, *order.MUTANTS)
