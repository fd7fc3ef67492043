"""Prometheus metrics of `eplb_policy`, served by SGLang with `--enable-metrics`.

All ranks plan alike, so only the first one counts. SGLang's server sums up what its processes write
to a folder, which the client library does by itself once the variable names it.
"""

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PREFIX = "equipoise_sglang_"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True)
class Metrics:
    """The metrics of this process; registered once."""

    rebalances: Any
    moved_slots: Any
    balancedness: Any

    def report(self, moved_slots: int, before: float | None, after: float) -> None:
        """Count a plan; see the descriptions below."""
        self.rebalances.inc()
        self.moved_slots.inc(moved_slots)
        if before is not None:
            self.balancedness.labels("before").set(before)
        self.balancedness.labels("after").set(after)


@cache
def metrics() -> Metrics | None:
    """Return the metrics; None if SGLang serves none, or without Prometheus' client library."""
    if FOLDER_VARIABLE not in os.environ or find_spec("prometheus_client") is None:
        return None
    client: Any = import_module("prometheus_client")
    return Metrics(
        rebalances=client.Counter(PREFIX + "rebalances", "Rebalances that eplb_policy planned"),
        moved_slots=client.Counter(
            PREFIX + "moved_slots", "Slots that got another expert, over all layers and ranks"
        ),
        balancedness=client.Gauge(
            PREFIX + "balancedness",
            "mean / max of the ranks' tokens over all layers, as predicted by the latest plan",
            ["plan"],
            multiprocess_mode="mostrecent",
        ),
    )
