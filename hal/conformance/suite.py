"""All properties, by family and by name."""

from importlib import import_module

from equipoise.hal.conformance.clauses import EXPERT_PARALLEL, FAMILIES, clause_sort_key
from equipoise.hal.conformance.property import Property


def family(name: str) -> tuple[Property, ...]:
    """The properties of one family. Raises `KeyError` when there is no such family."""
    if name not in (*FAMILIES, EXPERT_PARALLEL):
        raise KeyError(name)
    members: tuple[Property, ...] = import_module(
        f"equipoise.hal.conformance.properties.{name}"
    ).PROPERTIES
    return members


def properties() -> tuple[Property, ...]:
    """All of them, in the order of the families."""
    return tuple(prop for name in (*FAMILIES, EXPERT_PARALLEL) for prop in family(name))


def find(name: str) -> Property:
    """The property of that name. Raises `KeyError`."""
    for prop in properties():
        if prop.name == name:
            return prop
    raise KeyError(name)


def clauses() -> tuple[str, ...]:
    """Every clause that some property judges, in the order of the contract."""
    judged_clauses = {clause for prop in properties() for clause in prop.clauses}
    return tuple(sorted(judged_clauses, key=clause_sort_key))
