"""All mutants of the engine."""

from exploration.engine.mutants import boundaries, commits, locks, votes
from exploration.engine.mutants import forgetting as archives
from exploration.engine.mutants.mutant import Mutant


def mutants() -> tuple[Mutant, ...]:
    """In the order of the design page."""
    return (
        *votes.MUTANTS,
        *archives.MUTANTS,
        *commits.MUTANTS,
        *boundaries.MUTANTS,
        *locks.MUTANTS,
    )
