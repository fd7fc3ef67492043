"""Which memory belongs to which registered tensor, so that no byte belongs to two.

This holds across all models of a rank, such as a target and its draft.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from equipoise.balancer.experts.weights.expert_weights import ExpertModel, TensorName
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import RegistrationError
from equipoise.hal.slots import Segment


@dataclass(frozen=True)
class MemorySpan:
    """Bytes [start, end) of a device's memory."""

    device: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    @staticmethod
    def of(tensor: Tensor) -> "MemorySpan":
        """From the first to the last byte of the tensor, gaps between its strides included."""
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (reach + 1) * tensor.element_size() if tensor.numel() else 0
        return MemorySpan(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + nbytes)

    @staticmethod
    def of_segment(segment: Segment) -> "MemorySpan":
        """The span that a copy of the segment touches: the whole storage of a private format."""
        if segment.format is SlotFormat.STRIDED:
            return MemorySpan.of(segment.data)
        storage = segment.data.untyped_storage()
        start = storage.data_ptr()
        return MemorySpan(str(segment.data.device), start, start + storage.nbytes())


@dataclass(frozen=True)
class OwnedSpan:
    """A span, and the tensor and slot that own it."""

    span: MemorySpan
    tensor_name: TensorName
    slot: int

    def describe_for(self, model: str) -> str:
        """Describes the owner, for an error about a tensor of `model`."""
        owner = "" if self.tensor_name.model == model else f"model {self.tensor_name.model!r}, "
        return f"{owner}{self.tensor_name}, slot {self.slot}"


class SpanIndex:
    """Owned spans that share no byte, sorted by address. Immutable."""

    def __init__(self, claims: Iterable[OwnedSpan] = ()) -> None:
        self._claims = sorted(claims, key=_start)
        self._starts = [_start(claim) for claim in self._claims]

    def __iter__(self) -> Iterator[OwnedSpan]:
        return iter(self._claims)

    def with_spans(self, more: Iterable[OwnedSpan]) -> "SpanIndex":
        """Returns an index with more spans. Raises `RegistrationError` if two share memory."""
        added = tuple(more)
        index = SpanIndex([*self._claims, *added])
        new = {id(claim) for claim in added}
        # The old spans do not overlap, so of two neighbours that do, one is new.
        for lower, upper in pairwise(index._claims):
            if lower.span.device == upper.span.device and upper.span.start < lower.span.end:
                late, early = (upper, lower) if id(upper) in new else (lower, upper)
                other = early.describe_for(late.tensor_name.model)
                raise late.tensor_name.error(f"slot {late.slot} shares memory with {other}")
        return index

    def overlapping(self, span: MemorySpan) -> list[OwnedSpan]:
        """Returns the spans that share a byte with `span`, by address."""
        first = max(0, bisect_right(self._starts, (span.device, span.start)) - 1)
        last = bisect_left(self._starts, (span.device, span.end))
        return [claim for claim in self._claims[first:last] if _overlap(claim.span, span)]

    def bytes_covered(self, span: MemorySpan) -> int:
        """Returns how many bytes of `span` are owned."""
        return sum(
            min(claim.span.end, span.end) - max(claim.span.start, span.start)
            for claim in self.overlapping(span)
        )


def _start(claim: OwnedSpan) -> tuple[str, int]:
    return claim.span.device, claim.span.start


def _overlap(first: MemorySpan, second: MemorySpan) -> bool:
    return first.device == second.device and first.start < second.end and second.start < first.end


@dataclass(frozen=True, eq=False)
class ModelSet:
    """Models that are balanced separately, each with its own loads and placements.

    Weights that two models share would be moved by two independent engines. If a draft reuses the
    target's experts, register its layers as repeats in the target's registry.

    Raises:
        RegistrationError: there is no model, two have the same name, or two share memory.
    """

    models: tuple[ExpertModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise RegistrationError("there is no model to balance")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise RegistrationError(f"two models are named {twice[0]!r}")
        claims = SpanIndex()
        for model in self.models:
            claims = claims.with_spans(_claims(model))

    def __iter__(self) -> Iterator[ExpertModel]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, name: str) -> ExpertModel:
        for model in self.models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in self.models)
        raise RegistrationError(f"no model is named {name!r}; there are: {names}")

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of all models on this rank."""
        return sum(model.nbytes for model in self.models)

    def describe(self) -> str:
        """Descriptions of all models."""
        return "\n".join(model.describe() for model in self.models)


def _claims(model: ExpertModel) -> Iterator[OwnedSpan]:
    for group in model.groups:
        for number, slot in enumerate(group.slots):
            place, local = divmod(number, model.slots_per_rank)
            layer = model.layer_numbers[group.layers[place]]
            for segment in slot:
                yield OwnedSpan(
                    MemorySpan.of_segment(segment),
                    TensorName(model.name, layer, segment.name),
                    local,
                )
