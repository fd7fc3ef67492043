"""Reads Mooncake's traces (github.com/kvcache-ai/Mooncake, FAST 2025, Apache-2.0).

JSON lines with the fields timestamp, in milliseconds, input_length, output_length and hash_ids: one
id for each block of 512 tokens of the prompt, of which the last may be partly filled.
"""

from array import array

import numpy as np

from equipoise.balancer.formats.numbers import INT64_LIMIT, short_repr
from equipoise.balancer.requests.traces.csv_columns import MAX_SECONDS, NANOSECONDS_PER_SECOND
from equipoise.balancer.requests.traces.json_objects import (
    decode_value,
    error_reason,
    integer_field,
    list_field,
    object_field,
)
from equipoise.balancer.requests.traces.trace_file import TraceFile
from equipoise.balancer.requests.traces.workload_builder import WorkloadBuilder
from equipoise.balancer.requests.workload import BLOCK_TOKENS, MAX_TOKENS, Workload

TIME, PROMPT, OUTPUT, HASHES = "timestamp", "input_length", "output_length", "hash_ids"
MILLISECOND = NANOSECONDS_PER_SECOND // 1000
MILLISECONDS_MOST = MAX_SECONDS * 1000


def read(source: TraceFile, most: int | None) -> Workload:
    """Reads the first `most` rows, or all. Raises `FormatError` that names the line."""
    builder = WorkloadBuilder(source)
    rows_left = most
    for block in source.blocks():
        rows = _Rows()
        for number, line in enumerate(block.data.split(b"\n"), block.first_line):
            if rows_left is not None and len(rows) == rows_left:
                break
            if line.strip():
                _add(source, number, line, rows)
        rows.move_to(builder)
        rows_left = None if rows_left is None else rows_left - len(rows)
        if rows_left == 0:
            break
    return builder.workload()


class _Rows:
    """The rows of a block, in arrays of eight bytes per number."""

    def __init__(self) -> None:
        self._times, self._prompts, self._outputs = array("q"), array("q"), array("q")
        self._ids, self._ends = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self._times)

    def add(self, value: object) -> None:
        """Adds a row. Raises `ValueError` that names the wrong field."""
        time = _time(value)
        prompt, output = (
            integer_field(value, *field, MAX_TOKENS) for field in ((PROMPT, 1), (OUTPUT, 0))
        )
        ids = list_field(value, HASHES)
        if len(ids) > -(-prompt // BLOCK_TOKENS):
            raise ValueError(
                f"{HASHES} has {len(ids)} for {prompt} tokens, in blocks of {BLOCK_TOKENS}"
            )
        for block_hash in ids:
            if type(block_hash) is not int or not 0 <= block_hash < INT64_LIMIT:
                raise ValueError(
                    f"{HASHES} holds {short_repr(block_hash)}, expected 0 to {INT64_LIMIT - 1}"
                )
            self._ids.append(block_hash)
        self._times.append(time)
        self._prompts.append(prompt)
        self._outputs.append(output)
        self._ends.append(len(self._ids))

    def move_to(self, builder: WorkloadBuilder) -> None:
        """Adds the rows to `builder`."""
        counts = (self._times, self._prompts, self._outputs, self._ids, self._ends)
        times, prompts, outputs, ids, ends = (np.array(part, dtype=np.int64) for part in counts)
        builder.add(times, prompts, outputs, (ids, ends))


def _add(source: TraceFile, number: int, line: bytes, rows: _Rows) -> None:
    try:
        value, end = decode_value(line.decode().strip())
        if end != len(line.decode().strip()):
            raise ValueError("there is more after the object")
    except ValueError as error:  # of JSON, and of UTF-8
        raise source.error(f"is not JSON: {error_reason(error)}", number) from None
    try:
        rows.add(value)
    except ValueError as error:
        raise source.error(str(error), number) from None


def _time(value: object) -> int:
    """Returns the time in nanoseconds, rounded if it has a fraction of a millisecond."""
    time = object_field(value, TIME)
    if type(time) not in (int, float) or not isinstance(time, int | float):
        raise ValueError(f"{TIME} is {short_repr(time)}, expected milliseconds")
    if not 0 <= time <= MILLISECONDS_MOST:
        raise ValueError(f"{TIME} is {short_repr(time)}, expected 0 to {MILLISECONDS_MOST}")
    return round(time * MILLISECOND)
