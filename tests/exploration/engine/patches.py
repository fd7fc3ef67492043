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
    kept = []
    for path, other in patches.items():
        module, _, name = path.rpartition(".")
        at = import_module(f"{package}.{module}")
        kept.append((at, name, getattr(at, name)))
        setattr(at, name, other)
    try:
        yield
    finally:
        for at, name, before in reversed(kept):
            setattr(at, name, before)
