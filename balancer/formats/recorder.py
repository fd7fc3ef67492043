"""Records the rows of every expert on one rank of any engine, in TensorRT-LLM's folder format.

    recorder = StatisticsRecorder(
        folder, rank=rank, ranks=ranks, layers=layers, experts=256, top_k=8,
        iterations=IterationRange(100, 200),
    )
    recorder.record(iteration, counts)  # each step: (layers, experts) of this rank's tokens
    result = recorder.close()

The files are those of `trtllm_statistics`. Logical experts are counted, before a replica is chosen:
the counts are the same for any placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats import trtllm_statistics as folders
from equipoise.balancer.formats.files import MAX_FILE_BYTES, list_folder, write_bytes
from equipoise.balancer.formats.iterations import IterationRange
from equipoise.balancer.formats.statistics import Counts, check_layers
from equipoise.hal.errors import FileWriteFailed, FormatError, PlacementError

RowCounts = npt.NDArray[np.integer]
"""(layers, experts): rows of one iteration, one per (token, k)."""


@dataclass(frozen=True)
class Waiting:
    """The range has not begun yet."""


@dataclass(frozen=True)
class Recording:
    """An iteration of the range was recorded.

    Attributes:
        counts: int64 (iterations, layers, experts) of the whole range.
        last: the latest recorded iteration.
    """

    counts: Counts
    last: int


@dataclass(frozen=True)
class Complete:
    """The file has every iteration of the range."""

    iterations: IterationRange


@dataclass(frozen=True)
class Partial:
    """Closed within the range: the file has the iterations up to the latest recorded one."""

    iterations: IterationRange


@dataclass(frozen=True)
class Empty:
    """Nothing was recorded within the range, and nothing was written."""


State = Waiting | Recording | Complete | Partial | Empty


class StatisticsRecorder:
    """Records the statistics of one rank; not thread-safe.

    The file is written, whole or not at all, when an iteration after the range is recorded or at
    `close`. Rank 0 also writes `meta_info.json`. When the range begins, iterations * layers *
    experts * 8 bytes of host memory are allocated.

    Args:
        folder: created if missing; shared by all ranks of a machine.
        rank: this rank.
        ranks: number of ranks that record.
        iterations: the iterations to record.
        layers: the model's numbers of the counted layers, ascending.
        experts: logical experts per layer.
        top_k: experts per token; None if unknown.

    Raises:
        FormatError: the folder has files of another recording, the range takes more bytes than a
            file may have, or the folder cannot be created.
        PlacementError: layers, experts or ranks are invalid.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        ranks: int,
        iterations: IterationRange,
        layers: Sequence[int],
        experts: int,
        top_k: int | None = None,
    ) -> None:
        if not 0 <= rank < ranks or experts < 1:
            raise PlacementError(f"rank {rank} of {ranks} cannot record {experts} experts")
        check_layers(tuple(layers), max(len(layers), 1))
        self._folder, self._rank, self._top_k = Path(folder), rank, top_k
        self._iterations = iterations
        self._layers = tuple(layers)
        self._shape = (len(self._layers), experts)
        self._check_size()
        _make_folder(self._folder)
        _check_unused(self._folder, rank, ranks)
        self._state: State = Waiting()

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    def record(self, iteration: int, counts: RowCounts) -> None:
        """Adds the rows of this rank's tokens; called on every step.

        Several calls for one iteration add up; an iteration without a call has no rows. Iterations
        outside the range are ignored.

        Args:
            iteration: the engine's step, never less than in the call before.
            counts: (layers, experts), integers, none negative; copied.

        Raises:
            PlacementError: counts have another shape or dtype, or the iteration is lower than
                before.
            FormatError: the range ended here, and the file could not be written.
        """
        match self._state:
            case Waiting() if iteration in self._iterations:
                grid = np.zeros((len(self._iterations), *self._shape), dtype=np.int64)
                self._add(Recording(grid, iteration), iteration, counts)
            case Waiting() if iteration >= self._iterations.stop:
                # Started too late. `close` reports it: an error here would end the engine's step.
                self._state = Empty()
            case Recording() as now if iteration >= self._iterations.stop:
                self._write(now, self._iterations)
                self._state = Complete(self._iterations)
            case Recording() as now:
                self._add(now, iteration, counts)
            case _:
                pass

    def close(self) -> Complete | Partial | Empty:
        """Writes what was recorded; a second call does nothing. Raises `FormatError`."""
        match self._state:
            case Waiting():
                self._state = Empty()
            case Recording(_, last) as recording:
                recorded_range = IterationRange(self._iterations.start, last + 1)
                self._write(recording, recorded_range)
                complete = recorded_range == self._iterations
                self._state = Complete(recorded_range) if complete else Partial(recorded_range)
            case _:
                pass
        assert isinstance(self._state, Complete | Partial | Empty)
        return self._state

    def _add(self, now: Recording, iteration: int, counts: RowCounts) -> None:
        if iteration < now.last:
            raise PlacementError(f"iteration {iteration} comes after iteration {now.last}")
        if counts.shape != self._shape or counts.dtype.kind not in "iu":
            raise PlacementError(
                f"iteration {iteration}: counts are {counts.dtype} {counts.shape}, "
                f"expected integers {self._shape}"
            )
        if counts.size and counts.min() < 0:
            raise PlacementError(f"iteration {iteration}: count {counts.min()} is negative")
        now.counts[iteration - self._iterations.start] += counts.astype(np.int64)
        self._state = Recording(now.counts, iteration)

    def _write(self, recording: Recording, recorded_range: IterationRange) -> None:
        counts = recording.counts[: len(recorded_range)]
        data = folders.encode_rank(counts, self._layers, recorded_range.start)
        write_bytes(self._folder / folders.rank_file(self._rank), data)
        if self._rank == 0:
            meta = folders.encode_meta(self._shape[1], self._top_k)
            write_bytes(self._folder / folders.META_FILE, meta)

    def _check_size(self) -> None:
        # Checked before recording: a larger file could be written, but not read again.
        nbytes = len(self._iterations) * self._shape[0] * self._shape[1] * 8
        if nbytes > MAX_FILE_BYTES:
            raise FormatError(
                str(self._folder),
                f"iterations {self._iterations} take {nbytes} bytes a rank, "
                f"at most {MAX_FILE_BYTES}",
            )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made: {error.strerror or error}"
        raise FileWriteFailed(str(folder), problem) from None


def _check_unused(folder: Path, rank: int, ranks: int) -> None:
    """Raises `FormatError` if files of this or absent ranks would mix two recordings."""
    for name in list_folder(folder):
        match = folders.RANK_FILE.fullmatch(name)
        in_use = match is not None and (int(match[1]) == rank or int(match[1]) >= ranks)
        if in_use or (rank == 0 and name == folders.META_FILE):
            raise FormatError(str(folder), f"has {name} already: it was recorded into before")
