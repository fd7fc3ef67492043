"""Opens a routing trace: checks every part once, and finds what only the whole trace tells."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.routing_trace import (
    NO_EXPERT,
    Ids,
    RoutedTokens,
    RoutingTrace,
    TraceUnit,
    check_distinct,
    convert_ids,
)
from equipoise.hal.errors import FormatError, PlacementError


class TraceShapeMissing(FormatError):
    """Neither the trace nor the caller says how many layers and experts per token there are."""


@dataclass(frozen=True)
class TraceShape:
    """What a trace may leave unsaid, where the caller knows it; None where not.

    Attributes:
        layers: layers of the model, those without experts too.
        top_k: experts per token.
        experts: experts per layer.
    """

    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None


@dataclass(frozen=True, eq=False)
class RawPart:
    """A part as it stands in a file.

    Attributes:
        path: the file.
        where: the place in the file, for messages; empty if the file has one part.
        ids: any integers (tokens, layers, top_k).
        step, rank, request, prompt_tokens: as of `RoutedTokens`.
    """

    path: Path
    where: str
    ids: npt.NDArray[np.generic]
    step: int | None = None
    rank: int | None = None
    request: str | None = None
    prompt_tokens: int | None = None

    def error(self, what: str) -> FormatError:
        """Returns a `FormatError` that names file and place."""
        return FormatError(str(self.path), f"{self.where}: {what}" if self.where else what)

    @contextmanager
    def naming_file(self) -> Iterator[None]:
        """Adds file and place to a `PlacementError`."""
        try:
            yield
        except PlacementError as error:
            raise self.error(str(error)) from None


def open_trace(
    source: str,
    unit: TraceUnit,
    read: Callable[[], Iterator[RawPart]],
    experts: int | None,
    layers: tuple[int, ...] = (),
) -> RoutingTrace:
    """Reads every part once, and returns the trace. Raises `FormatError`.

    Layers that no token was routed in are left out, and places that no token uses: engines have
    rows for layers without experts, and SGLang's recorder pads to 8 places.

    Args:
        source: format and path.
        unit: what a part is.
        read: reads the parts from the first; called again for each pass over the trace.
        experts: experts per layer; None if unknown.
        layers: the numbers of the layers of `ids`; 0, 1, ... if empty.
    """
    parts = _ConvertedParts(read, experts, layers)
    used: npt.NDArray[np.bool_] | None = None
    largest = tokens = part_count = 0
    for raw, ids in parts:
        with raw.naming_file():
            check_distinct(ids, layers)
        chosen = (ids != NO_EXPERT).any(axis=0)
        if ids.shape[2] == 1:
            # One zero for each token is what a layer without experts looks like.
            chosen &= (ids > 0).any(axis=0)
        used = chosen if used is None else used | chosen
        largest = max(largest, int(ids.max(initial=0)))
        tokens += len(ids)
        part_count += 1
    path = source.partition(": ")[2]
    if used is None or not tokens:
        raise FormatError(path, "has no tokens")
    if not used.any():
        raise FormatError(path, "has no token with an expert")
    numbers = layers or tuple(range(len(used)))
    kept = np.flatnonzero(used.any(axis=1))
    top_k = int(np.flatnonzero(used.any(axis=0))[-1]) + 1

    def open_parts() -> Iterator[RoutedTokens]:
        for raw, ids in parts:
            selected = np.ascontiguousarray(ids[:, kept, :top_k])
            yield RoutedTokens(selected, raw.step, raw.rank, raw.request, raw.prompt_tokens)

    return RoutingTrace(
        unit,
        tuple(numbers[at] for at in kept),
        largest + 1 if experts is None else experts,
        experts is not None,
        top_k,
        tokens,
        part_count,
        source,
        open_parts,
    )


@dataclass(frozen=True, eq=False)
class _ConvertedParts:
    """The parts with their ids as int32; every iteration reads them anew.

    What changed in the meantime is noticed where it could do harm: shapes and ranges.
    """

    read: Callable[[], Iterator[RawPart]]
    experts: int | None
    layers: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[RawPart, Ids]]:
        first: tuple[int, ...] = ()
        for raw in self.read():
            with raw.naming_file():
                ids = convert_ids(raw.ids, self.experts, self.layers)
            shape = ids.shape[1:]
            if self.layers and shape[0] != len(self.layers):
                raise raw.error(f"has {shape[0]} layers, expected {len(self.layers)}")
            first = first or shape
            if shape != first:
                raise raw.error(
                    f"has {shape[0]} layers and {shape[1]} experts per token, "
                    f"the first part {first[0]} and {first[1]}"
                )
            if raw.prompt_tokens is not None and not 0 <= raw.prompt_tokens <= len(ids):
                raise raw.error(f"has {len(ids)} tokens, {raw.prompt_tokens} of them of the prompt")
            yield raw, ids
