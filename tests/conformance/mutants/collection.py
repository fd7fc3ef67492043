"""All mutants, by family; a family is a module of this folder that has MUTANTS."""

from importlib import import_module
from pathlib import Path

from conformance.mutants.mutant import Mutant

OTHERS = ("mutant", "mutation", "collection", "subjects", "expert_libraries", "thread_on_import")
"""Modules of this folder that hold no mutants. The last starts a thread when it is imported."""


def families() -> tuple[str, ...]:
    """Names of the modules that hold mutants, sorted."""
    stems = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(sorted(name for name in stems if name not in OTHERS))


def mutants() -> tuple[Mutant, ...]:
    """Every mutant there is."""
    return tuple(
        mutant
        for family in families()
        for mutant in import_module(f"conformance.mutants.{family}").MUTANTS
    )
