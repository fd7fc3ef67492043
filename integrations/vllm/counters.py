"""What of ours has run in this process: integers that only grow, by name.

They prove that a part is at work, and that none is where nothing was switched on.
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
"""Calls of the placement policy, slots that it changed, and exceptions in it; epochs that the
engine committed, those that left every slot as it was, and slots that were rewritten; batches that
it routed; dictionaries handed over as one message, and received; requests that a policy of ours
sent to a rank, that were given up, and that were held too long; policies of requests that
failed."""


class Counters:
    """Of one process; any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTER_NAMES, 0))

    def add(self, name: str, count: int = 1) -> None:
        """Raises `KeyError` for a name that is not one of `NAMES`."""
        with self._lock:
            if name not in self._counts:
                raise KeyError(name)
            self._counts[name] += count

    def read(self) -> Mapping[str, int]:
        """All of them, now."""
        with self._lock:
            return dict(self._counts)


COUNTERS = Counters()
"""Of this process."""
