"""Notes what becomes of requests: for Prometheus, for the log, and for Weights & Biases."""

import asyncio
import time

from equipoise.serve.call import Call
from equipoise.serve.charts import Charts
from equipoise.serve.desk import Desk
from equipoise.serve.fleet import balance_of
from equipoise.serve.log import RequestLog
from equipoise.serve.metrics import Metrics
from equipoise.serve.outcomes import Outcome
from equipoise.serve.settings import RouteSettings

INTERVAL = 10.0
"""Seconds from one point of a chart to the next."""


class Journal:
    """Of one proxy; every request that ends is noted once.

    Raises: UsageError for a log that cannot be opened, or where wandb is missing.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self.metrics = Metrics([one.name for one in settings.workers])
        self._log = None if settings.log is None else RequestLog(settings.log)
        self._charts = None if settings.wandb is None else Charts(settings.wandb)
        self._loop = asyncio.get_running_loop()
        self._run = time.time()
        self._epoch = self._run - self._loop.time()
        self._counts = dict.fromkeys(Outcome, 0)
        self._desk: Desk | None = None

    def watch(self, desk: Desk) -> None:
        """Show what `desk` knows, from now on."""
        self._desk = desk
        self.metrics.watch(desk, self._dropped)

    def ended(self, call: Call) -> None:
        """A request is over."""
        outcome = call.outcome or Outcome.FAILED
        self._counts[outcome] += 1
        self.metrics.ended(call)
        if self._log is not None:
            self._log.note(call.record(self._loop.time(), self._epoch, self._run))

    def turned_away(self, outcome: Outcome) -> None:
        """A client came no further than its connection."""
        self._counts[outcome] += 1
        self.metrics.turned_away(outcome)

    async def watch_for_ever(self) -> None:
        """Send points of charts, where any are asked for."""
        while True:
            await asyncio.sleep(INTERVAL)
            if self._charts is not None:
                self._charts.note(self._point())

    def close(self) -> None:
        """Write what waits; bounded."""
        if self._log is not None:
            self._log.close()
        if self._charts is not None:
            self._charts.close()

    def _dropped(self) -> int:
        return 0 if self._log is None else self._log.dropped

    def _point(self) -> dict[str, float]:
        assert self._desk is not None
        desk = self._desk
        balance = balance_of(desk.workers)
        ended = {f"requests/{one.value}": float(count) for one, count in self._counts.items()}
        return ended | {
            "in_flight_requests": len(desk.tickets),
            "pooled_requests": desk.held,
            "imbalance_tokens": balance.imbalance,
            "idle_ratio": balance.idle,
        }
