"""Expert statistics: rows of every expert of every layer, by window."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.planning.inputs import MAX_LAYER_ROWS
from equipoise.balancer.formats.iterations import IterationRange
from equipoise.balancer.formats.numbers import MAX_LAYERS, format_index
from equipoise.hal.arguments import check_type, short_text, whole_number
from equipoise.hal.errors import PlacementError

Counts = npt.NDArray[np.int64]
"""(windows, layers, experts): rows, one per (token, k)."""
COUNT_AXES = "window", "layer", "expert"
RANK_AXES = "rank", *COUNT_AXES


class LayerNumbering(StrEnum):
    """Which layers a file numbers."""

    MODEL = "model"
    """The model's numbers; only layers with experts are listed."""
    EVERY_LAYER = "every"
    """The model's numbers; every layer is listed, dense ones too."""
    UNKNOWN = "unknown"
    """0, 1, ... because the file has no numbers; perhaps it lists layers with experts only."""


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """The recorded load of a run. Raises `PlacementError` that names layer and value.

    Attributes:
        counts: int64 (windows, layers, experts), none negative.
        layers: the model's number of each layer, ascending; 0, 1, ... by default.
        by_rank: int64 (ranks, windows, layers, experts), whose sum over ranks is `counts`; the
            rank is the one that the tokens came from. None if only the sum is known.
        first_iteration: number of the first window if windows are iterations, else None.
        top_k: experts per token; None if unknown.
        empty_layers: numbers of layers that the file has and `counts` leaves out, because no window
            has a row of them: layers without experts.
        source: format and path, for messages.
        numbering: which layers `layers` numbers.
    """

    counts: Counts
    layers: tuple[int, ...] = ()
    by_rank: Counts | None = None
    first_iteration: int | None = None
    top_k: int | None = None
    empty_layers: tuple[int, ...] = ()
    source: str = ""
    numbering: LayerNumbering = LayerNumbering.MODEL

    def __post_init__(self) -> None:
        check_type("counts", self.counts, np.ndarray, PlacementError)
        if self.counts.ndim != len(COUNT_AXES) or 0 in self.counts.shape:
            raise PlacementError(
                f"counts are (windows, layers, experts), none of them 0, not {self.counts.shape}"
            )
        object.__setattr__(self, "layers", layer_numbers(self.layers, self.counts.shape[1]))
        _check_counts(self.counts, COUNT_AXES, self.layers)
        for name in ("first_iteration", "top_k"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, value, PlacementError))
        if self.first_iteration is not None and not 0 <= self.first_iteration <= MAX_LAYER_ROWS:
            raise PlacementError(f"iterations begin at {self.first_iteration}")
        if self.top_k is not None and not 1 <= self.top_k <= self.experts:
            raise PlacementError(f"{self.top_k} experts per token, of {self.experts} experts")
        if self.by_rank is not None:
            self._check_ranks(self.by_rank)

    @property
    def windows(self) -> int:
        """Number of windows."""
        return int(self.counts.shape[0])

    @property
    def experts(self) -> int:
        """Number of experts per layer."""
        return int(self.counts.shape[2])

    @property
    def recorders(self) -> int | None:
        """Number of ranks that recorded; None if only the sum is known."""
        return None if self.by_rank is None else len(self.by_rank)

    @property
    def iteration_range(self) -> IterationRange:
        """The iterations of the windows; counted from 0 if they have no numbers."""
        first = self.first_iteration or 0
        return IterationRange(first, first + self.windows)

    def select_iterations(self, iterations: IterationRange) -> "ExpertStatistics":
        """Returns only these iterations. Raises `PlacementError` if some were not recorded."""
        span = self.iteration_range
        if iterations.start < span.start or iterations.stop > span.stop:
            numbered = (
                "iterations" if self.first_iteration is not None else "windows, counted from 0,"
            )
            raise PlacementError(f"has {numbered} {span}, and {iterations} is not within them")
        rows = slice(iterations.start - span.start, iterations.stop - span.start)
        return replace(
            self,
            counts=self.counts[rows],
            by_rank=None if self.by_rank is None else self.by_rank[:, rows],
            first_iteration=None if self.first_iteration is None else iterations.start,
        )

    def without_empty_layers(self) -> "ExpertStatistics":
        """Returns only the layers that have rows; all layers if none has.

        Systems that list every layer of the model have zeros for dense ones. Engines that number
        only layers with experts would otherwise apply the plan of another layer.
        """
        has_rows = self.counts.any(axis=(0, 2))
        if has_rows.all() or not has_rows.any():
            return self
        positions = np.flatnonzero(has_rows)
        empty = tuple(self.layers[at] for at in np.flatnonzero(~has_rows))
        return replace(
            self,
            counts=np.ascontiguousarray(self.counts[:, positions]),
            layers=tuple(self.layers[at] for at in positions),
            by_rank=None if self.by_rank is None else self.by_rank[:, :, positions],
            empty_layers=tuple(sorted((*self.empty_layers, *empty))),
            numbering=LayerNumbering.MODEL,  # dense layers are listed, so places are numbers
        )

    def same(self, other: "ExpertStatistics") -> bool:
        """Returns whether all fields but `source` and `empty_layers` are equal."""
        return (
            np.array_equal(self.counts, other.counts)
            and (self.layers, self.numbering, self.first_iteration, self.top_k)
            == (other.layers, other.numbering, other.first_iteration, other.top_k)
            and (self.by_rank is None) == (other.by_rank is None)
            and (self.by_rank is None or np.array_equal(self.by_rank, np.asarray(other.by_rank)))
        )

    def _check_ranks(self, by_rank: Counts) -> None:
        check_type("by_rank", by_rank, np.ndarray, PlacementError)
        if by_rank.ndim != len(RANK_AXES) or by_rank.shape[1:] != self.counts.shape:
            raise PlacementError(
                f"counts by rank are {by_rank.shape}, expected (ranks, *{self.counts.shape})"
            )
        _check_counts(by_rank, RANK_AXES, self.layers)
        wrong = np.argwhere(by_rank.sum(axis=0) != self.counts)
        if wrong.size:
            where = tuple(wrong[0].tolist())
            raise PlacementError(
                f"{format_index(COUNT_AXES, where, self.layers)}: "
                f"count {self.counts[where]} is not the sum of the ranks' counts, "
                f"{by_rank.sum(axis=0)[where]}"
            )


