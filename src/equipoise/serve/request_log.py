"""The request log of the proxy: one JSON object per line, written and read here.

`RequestStats` collects the times and counts of a request while the proxy has it; `RequestRecord` is
the line that is written when it ends. Times in the log are seconds since 1970, of one clock that
does not jump.

`RequestLog` writes on a thread of its own, so that the event loop never waits for a disk. Records
that do not fit into its queue are dropped and counted. A full disk is reported once; what could not
be written is counted, and later records are tried again.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from equipoise.hal.errors import FormatError, UsageError
from equipoise.serve.openai_protocol import TokenUsage
from equipoise.serve.outcomes import RequestOutcome


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What became of one request; None: it did not come to that.

    Attributes:
        run: when the proxy that had it began, the same in all records of one run of it.
        id: its `X-Request-Id`.
        path: what was asked for.
        model: by which model.
        streamed: whether its answer was asked for event by event.
        worker: name of the worker that had it last.
        attempts: times that it was sent to a worker.
        arrived_at: when its head had arrived.
        bound_at: when it was bound to that worker.
        first_answer_at: when the first of an answer was passed on.
        ended_at: when it was over.
        prompt: tokens, as the worker says, or as estimated.
        output: tokens, as the worker says, or as counted.
        outcome: how it ended.
    """

    run: float
    id: str
    path: str
    model: str
    streamed: bool
    worker: str | None
    attempts: int
    arrived_at: float
    bound_at: float | None
    first_answer_at: float | None
    ended_at: float
    prompt: int
    output: int
    outcome: RequestOutcome

    def to_line(self) -> str:
        """As a line of the log, with its end."""
        return json.dumps(asdict(self), ensure_ascii=True, allow_nan=False) + "\n"


TIME_FIELDS = {"run", "arrived_at", "bound_at", "first_answer_at", "ended_at"}
COUNT_FIELDS = {"attempts", "prompt", "output"}
LATEST = 1e12
"""Seconds: times beyond it are not times; NaN is refused too."""
OPTIONAL = {"worker", "bound_at", "first_answer_at"}
FIELD_NAMES = frozenset(field.name for field in fields(RequestRecord))


LINE_PREFIX = '{"run": '
"""Every line begins so."""


def _nobody(line: int) -> None:
    """Ignores lines that were cut off."""


