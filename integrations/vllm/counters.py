"""Counters of this process: which features have run, and how often.

They show that a feature is at work, and that none is if nothing was switched on.
"""

from collections import Counter
from collections.abc import Mapping
from threading import Lock

COUNTER_NAMES = (
    "eplb_policy_calls",
    "eplb_policy_moved_slots",
    "eplb_policy_failures",
    "rebalances",
    "unchanged_rebalances",
    "moved_slots",
    "routed_expert_batches",
    "sent_messages",
    "received_messages",
    "routed_requests",
    "aborted_requests",
    "fallback_requests",
    "dp_policy_failures",
)
"""In this order: calls of the placement policy, slots that it changed and exceptions in it
(`eplb_policy`); committed rebalances, those without a change, slots rewritten and batches routed,
where graph replays do not count (`eplb`); dictionaries sent and received as one message
(`pp_transport`); requests that a policy sent to a rank, that clients aborted, that waited too long
and went by vLLM's own rule, and policies that failed (`dp_load_balancer`)."""


class Counters:
    """Monotonic counters by name; any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTER_NAMES, 0))

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter. Raises `KeyError` for a name that is not in `COUNTER_NAMES`."""
        with self._lock:
            if name not in self._counts:
                raise KeyError(name)
            self._counts[name] += count

    def read(self) -> Mapping[str, int]:
        """Return all counters."""
        with self._lock:
            return dict(self._counts)


COUNTERS = Counters()
"""The counters of this process."""