def layer_numbers(layers: Iterable[int], expected: int) -> tuple[int, ...]:
    """Returns `layers`, or 0, 1, ... if there are none. Raises as `check_layers`."""
    try:
        numbers = tuple(layers)
    except TypeError:
        got = short_text(layers)
        raise PlacementError(f"layers must be a sequence of numbers, got {got}") from None
    return check_layers(numbers or tuple(range(expected)), expected)


def check_layers(layers: tuple[int, ...], expected: int) -> tuple[int, ...]:
    """Returns `layers` as `int`.

    Raises `PlacementError` unless they are `expected` ascending layer numbers.
    """
    if len(layers) != expected:
        raise PlacementError(f"{len(layers)} numbers of layers for {expected} layers")
    layers = tuple(whole_number("layers", number, PlacementError) for number in layers)
    for before, layer in zip((-1, *layers), layers, strict=False):
        if not 0 <= layer < MAX_LAYERS:
            raise PlacementError(f"layer {layer} is outside 0 to {MAX_LAYERS - 1}")
        if layer <= before:
            raise PlacementError(f"layer {layer} comes after layer {before}: they must ascend")
    return layers


def _check_counts(counts: Counts, axes: tuple[str, ...], layers: tuple[int, ...]) -> None:
    if counts.dtype != np.int64:
        raise PlacementError(f"counts are int64, not {counts.dtype}")
    for wrong, why in (
        (counts < 0, "negative"),
        (counts > MAX_LAYER_ROWS, f"more than {MAX_LAYER_ROWS}"),
    ):
        if wrong.any():
            where = tuple(np.argwhere(wrong)[0].tolist())
            raise PlacementError(
                f"{format_index(axes, where, layers)}: count {counts[where]} is {why}"
            )
