"""Which memory belongs to which registered tensor: no byte to two of them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from equipoise.balancer.experts.slot_tensors import Place
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.slots import Segment


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a device's memory."""

    device: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.end - self.start

    @staticmethod
    def of(tensor: Tensor) -> "Span":
        """From the first to the last byte that the tensor reaches, gaps of its strides included."""
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (reach + 1) * tensor.element_size() if tensor.numel() else 0
        return Span(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + nbytes)

    @staticmethod
    def of_segment(segment: Segment) -> "Span":
        """What a copy of the segment touches: all the storage of a private format."""
        if segment.format is SlotFormat.STRIDED:
            return Span.of(segment.data)
        storage = segment.data.untyped_storage()
        start = storage.data_ptr()
        return Span(str(segment.data.device), start, start + storage.nbytes())


@dataclass(frozen=True)
class Claim:
    """A span, and the slot of the tensor that moves it."""

    span: Span
    place: Place
    slot: int

    def told_to(self, model: str) -> str:
        """In words, for an error about a tensor of `model`."""
        whose = "" if self.place.model == model else f"model {self.place.model!r}, "
        return f"{whose}{self.place}, slot {self.slot}"


class Claims:
    """Claims that share no byte, by address. Never changes."""

    def __init__(self, claims: Iterable[Claim] = ()) -> None:
        self._claims = sorted(claims, key=_start)
        self._starts = [_start(claim) for claim in self._claims]

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims)

    def plus(self, more: Iterable[Claim]) -> "Claims":
        """With more of them. Raises `RegistrationError` where two would share memory."""
        added = tuple(more)
        made = Claims([*self._claims, *added])
        new = {id(claim) for claim in added}
        # None of the old ones overlap, so of two that do, with the earlier start, one is new.
        for one, two in pairwise(made._claims):
            if one.span.device == two.span.device and two.span.start < one.span.end:
                late, early = (two, one) if id(two) in new else (one, two)
                other = early.told_to(late.place.model)
                raise late.place.refusal(f"slot {late.slot} shares memory with {other}")
        return made

    def touching(self, span: Span) -> list[Claim]:
        """Those that share a byte with `span`, by address."""
        first = max(0, bisect_right(self._starts, (span.device, span.start)) - 1)
        last = bisect_left(self._starts, (span.device, span.end))
        return [claim for claim in self._claims[first:last] if _meet(claim.span, span)]

    def covered(self, span: Span) -> int:
        """How many of its bytes are claimed."""
        return sum(
            min(claim.span.end, span.end) - max(claim.span.start, span.start)
            for claim in self.touching(span)
        )


def _start(claim: Claim) -> tuple[str, int]:
    return claim.span.device, claim.span.start


def _meet(one: Span, two: Span) -> bool:
    return one.device == two.device and one.start < two.end and two.start < one.end
