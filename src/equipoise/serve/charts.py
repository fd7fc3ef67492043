"""Points of charts at Weights & Biases; asked for by name, imported only then.

On a thread of its own: to sign on takes seconds, and no request waits for that.
"""

import logging
import threading
from collections.abc import Mapping
from importlib import import_module
from queue import Full, Queue

from equipoise.balancer.observe.wandb import MODULE, require

LOG = logging.getLogger("equipoise.route")
CAPACITY = 64
"""Points that wait at most."""
CLOSING = 10.0


class Charts:
    """Logs points to a run of its own.

    Args:
        project: where it is shown.

    Raises: WandbMissing: wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        require()
        self._project = project
        self._queue: Queue[Mapping[str, float] | None] = Queue(CAPACITY)
        self._thread = threading.Thread(target=self._send, name="equipoise.charts", daemon=True)
        self._thread.start()

    def note(self, point: Mapping[str, float]) -> None:
        """Send it, some time; returns at once. Points that do not fit are dropped, and told of."""
        try:
            self._queue.put_nowait(point)
        except Full:
            LOG.warning("Weights & Biases does not keep up: a point is dropped")

    def close(self) -> None:
        """Send what waits; bounded."""
        try:
            self._queue.put(None, timeout=CLOSING)
        except Full:
            LOG.warning("Weights & Biases does not keep up: points are left")
            return
        self._thread.join(CLOSING)

    def _send(self) -> None:
        try:
            run = import_module(MODULE).init(project=self._project)
            while (point := self._queue.get()) is not None:
                run.log({f"route/{name}": value for name, value in point.items()})
            run.finish()
        except Exception:
            LOG.exception("Weights & Biases failed; nothing more is sent there")