def read_log(path: Path, cut: Callable[[int], None] = _nobody) -> Iterator[RequestRecord]:
    """The records of a log, in the order in which requests ended.

    A line without its end is left out, and `cut` is called with its number: the proxy was killed
    while it wrote, or its disk was full.

    Raises: FormatError naming the file and the line.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # A pipe without a writer would block for ever, and a device never end.
            raise FormatError(str(path), "is not a regular file")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if _is_cut_off(line):
                    cut(number)
                else:
                    yield _record(path, number, line)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"is not UTF-8: {error.reason}") from None


def _is_cut_off(line: str) -> bool:
    """The beginning of a record, and not its end; records are flat, so a brace ends one."""
    has_prefix = line.startswith(LINE_PREFIX) or LINE_PREFIX.startswith(line.rstrip("\n"))
    return has_prefix and not line.endswith("}\n")


def _record(path: Path, number: int, line: str) -> RequestRecord:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError(str(path), f"line {number} is not JSON") from None
    if not isinstance(content, dict) or set(content) != FIELD_NAMES:
        names = ", ".join(sorted(FIELD_NAMES))
        raise FormatError(str(path), f"line {number}: expected an object with {names}")
    for key, value in content.items():
        if not _fits(key, value):
            raise FormatError(str(path), f"line {number}: {key} cannot be {value!r}")
    values: dict[str, Any] = content | {"outcome": RequestOutcome(content["outcome"])}
    return RequestRecord(**values)


def _fits(key: str, value: Any) -> bool:
    if value is None:
        return key in OPTIONAL
    if key in COUNT_FIELDS:
        return type(value) is int and value >= 0
    if key in TIME_FIELDS:
        return type(value) in (int, float) and 0 <= value < LATEST
    if key == "outcome":
        return value in set(RequestOutcome)
    return isinstance(value, bool if key == "streamed" else str)


@dataclass
class RequestStats:
    """Times are the event loop's, in seconds; None: it has not come to that.

    Attributes:
        id: its `X-Request-Id`.
        path: what is asked for.
        arrival: when its head had arrived.
        model: as its body says.
        streamed: whether its answer is to come event by event.
        ready_at: when its body had been read and checked.
        queue_seconds: seconds in which no worker had it.
        sent_at: when it was first sent to a worker.
        worker: name of the worker that has or had it.
        bound_at: when it was bound to that worker.
        first_answer_at: when the first of an answer was passed on.
        pass_on_seconds: seconds from getting the first of an answer to having passed it on.
        attempts: times that it was sent.
        prompt: tokens.
        output: tokens.
        outcome: None while it lasts.
    """

    id: str
    path: str
    arrival: float
    model: str = ""
    streamed: bool = False
    ready_at: float | None = None
    queue_seconds: float = 0.0
    sent_at: float | None = None
    worker: str | None = None
    bound_at: float | None = None
    first_answer_at: float | None = None
    pass_on_seconds: float = 0.0
    attempts: int = 0
    prompt: int = 0
    output: int = 0
    outcome: RequestOutcome | None = None

    def set_usage(self, usage: TokenUsage) -> None:
        """What a worker says goes before what was estimated and counted."""
        if usage.prompt is not None:
            self.prompt = usage.prompt
        if usage.completion is not None:
            self.output = usage.completion

    @property
    def proxy_seconds(self) -> float | None:
        """Seconds that the proxy itself took before the first of an answer was passed on."""
        if self.ready_at is None or self.sent_at is None or self.first_answer_at is None:
            return None
        return max(0.0, self.sent_at - self.ready_at - self.queue_seconds) + self.pass_on_seconds

    def to_record(self, end: float, clock_offset: float, run: float) -> RequestRecord:
        """For the log of a `run`; `clock_offset` is what the wall clock is ahead of the loop's."""
        return RequestRecord(
            run=run,
            id=self.id,
            path=self.path,
            model=self.model,
            streamed=self.streamed,
            worker=self.worker,
            attempts=self.attempts,
            arrived_at=clock_offset + self.arrival,
            bound_at=None if self.bound_at is None else clock_offset + self.bound_at,
            first_answer_at=None
            if self.first_answer_at is None
            else clock_offset + self.first_answer_at,
            ended_at=clock_offset + end,
            prompt=self.prompt,
            output=self.output,
            outcome=self.outcome or RequestOutcome.FAILED,
        )


LOG = logging.getLogger("equipoise.route")
CAPACITY = 65_536
"""Records that wait at most: a minute of a stalled disk at 1,000 requests per second."""
BATCH = 1024
"""Records per write, so that a busy log takes few system calls."""
CLOSING = 5.0
"""Seconds at shutdown for the records that wait: a disk that hangs must not hang the exit."""


def _open_to_append(path: Path) -> BinaryIO:
    """Open a file, or a pipe that somebody reads: without a reader the open would wait for one."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        return descriptor

    return open(path, "ab", buffering=0, opener=opener)


def _ends_within_line(path: Path) -> bool:
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
            self._file: BinaryIO = _open_to_append(path)
            if _ends_within_line(path):
                self._file.write(b"\n")
        except OSError as error:
            raise UsageError(f"--log: {path} cannot be written: {error.strerror}") from error
        self._path, self._capacity = path, capacity
        self._queue: SimpleQueue[RequestRecord | _End] = SimpleQueue()
        self._reported = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="equipoise.log", daemon=True)
        self._thread.start()

    def append(self, record: RequestRecord) -> None:
        """Queue it for the writer thread; returns at once."""
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
        at_end = False
        while not at_end:
            batch = list(self._batch())
            at_end = isinstance(batch[-1], _End)
            records = [one for one in batch if isinstance(one, RequestRecord)]
            data = "".join(record.to_line() for record in records).encode()
            try:
                self._file.write(data)
            except OSError as error:
                self._drop(len(records), error.strerror or str(error))
        self._file.close()

    def _batch(self) -> Iterator[RequestRecord | _End]:
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
