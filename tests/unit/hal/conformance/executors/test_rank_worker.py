"""What a rank replies where its backend misses a method."""

from typing import Any

from equipoise.backends.cpu import BACKEND
from equipoise.hal.conformance.executors.rank_worker import FaultPriority, RankWorker

WHERE = {"rank": 0, "size": 1, "host": "localhost", "port": 1, "deadline": 1.0}


def test_rank_names_missing_method_as_broken_signature() -> None:
    class Vendor:
        """A communicator backend that cannot connect."""

    vendor: Any = Vendor()
    reply = RankWorker(BACKEND, vendor).handle({"do": "open", "fabric": "f", "where": WHERE})
    assert reply == {"fault": [FaultPriority.VIOLATION, "R3", "Vendor has no connect"]}
