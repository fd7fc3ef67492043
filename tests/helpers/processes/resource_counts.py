"""What a process, and what an engine, holds: what must not grow while a model is served."""

import ctypes
import gc
import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from equipoise.balancer.experts.host_pool.shared_memory import MEMORY_NAME

PAGE = os.sysconf("SC_PAGE_SIZE")
CONTAINERS = (dict, list, set, deque, Counter)
DEEPEST = 14
"""Attributes and items to go down from a balancer."""


def process() -> dict[str, int]:
    """Resident bytes, threads, descriptors, mappings of shared memory, and objects of Python."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts no more
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings of shared memory": sum(
            "/dev/shm" in line or MEMORY_NAME in line for line in maps
        ),
        "objects": len(gc.get_objects()),
    }


def lengths(root: object) -> dict[str, int]:
    """How long each container is that objects of this package reach from `root`, by its path."""
    length_by_path: dict[str, int] = {}
    visited: set[int] = set()
    todo: list[tuple[str, object, int]] = [("", root, 0)]
    while todo:
        path, thing, depth = todo.pop()
        if id(thing) in visited or depth > DEEPEST:
            continue
        visited.add(id(thing))
        if isinstance(thing, CONTAINERS) and path:
            length_by_path[path] = max(length_by_path.get(path, 0), len(thing))
        todo += ((path + step, part, depth + 1) for step, part in _parts(thing))
    return length_by_path


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    """Attributes of objects of this package, and items; items of one container share a path."""
    if isinstance(
        thing, dict
    ):  # not `SharedMapping`, which would remember every class it is asked about
        yield from (("[]", part) for part in thing.values())
    elif isinstance(thing, list | tuple | set | deque):
        yield from (("[]", part) for part in thing)
    elif type(thing).__module__.startswith("equipoise."):
        names = {field.name for field in fields(thing)} if is_dataclass(thing) else set()
        names |= set(getattr(thing, "__dict__", ())) | set(getattr(type(thing), "__slots__", ()))
        for name in sorted(names):
            if hasattr(thing, name) and not isinstance(getattr(type(thing), name, None), property):
                yield f".{name}", getattr(thing, name)
