"""Records, on one rank of any engine, how many rows its tokens asked of every expert.

    recorder = Recorder(folder, rank=rank, ranks=ranks, iterations=Iterations(100, 200),
                        layers=layers, experts=256, top_k=8)
    recorder.record(iteration, counts)      # each step: (layers, experts) of this rank's tokens
    ended = recorder.close()

The files are those of `statistics_folder`. What is counted are logical experts, before any copy is
chosen: the counts are the same whatever placement is installed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats import trtllm_statistics as folders
from equipoise.balancer.formats.files import MAX_FILE_BYTES, list_folder, write_bytes
from equipoise.balancer.formats.iterations import Iterations
from equipoise.balancer.formats.statistics import Counts, check_layers
from equipoise.hal.errors import FileWriteFailed, FormatError, PlacementError

RowCounts = npt.NDArray[np.integer]
"""(layers, experts): rows of one iteration, one per (token, k)."""


@dataclass(frozen=True)
class Waiting:
    """The range has not begun."""


@dataclass(frozen=True)
class Recording:
    """Within the range.

    Attributes:
        counts: int64 (iterations, layers, experts) of the whole range.
        last: the iteration fed last.
    """

    counts: Counts
    last: int


@dataclass(frozen=True)
class Complete:
    """The files have every iteration of the range."""

    iterations: Iterations


@dataclass(frozen=True)
class Partial:
    """Closed within the range: the files have the iterations up to there."""

    iterations: Iterations


@dataclass(frozen=True)
class Empty:
    """Nothing was fed within the range, and nothing was written."""


State = Waiting | Recording | Complete | Partial | Empty


class Recorder:
    """One rank's. Not for several threads.

    The file is written when an iteration at or behind the end of the range is fed, or at `close`;
    whole or not at all. Rank 0 writes `meta_info.json` too. Memory is that of the range, taken when
    it begins: iterations * layers * experts * 8 bytes.

    Args:
        folder: made where there is none; all ranks of one machine share it.
        rank: this one's.
        ranks: how many record.
        iterations: to be recorded.
        layers: the model's numbers of the layers that are counted, ascending.
        experts: logical ones, of a layer.
        top_k: experts of a token; None where unknown.

    Raises:
        FormatError: the folder has files of another recording, the range takes more memory than
            a file that is read may have, or the system has no room for the folder.
        PlacementError: layers, experts or ranks cannot be.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        ranks: int,
        iterations: Iterations,
        layers: Sequence[int],
        experts: int,
        top_k: int | None = None,
    ) -> None:
        if not 0 <= rank < ranks or experts < 1:
            raise PlacementError(f"rank {rank} of {ranks} cannot record {experts} experts")
        check_layers(tuple(layers), max(len(layers), 1))
        self._folder, self._rank, self._top_k = folder, rank, top_k
        self._iterations = iterations
        self._layers = tuple(layers)
        self._shape = (len(self._layers), experts)
        self._check_size()
        _make_folder(folder)
        _check_unused(folder, rank, ranks)
        self._state: State = Waiting()

    @property
    def state(self) -> State:
        """How far it is."""
        return self._state

    def record(self, iteration: int, counts: RowCounts) -> None:
        """Add what this rank's tokens asked for; call on every step.

        An iteration may be fed in several parts, which are added; one that is left out counts as
        one without tokens. Iterations outside the range are not kept.

        Args:
            iteration: the engine's step, never less than before.
            counts: (layers, experts), integers, none negative; read at once and not kept.

        Raises:
            PlacementError: counts of another shape or kind, or an iteration before the last.
            FormatError: the range ended here, and the file could not be written.
        """
        match self._state:
            case Waiting() if iteration in self._iterations:
                grid = np.zeros((len(self._iterations), *self._shape), dtype=np.int64)
                self._add(Recording(grid, iteration), iteration, counts)
            case Waiting() if iteration >= self._iterations.stop:
                # Begun too late. A step path is no place to raise for it: `close` says so.
                self._state = Empty()
            case Recording() as now if iteration >= self._iterations.stop:
                self._write(now, self._iterations)
                self._state = Complete(self._iterations)
            case Recording() as now:
                self._add(now, iteration, counts)
            case _:
                pass

    def close(self) -> Complete | Partial | Empty:
        """Write what there is; a second call does nothing. Raises `FormatError`."""
        match self._state:
            case Waiting():
                self._state = Empty()
            case Recording(_, last) as now:
                found = Iterations(self._iterations.start, last + 1)
                self._write(now, found)
                whole = found == self._iterations
                self._state = Complete(found) if whole else Partial(found)
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

    def _write(self, now: Recording, found: Iterations) -> None:
        counts = now.counts[: len(found)]
        data = folders.encode_rank(counts, self._layers, found.start)
        write_bytes(self._folder / folders.rank_file(self._rank), data)
        if self._rank == 0:
            meta = folders.encode_meta(self._shape[1], self._top_k)
            write_bytes(self._folder / folders.META_FILE, meta)

    def _check_size(self) -> None:
        needed = len(self._iterations) * self._shape[0] * self._shape[1] * 8
        if needed > MAX_FILE_BYTES:
            raise FormatError(
                str(self._folder),
                f"iterations {self._iterations} take {needed} bytes a rank, "
                f"at most {MAX_FILE_BYTES}",
            )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be made: {error.strerror or error}"
        raise FileWriteFailed(str(folder), what) from None


def _check_unused(folder: Path, rank: int, ranks: int) -> None:
    """Files of this rank, or of ranks that are not there, would mix two recordings."""
    for name in list_folder(folder):
        match = folders.RANK_FILE.fullmatch(name)
        mine = match is not None and (int(match[1]) == rank or int(match[1]) >= ranks)
        if mine or (rank == 0 and name == folders.META_FILE):
            raise FormatError(str(folder), f"has {name} already: it was recorded into before")
