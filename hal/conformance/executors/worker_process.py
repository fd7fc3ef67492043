"""The loop of a rank process: JSON lines in, JSON lines out."""

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

import torch

PR_SET_PDEATHSIG = 1
RequestHandler = Callable[[dict[str, Any]], dict[str, Any]]
"""Does what a line of the driver says; must not raise."""


def serve_requests(answer: RequestHandler) -> None:
    """Answer every line until the driver closes the pipe; ends at once, whatever threads do.

    Ends with its driver, and writes the stacks of its threads when it is aborted.
    """
    die_with_parent()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver hears it, and decides
    torch.set_num_threads(1)
    replies = _private_stdout()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
    os._exit(0)


def _private_stdout() -> IO[str]:
    """The pipe to the driver; whatever prints goes to standard error instead."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def die_with_parent() -> None:
    """Be killed when the process that started this one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)
