"""Counters of a planner that runs in a process of its own, seen by the worker that started it."""

from collections.abc import Mapping
from multiprocessing.sharedctypes import RawValue
from typing import Any

NAMES = "policy_calls", "policy_moves", "policy_failures"
"""As in `equipoise.integrations.vllm.counters`."""


class Tally:
    """Integers that only grow, in memory that a forked process shares.

    One process adds, any may read. Without locks: a planner that is killed would keep one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {name: RawValue("q", 0) for name in NAMES}

    def add(self, name: str, count: int = 1) -> None:
        """Raises `KeyError` for a name that is not one of `NAMES`."""
        self._counts[name].value += count

    def read(self) -> Mapping[str, int]:
        """All of them, now."""
        return {name: int(count.value) for name, count in self._counts.items()}
