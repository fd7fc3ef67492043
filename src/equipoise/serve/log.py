"""Writes the log of requests on a thread of its own: the event loop never waits for a disk.

What does not fit into the queue is dropped and counted. A disk that is full is reported once; what
could not be written is counted, and later records are tried again.
"""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from equipoise.hal.errors import UsageError
from equipoise.serve.record import Record

LOG = logging.getLogger("equipoise.route")
CAPACITY = 65_536
"""Records that wait at most."""
BATCH = 1024
CLOSING = 5.0


def _is_cut(path: Path) -> bool:
    """Whether an earlier proxy was killed within a line: what comes now has to begin another."""
    if not path.is_file() or not path.stat().st_size:
        return False  # a pipe, a device: nothing was left there
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class _End:
    """The last thing in the queue."""


class RequestLog:
    """Appends records to a file.

    Args:
        path: made if it is missing; what is in it stays.
        capacity: records that wait at most.

    Attributes:
        dropped: records that were not written.

    Raises: UsageError where the file cannot be opened.
    """

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)
            if _is_cut(path):
                self._file.write(b"\n")
        except OSError as error:
            raise UsageError(f"--log: {path} cannot be written: {error.strerror}") from error
        self._path, self._capacity = path, capacity
        self._queue: SimpleQueue[Record | _End] = SimpleQueue()
        self._reported = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="equipoise.log", daemon=True)
        self._thread.start()

    def note(self, record: Record) -> None:
        """Write it, some time; returns at once."""
        if self._queue.qsize() >= self._capacity:
            self._drop(1, "its disk does not keep up")
            return
        self._queue.put(record)

    def close(self) -> None:
        """Write what waits; bounded."""
        self._queue.put(_End())
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            LOG.error("%s: %d records were not written in time", self._path, self._queue.qsize())

    def _write(self) -> None:
        ended = False
        while not ended:
            batch = list(self._batch())
            ended = isinstance(batch[-1], _End)
            records = [one for one in batch if isinstance(one, Record)]
            data = "".join(record.line() for record in records).encode()
            try:
                self._file.write(data)
            except OSError as error:
                self._drop(len(records), error.strerror or str(error))
        self._file.close()

    def _batch(self) -> Iterator[Record | _End]:
        """What is there, and at least one."""
        yield (first := self._queue.get())
        if isinstance(first, _End):
            return
        for _ in range(BATCH):
            try:
                yield (one := self._queue.get_nowait())
            except Empty:
                return
            if isinstance(one, _End):
                return

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if count and not self._reported:
            self._reported = True
            LOG.error("%s: records are dropped, and counted: %s", self._path, why)
