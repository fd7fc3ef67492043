"""Collects blocks of requests into a workload."""

from collections.abc import Sequence

import numpy as np

from equipoise.balancer.requests.traces.csv_columns import NANOSECONDS_PER_SECOND
from equipoise.balancer.requests.traces.trace_file import TraceFile
from equipoise.balancer.requests.workload import (
    BLOCK_TOKENS,
    BlockHashes,
    Counts,
    Workload,
    select_hashes,
)

SUFFIXES = ".gz", ".csv", ".jsonl", ".json"


class WorkloadBuilder:
    """Collects the requests of a trace.

    Requests without output are dropped and counted in a note: they are requests that failed.
    """

    def __init__(self, source: TraceFile) -> None:
        self._source = source
        self._rows = self._failed_rows = 0
        self._times: list[Counts] = []
        self._prompts: list[Counts] = []
        self._outputs: list[Counts] = []
        self._hashes: list[BlockHashes] = []

    def add(
        self,
        times: Counts | None,
        prompts: Counts,
        outputs: Counts,
        hashes: BlockHashes | None = None,
    ) -> None:
        """Adds requests, [k] each; times in nanoseconds.

        Either all calls pass times or none does; likewise hashes.
        """
        rows = np.flatnonzero(outputs)
        self._rows += outputs.size
        self._failed_rows += outputs.size - rows.size
        self._prompts.append(prompts[rows])
        self._outputs.append(outputs[rows])
        if times is not None:
            self._times.append(times[rows])
        if hashes is not None:
            self._hashes.append(select_hashes(hashes, rows))

    def workload(self, notes: Sequence[str] = ()) -> Workload:
        """Returns the workload in order of time. Raises `FormatError` if it has no requests.

        Rows that are out of order are sorted, and a note counts them: logs of several machines are
        often merged without sorting. Rows with equal times keep the order of the file.
        """
        if self._rows == self._failed_rows:
            failed = f": none of {self._failed_rows} has output" if self._failed_rows else ""
            raise self._source.error(f"has no requests{failed}")
        prompts, outputs = np.concatenate(self._prompts), np.concatenate(self._outputs)
        hashes = _join_hashes(self._hashes) if self._hashes else None
        times = np.concatenate(self._times) if self._times else None
        all_notes = [*notes, *self._notes(times)]
        if times is not None and (times[1:] < times[:-1]).any():
            order = np.argsort(times, kind="stable")
            times, prompts, outputs = times[order], prompts[order], outputs[order]
            hashes = None if hashes is None else select_hashes(hashes, order)
        # Subtracted as integers: nanoseconds since 1970 have more digits than a float64.
        arrivals = None if times is None else (times - times[0]) / NANOSECONDS_PER_SECOND
        return Workload(
            self._name(), arrivals, prompts, outputs, hashes, BLOCK_TOKENS, tuple(all_notes)
        )

    def _notes(self, times: Counts | None) -> list[str]:
        notes = []
        if self._failed_rows:
            notes.append(f"{self._failed_rows} of {self._rows} requests had no output: dropped")
        unordered = 0 if times is None else int((times[1:] < times[:-1]).sum())
        if unordered:
            notes.append(
                f"{unordered} requests were earlier than the one before them: sorted by time"
            )
        return notes

    def _name(self) -> str:
        name = self._source.path.name
        for suffix in SUFFIXES:
            name = name.removesuffix(suffix)
        return name


def _join_hashes(parts: Sequence[BlockHashes]) -> BlockHashes:
    lengths = [np.diff(offsets) for _, offsets in parts]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return np.concatenate([ids for ids, _ in parts]), offsets
