"""Reading a file that a user named: bounded in bytes and in time, whatever the path leads to."""

import errno
import os
import select
import stat
import time
from pathlib import Path

MAX_BYTES = 1 << 28
"""Of a file: more than any text or configuration has, and less than fills a machine."""
TIMEOUT = 10.0
"""Seconds that a pipe may take for its next bytes: `<(command)` of a shell writes at once."""
PIECE = 1 << 20


def read_input(path: Path) -> bytes:
    """The bytes of a file, or of a pipe up to its end.

    Raises OSError as a plain read does, and for a pipe into which nobody writes, and for what does
    not end, as /dev/zero.
    """
    # Without O_NONBLOCK the call itself waits for a writer, deaf to signals.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return _all_of(descriptor)
    finally:
        os.close(descriptor)


def _all_of(descriptor: int) -> bytes:
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    content = bytearray()
    while len(content) <= MAX_BYTES:
        if is_pipe:
            _await_bytes(descriptor)
        piece = os.read(descriptor, PIECE)
        if not piece:
            return bytes(content)
        content += piece
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def _await_bytes(descriptor: int) -> None:
    """Raises OSError where neither bytes nor the end come in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    expiry = time.monotonic() + TIMEOUT
    # A signal handler that raises ends this; one that does not is not counted as an answer.
    while not poll.poll(1000.0 * max(expiry - time.monotonic(), 0.0)):
        if time.monotonic() >= expiry:
            raise OSError(errno.ETIMEDOUT, f"a pipe into which nobody writes for {TIMEOUT:g} s")
