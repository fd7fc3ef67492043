"""The log of requests: one JSON object a line, written and read here.

Times are seconds since 1970, of one clock that does not jump.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from equipoise.hal.errors import FormatError
from equipoise.serve.outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of one request; None: it did not come to that.

    Attributes:
        run: when the proxy that had it began, the same in all records of one run of it.
        id: its `X-Request-Id`.
        path: what was asked for.
        model: by which model.
        streamed: whether its answer was asked for event by event.
        worker: name of the worker that had it last.
        attempts: times that it was sent to a worker.
        arrival: when its head had arrived.
        bound: when it was bound to that worker.
        first: when the first of an answer was passed on.
        end: when it was over.
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
    arrival: float
    bound: float | None
    first: float | None
    end: float
    prompt: int
    output: int
    outcome: Outcome

    def line(self) -> str:
        """As a line of the log, with its end."""
        return json.dumps(asdict(self), ensure_ascii=True, allow_nan=False) + "\n"


NUMBERS = {"run", "arrival", "bound", "first", "end"}
COUNTS = {"attempts", "prompt", "output"}
LATEST = 1e12
"""Seconds; of what is no number nothing can be said."""
OPTIONAL = {"worker", "bound", "first"}
NAMES = frozenset(field.name for field in fields(Record))


HEAD = '{"run": '
"""Every line begins so."""


def _nobody(line: int) -> None:
    """Told of lines that were cut off."""


def read_log(path: Path, cut: Callable[[int], None] = _nobody) -> Iterator[Record]:
    """The records of a log, in the order in which requests ended.

    A line without its end is left out, and `cut` is told its number: the proxy was killed while it
    wrote, or its disk was full.

    Raises: FormatError naming the file and the line.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # A pipe without a writer would block for ever, and a device never end.
            raise FormatError(str(path), "is not a regular file")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if _is_cut(line):
                    cut(number)
                else:
                    yield _record(path, number, line)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"is not UTF-8: {error.reason}") from None


def _is_cut(line: str) -> bool:
    """The beginning of a record, and not its end; records are flat, so a brace ends one."""
    begun = line.startswith(HEAD) or HEAD.startswith(line.rstrip("\n"))
    return begun and not line.endswith("}\n")


def _record(path: Path, number: int, line: str) -> Record:
    try:
        loaded = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError(str(path), f"line {number} is not JSON") from None
    if not isinstance(loaded, dict) or set(loaded) != NAMES:
        wanted = ", ".join(sorted(NAMES))
        raise FormatError(str(path), f"line {number}: expected an object with {wanted}")
    for key, value in loaded.items():
        if not _fits(key, value):
            raise FormatError(str(path), f"line {number}: {key} cannot be {value!r}")
    values: dict[str, Any] = loaded | {"outcome": Outcome(loaded["outcome"])}
    return Record(**values)


def _fits(key: str, value: Any) -> bool:
    if value is None:
        return key in OPTIONAL
    if key in COUNTS:
        return type(value) is int and value >= 0
    if key in NUMBERS:
        return type(value) in (int, float) and 0 <= value < LATEST
    if key == "outcome":
        return value in set(Outcome)
    return isinstance(value, bool if key == "streamed" else str)
