"""Routing traces: the experts of every token, or rows of every expert of every step.

Both are streamed: a trace of a day is gigabytes, and never in memory as a whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.numbers import MAX_LAYERS, format_index
from equipoise.hal.errors import PlacementError

Ids = npt.NDArray[np.int32]
ID_AXES = "token", "layer", "place"
NO_EXPERT = -1
"""Id where a token has no expert."""
MAX_EXPERTS = 1 << 16
"""Upper limit of experts in a layer, far above any model: counts take memory for each."""


class TraceUnit(StrEnum):
    """What a part of a routing trace is."""

    REQUEST = "request"
    """All tokens of one request; which of them ran in one forward pass is not known."""
    STEP = "step"
    """The tokens of one forward pass on one rank."""


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """The experts of the tokens of one request, or of one forward pass on one rank.

    Attributes:
        ids: int32 (tokens, layers, top_k); -1 where a token has no expert.
        step: number of the forward pass; None if the file does not tell.
        rank: the rank that routed the tokens; None if the file does not tell.
        request: name of the request, where the parts are requests.
        prompt_tokens: how many of the tokens, the first ones, are of the prompt; None if unknown.
    """

    ids: Ids
    step: int | None = None
    rank: int | None = None
    request: str | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The experts that a router chose for every token.

    Attributes:
        unit: what a part is.
        layers: the model's numbers of the layers with experts where the file tells, else 0, 1, ...
        experts: experts per layer; the largest id + 1 unless `experts_known`.
        experts_known: whether the file, or the caller, gives the number of experts.
        top_k: experts per token.
        tokens: tokens of all parts.
        part_count: number of parts.
        source: format and path, for messages.
        open_parts: begins to read the parts.
    """

    unit: TraceUnit
    layers: tuple[int, ...]
    experts: int
    experts_known: bool
    top_k: int
    tokens: int
    part_count: int
    source: str
    open_parts: Callable[[], Iterator[RoutedTokens]] = field(repr=False)

    def parts(self) -> Iterator[RoutedTokens]:
        """Reads the parts in order, from the first; one at a time is in memory.

        Raises `FormatError` if the files were changed since the trace was opened.
        """
        return self.open_parts()


@dataclass(frozen=True, eq=False)
class CountsTrace:
    """Rows of every expert, step by step.

    Attributes:
        layers: the model's numbers of the layers where the file tells, else 0, 1, ...
        experts: experts per layer.
        experts_per_token: None if the file does not tell.
        steps: number of steps.
        source: format and path, for messages.
        open_blocks: begins to read the counts, so many steps at once.
        recorders: how many ranks recorded them; None if the file does not tell.
        empty_layers: numbers of layers that the file has and `layers` leaves out, because no step
            has rows in them.
    """

    layers: tuple[int, ...]
    experts: int
    experts_per_token: int | None
    steps: int
    source: str
    open_blocks: Callable[[int], Iterator[Ids]] = field(repr=False)
    recorders: int | None = None
    empty_layers: tuple[int, ...] = ()

    def blocks(self, most_bytes: int) -> Iterator[Ids]:
        """Reads int32 (steps, layers, experts), block by block, from the first step.

        Args:
            most_bytes: upper limit of a block; one of a single step may be larger.

        Raises:
            FormatError: a count is negative or above 2^31 - 1; names step, layer and expert.
        """
        return self.open_blocks(max(1, most_bytes // (4 * len(self.layers) * self.experts)))


def convert_ids(
    array: npt.NDArray[Any], experts: int | None = None, layers: tuple[int, ...] = ()
) -> Ids:
    """Returns expert ids (tokens, layers, top_k) of any integer type as int32.

    A token whose experts in a layer are all 0, with two or more per token, was not routed there:
    engines leave zeros for layers without experts. It gets -1.

    Args:
        array: the ids as they were read.
        experts: number of experts, if known.
        layers: the numbers of the layers, for messages.

    Raises:
        PlacementError: names the place of an id that is below -1 or too large.
    """
    if array.ndim != len(ID_AXES):
        axes = ", ".join(ID_AXES)
        raise PlacementError(f"expert ids are of shape {array.shape}, expected axes {axes}")
    if array.dtype.kind not in "iu":
        raise PlacementError(f"expert ids are {array.dtype}, not integers")
    if not 1 <= array.shape[1] <= MAX_LAYERS or not 1 <= array.shape[2] <= MAX_EXPERTS:
        raise PlacementError(f"expert ids are of shape {array.shape}: no layers or experts")
    limit = MAX_EXPERTS if experts is None else experts
    # Compared with the extremes first: a mask of every id is needed only for the message.
    if array.size and (int(array.max()) >= limit or int(array.min()) < NO_EXPERT):
        at = tuple(np.argwhere((array >= limit) | (array < NO_EXPERT))[0].tolist())
        known = "" if experts is None else f" of {experts}"
        raise PlacementError(f"{format_index(ID_AXES, at, layers)}: expert {array[at]}{known}")
    ids = array.astype(np.int32)
    if ids.shape[2] > 1:
        ids[(ids <= 0).all(axis=2) & (ids[:, :, 1] == 0)] = NO_EXPERT
    return ids


def check_distinct(ids: Ids, layers: tuple[int, ...]) -> None:
    """Raises `PlacementError` if a token has an expert twice in a layer; names the place."""
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != NO_EXPERT)
    if twice.any():
        token, layer, place = np.argwhere(twice)[0].tolist()
        where = format_index(ID_AXES[:2], (token, layer), layers)
        raise PlacementError(f"{where}: expert {ordered[token, layer, place]} is chosen twice")
