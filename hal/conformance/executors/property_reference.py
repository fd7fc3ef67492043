"""Refers to a property by name, so that a rank in another process can find it."""

import sys
from importlib import import_module

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import EXPERT_PARALLEL, FAMILIES
from equipoise.hal.conformance.property import Property
from equipoise.hal.errors import UsageError


def property_reference(prop: Property) -> str:
    """PACKAGE:OBJECT where the module of its play names it, else FAMILY/NAME in the suite.

    Raises `UsageError` when it is neither: then no other process can find it.
    """
    module = prop.play.__module__
    for name, value in vars(sys.modules[module]).items():
        if value is prop:
            return f"{module}:{name}"
    known = prop.family in (*FAMILIES, EXPERT_PARALLEL)
    if known and any(prop is member for member in suite.family(prop.family)):
        return f"{prop.family}/{prop.name}"
    raise UsageError(f"property {prop.name!r} is in no suite, and {module} has no name for it")


def resolve_property(reference: str) -> Property:
    """The property of that reference. Raises `UsageError` when there is none."""
    module, colon, name = reference.partition(":")
    try:
        prop: object = getattr(import_module(module), name) if colon else _of_suite(reference)
    except (ImportError, AttributeError, KeyError) as error:
        raise UsageError(f"no property {reference!r}: {error}") from error
    if not isinstance(prop, Property):
        raise UsageError(f"{reference!r} is not a property: {prop!r}")
    return prop


def _of_suite(reference: str) -> Property:
    family, _, name = reference.partition("/")
    return {prop.name: prop for prop in suite.family(family)}[name]
