"""One rank of a multi-process test: JSON lines in, JSON lines out.

A line `{"case": "module:function", "where": {...}, "arguments": {...}}` runs the function on a
fresh fabric and answers `{"answer": ...}` or `{"raised": traceback}`. The fabric stays open until
the line `{"close": true}`, so that no rank takes its links away while another is still at work.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import IO, Any

import torch

from equipoise.hal import registry
from equipoise.hal.communicator import Fabric, Rendezvous

PR_SET_PDEATHSIG = 1


class Desk:
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
            return {"raised": traceback.format_exc()}

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


def main() -> None:
    """Serve until the driver closes the pipe; ends at once, whatever threads still do."""
    _die_with_parent()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    replies = _private_stdout()
    desk = Desk()
    for line in sys.stdin:
        replies.write(json.dumps(desk.answer(json.loads(line))) + "\n")
        replies.flush()
    os._exit(0)


def _private_stdout() -> IO[str]:
    """The pipe to the driver; whatever prints goes to standard error instead."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


if __name__ == "__main__":
    main()
