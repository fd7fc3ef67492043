"""Names of a package's modules that stand for something else for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

EXPERTS = "equipoise.balancer.experts"
Patches = Mapping[str, Any]
"""By `module.name`, a module of the package and a name that it uses."""


@contextmanager
def patched(patches: Patches, package: str = EXPERTS) -> Iterator[None]:
    """Put these in place, and at the end what stood there before."""
    originals = []
    for path, replacement in patches.items():
        module, _, name = path.rpartition(".")
        at = import_module(f"{package}.{module}")
        originals.append((at, name, getattr(at, name)))
        setattr(at, name, replacement)
    try:
        yield
    finally:
        for at, name, original in reversed(originals):
            setattr(at, name, original)
