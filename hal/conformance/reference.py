"""Properties by reference: how a rank in another process finds the one that is to be played."""

import sys
from importlib import import_module

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.property import Property
from equipoise.hal.errors import UsageError


def refer(claim: Property) -> str:
    """PACKAGE:OBJECT where its module has a name for it, else its own name in the suite.

    Raises `UsageError` when it is neither: then no other process can find it.
    """
    module = claim.play.__module__
    for name, found in vars(sys.modules[module]).items():
        if found is claim:
            return f"{module}:{name}"
    if any(claim is known for known in suite.properties()):
        return claim.name
    raise UsageError(f"property {claim.name!r} is in no suite, and {module} has no name for it")


def resolve(reference: str) -> Property:
    """The property that `refer` was given. Raises `UsageError` when there is none."""
    module, colon, name = reference.partition(":")
    try:
        found: object = getattr(import_module(module), name) if colon else suite.find(reference)
    except (ImportError, AttributeError, KeyError) as error:
        raise UsageError(f"no property {reference!r}: {error}") from error
    if not isinstance(found, Property):
        raise UsageError(f"{reference!r} is not a property: {found!r}")
    return found
