"""One rank of a multi-process test.

A line `{"case": "module:function", "where": {...}, "arguments": {...}}` runs the function on a
fresh fabric and answers `{"answer": ...}` or `{"raised": traceback}`. The fabric stays open until
the line `{"close": true}`, so that no rank takes its links away while another is still at work.
"""

import sys
import threading
import traceback
from importlib import import_module
from typing import Any

from equipoise.hal import registry
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.conformance.executors.worker_process import serve_requests


class CaseServer:
    """Runs one case after the other, each on a fabric of its own."""

    def __init__(self) -> None:
        self._fabric: Fabric | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what the driver's line says."""
        try:
            if "case" in order:
                return {"answer": self._run(order)}
            self._close()
            return {"answer": None}
        except BaseException:
            return {"raised": traceback.format_exc() + stacks_of_other_threads()}

    def _run(self, order: dict[str, Any]) -> object:
        module, _, function = order["case"].partition(":")
        program = getattr(import_module(module), function)
        backend = registry.communicator(order["communicator"])
        self._fabric = backend.connect(Rendezvous(**order["where"]))
        return program(self._fabric, **order["arguments"])

    def _close(self) -> None:
        fabric, self._fabric = self._fabric, None
        if fabric is not None:
            fabric.close()


def stacks_of_other_threads() -> str:
    """What the other threads do, which may be what this one has waited for."""
    frames = sys._current_frames()
    return "".join(
        f"thread {thread.name!r}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and thread.ident in frames
    )


def main() -> None:
    """Serve as a rank."""
    serve_requests(CaseServer().answer)


if __name__ == "__main__":
    main()
