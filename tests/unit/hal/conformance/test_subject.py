"""What a report says of an error that a backend raised."""

import pytest

from equipoise.hal.conformance.subject import describe_error
from equipoise.hal.errors import CommunicatorFailed

LONG = "Read error: " + "x" * 400


@pytest.mark.parametrize(
    ("message", "cause", "shown"),
    [
        ("isend failed: reset by peer", "reset by peer\n#1 0x55", ""),
        (f"isend failed: {LONG[:300]}", LONG, ""),
        ("isend failed", "reset by peer", " (because of RuntimeError: reset by peer)"),
        ("isend failed", "", " (because of RuntimeError: )"),
    ],
)
def test_description_leaves_out_cause_that_message_repeats(
    message: str, cause: str, shown: str
) -> None:
    error = CommunicatorFailed(message)
    error.__cause__ = RuntimeError(cause)
    assert describe_error(error) == f"raised CommunicatorFailed: {message}{shown}"
