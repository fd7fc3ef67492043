"""What a library's errors mean: they are told apart by their text, for they have one class."""

import re

from torch.distributed import DistError

from equipoise.hal.errors import (
    CommunicatorError,
    CommunicatorFailed,
    EquipoiseError,
    OperationTimeout,
    ResultPending,
    Unsupported,
)

FAILURE = re.compile(
    r"time[d-]* ?out|connect|closed|reset by|abort|broken pipe|socket|lost|peer|shut ?down"
    r"|destroyed|not initialized|faulty rank|while waiting",
    re.IGNORECASE,
)
"""What libraries say when they fail; anything else raised at a call refuses its arguments."""
TIMEOUT = re.compile(r"time[d-]* ?out(?! caused)", re.IGNORECASE)
"""What they say when the operation itself has timed out. Gloo says "timeout caused pair closure" of
one that comes after such an operation."""


def wait_error(label: str, error: Exception, soft: bool) -> CommunicatorError:
    """What an error that a wait raised means.

    Args:
        label: the operation and the purpose of its communicator.
        error: what was raised.
        soft: whether the wait had a time-out of its own, shorter than that of the operation.
    """
    text = first_line(error)
    if not TIMEOUT.search(text):
        return CommunicatorFailed(f"{label} failed: {text}")
    if soft:
        return ResultPending(f"{label} has not ended: {text}")
    return OperationTimeout(f"{label} passed its deadline: {text}")


def refusal_or_failure(label: str, error: Exception) -> EquipoiseError:
    """What an error that was raised at a call means: `Unsupported` or `CommunicatorFailed`."""
    text = first_line(error)
    if isinstance(error, DistError) or FAILURE.search(text):
        return CommunicatorFailed(f"{label} failed: {text}")
    return Unsupported(f"{label} is refused: {type(error).__name__}: {text}")


def first_line(error: Exception) -> str:
    """The first line of its text: libraries append stacks."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
