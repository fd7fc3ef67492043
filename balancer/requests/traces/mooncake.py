"""Mooncake's traces (github.com/kvcache-ai/Mooncake, FAST 2025, Apache-2.0).

JSON lines with the fields timestamp, in milliseconds, input_length, output_length and hash_ids: one
id for each block of 512 tokens of the prompt, of which the last may not be full.
"""

from array import array

import numpy as np

from equipoise.balancer.formats.numbers import WORD, short
from equipoise.balancer.requests.traces.csv_columns import SECOND, SECONDS_MOST
from equipoise.balancer.requests.traces.json_objects import decode, entries, field, reason, whole
from equipoise.balancer.requests.traces.trace_file import Source
from equipoise.balancer.requests.traces.workload_builder import Gathering
from equipoise.balancer.requests.workload import BLOCK, TOKENS_MOST, Workload

TIME, PROMPT, OUTPUT, HASHES = "timestamp", "input_length", "output_length", "hash_ids"
MILLISECOND = SECOND // 1000
MILLISECONDS_MOST = SECONDS_MOST * 1000


def read(source: Source, most: int | None) -> Workload:
    """The first `most` rows, or all. Raises `FormatError` that names the line."""
    gathering = Gathering(source)
    left = most
    for block in source.blocks():
        rows = _Rows()
        for number, line in enumerate(block.data.split(b"\n"), block.first):
            if left is not None and len(rows) == left:
                break
            if line.strip():
                _add(source, number, line, rows)
        rows.move_to(gathering)
        left = None if left is None else left - len(rows)
        if left == 0:
            break
    return gathering.workload()


class _Rows:
    """Those of a block, eight bytes for each number."""

    def __init__(self) -> None:
        self._times, self._prompts, self._outputs = array("q"), array("q"), array("q")
        self._ids, self._ends = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self._times)

    def add(self, value: object) -> None:
        """One more. Raises `ValueError` that says which field is wrong."""
        time = _time(value)
        prompt, output = (whole(value, *which, TOKENS_MOST) for which in ((PROMPT, 1), (OUTPUT, 0)))
        ids = entries(value, HASHES)
        if len(ids) > -(-prompt // BLOCK):
            raise ValueError(f"{HASHES} has {len(ids)} for {prompt} tokens, in blocks of {BLOCK}")
        for hashed in ids:
            if type(hashed) is not int or not 0 <= hashed < WORD:
                raise ValueError(f"{HASHES} holds {short(hashed)}, expected 0 to {WORD - 1}")
            self._ids.append(hashed)
        self._times.append(time)
        self._prompts.append(prompt)
        self._outputs.append(output)
        self._ends.append(len(self._ids))

    def move_to(self, gathering: Gathering) -> None:
        """Hand them over."""
        counts = (self._times, self._prompts, self._outputs, self._ids, self._ends)
        times, prompts, outputs, ids, ends = (np.array(part, dtype=np.int64) for part in counts)
        gathering.add(times, prompts, outputs, (ids, ends))


def _add(source: Source, number: int, line: bytes, rows: _Rows) -> None:
    try:
        value, end = decode(line.decode().strip())
        if end != len(line.decode().strip()):
            raise ValueError("there is more behind the object")
    except ValueError as error:  # of JSON, and of UTF-8
        raise source.error(f"is not JSON: {reason(error)}", number) from None
    try:
        rows.add(value)
    except ValueError as error:
        raise source.error(str(error), number) from None


def _time(value: object) -> int:
    """Nanoseconds, to the nearest of those where it is no whole number of milliseconds."""
    time = field(value, TIME)
    if type(time) not in (int, float) or not isinstance(time, int | float):
        raise ValueError(f"{TIME} is {short(time)}, expected milliseconds")
    if not 0 <= time <= MILLISECONDS_MOST:
        raise ValueError(f"{TIME} is {short(time)}, expected 0 to {MILLISECONDS_MOST}")
    return round(time * MILLISECOND)
