"""Mutants of family *shapes*."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with
from torch import Tensor

from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.backend import ALL_COMMUNICATOR_CAPABILITIES, VirtualBackend
from equipoise.backends.virtual.communicator import NOTHING, VirtualCommunicator
from equipoise.backends.virtual.fabric import VirtualFabric
from equipoise.backends.virtual.transfer import Collective, Contribution
from equipoise.backends.virtual.work import VirtualWork
from equipoise.hal.capabilities import Operation
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.errors import Unsupported

WORD = 4
"""Bytes that mutants move at a time."""


class OnlyBytesKnowTheirSource(VirtualCommunicator):
    """Has two broadcasts: that of bytes comes from whoever is named, the other from rank 0."""

    def broadcast(self, tensor: Tensor, source: int) -> VirtualWork:
        return super().broadcast(tensor, source if tensor.dtype == torch.uint8 else 0)


class SmallFloatsAreHalved(VirtualCommunicator):
    """Has a table of element sizes that ends before the eight-bit floating types."""

    def all_to_all(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and tensor.is_contiguous():
            tensor = tensor.clone()
            tensor.view(-1)[tensor.numel() // 2 :] = 0
        return super().all_to_all(out, tensor)


class EmptyIsNotSent(VirtualCommunicator):
    """A send of nothing ends at once, and never reaches the receive that waits for it."""

    def isend(self, tensor: Tensor, destination: int) -> VirtualWork:
        if tensor.numel():
            return super().isend(tensor, destination)
        return self._messages("isend of nothing", sends=[], receives=[])


class ScalarsAreEmpty(VirtualCommunicator):
    """A tensor without dimensions counts as one without elements."""

    def _collective(self, make: partial[Contribution], *tensors: Tensor) -> VirtualWork:
        if any(tensor.ndim == 0 for tensor in tensors):
            make = partial(Contribution, make.args[0], NOTHING, NOTHING, **make.keywords)
        return super()._collective(make, *tensors)


class BytesAreAddedInPairs(Collective):
    """Adds bytes two at a time; a single one is left as the first rank gave it."""

    def total(self, shares: Sequence[Contribution]) -> Bytes:
        if shares[0].dtype == torch.uint8 and len(shares[0].out) == 1:
            return shares[0].snapshot
        return super().total(shares)


class ResultGoesToACopy(VirtualCommunicator):
    """Makes operands contiguous first, also the one that is written."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        return super().all_gather(out.contiguous(), tensor.contiguous())


class RefusesTooLate(VirtualCommunicator):
    """Looks at the layout when the operation is on its way already."""

    def all_to_all(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        work = super().all_to_all(out, tensor.contiguous())
        if not tensor.is_contiguous():
            raise Unsupported("a contiguous tensor is needed")
        return work


class EvenBlocks(Collective):
    """Looks for the block of a rank where it would be if all blocks were equally large."""

    def block(self, share: Contribution, rank: int) -> Bytes:
        start = rank * len(share.source) // len(share.send_bytes)
        return share.snapshot[start : start + share.send_bytes[rank]]


class IdleRankStaysAway(VirtualCommunicator):
    """A rank with no rows to give or take does not come to the exchange."""

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> VirtualWork:
        if sum(receives) + sum(sends) == 0:
            return self._messages("all_to_all of nothing", sends=[], receives=[])
        return super().all_to_all_uneven(out, tensor, receives, sends)


def around(tensor: Tensor) -> tuple[Tensor, int]:
    """The whole storage behind a tensor, uint8 [n], and the tensor's first byte in it."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return storage, int(tensor.storage_offset()) * tensor.element_size()


class WholeWordsAreRead(VirtualCommunicator):
    """Sends from the address rounded down to a word, as a copy engine does."""

    def isend(self, tensor: Tensor, destination: int) -> VirtualWork:
        storage, start = around(tensor)
        if start % WORD:
            down = start - start % WORD
            tensor = storage[down : down + tensor.numel() * tensor.element_size()]
        return super().isend(tensor, destination)


class WholeWordsAreWritten(VirtualCommunicator):
    """A receive fills its last word beyond the end of the buffer."""

    def irecv(self, tensor: Tensor, source: int) -> VirtualWork:
        work = super().irecv(tensor, source)
        storage, start = around(tensor)
        end = start + tensor.numel() * tensor.element_size()
        storage[end : end + -end % WORD].zero_()
        return work


class AloneNothingIsCopied(VirtualCommunicator):
    """A group of one has nothing to do, not even to copy its input to its output."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        if self.size == 1:
            return self._messages("all_gather alone", sends=[], receives=[])
        return super().all_gather(out, tensor)


class MembersAreSorted(VirtualFabric):
    """The place in the list of members is not the rank."""

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> VirtualCommunicator:
        return super().open(purpose, None if ranks is None else sorted(ranks))


class PowersOfTwo(Collective):
    """Halves the group until one is left: of five ranks, the fifth is never added."""

    def addends(self, rank: int) -> Sequence[Contribution]:
        return self._shares[: 1 << (len(self._shares).bit_length() - 1)]


class PeersWrapAround(VirtualCommunicator):
    """Counts peers from the end where the number is negative, as a list does."""

    def isend(self, tensor: Tensor, destination: int) -> VirtualWork:
        return super().isend(tensor, destination % self.size)


class FailsInTheTable(VirtualCommunicator):
    """Looks for a sum that it does not know in its table of sums."""

    def all_reduce(self, tensor: Tensor) -> VirtualWork:
        if tensor.dtype not in self.capabilities.reductions:
            raise KeyError(tensor.dtype)
        return super().all_reduce(tensor)


class UnknownSumsAreTaken(VirtualCommunicator):
    """Takes sums of any type, and adds nothing where it does not know how."""

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        if out.dtype not in self.capabilities.reductions:
            return self.barrier()
        return super().reduce_scatter(out, tensor)


DEFINITION = "every-collective-equals-its-definition"
SHAPES = "every-dtype-and-shape-is-transported"
ADDRESSES = "misaligned-buffers-arrive-and-their-neighbours-stay"
LAYOUTS = "layouts-are-copied-right-or-rejected"
UNEVEN = "uneven-rows-arrive"
GROUPS = "groups-of-any-size-and-members-work"
UNSUPPORTED_CALLS = "unsupported-calls-raise-before-any-side-effect"
REBUILT = "a-rebuilt-communicator-carries-only-what-came-after"
FAULTS = "a-fault-ends-what-depends-on-it-and-nothing-else"
MISMATCH = "checked-ranks-are-told-of-a-mismatch"
BITS = "bits-survive-every-transport"


def _sums_undeclared() -> Subject:
    """Sums are declared absent, and formed all the same."""
    absent = {Operation.ALL_REDUCE, Operation.REDUCE_SCATTER}
    declared = replace(
        ALL_COMMUNICATOR_CAPABILITIES, operations=frozenset(Operation) - frozenset(absent)
    )
    return ControlledSubject(VirtualBackend(groups=declared))


MUTANTS = (
    Mutant(
        name="what-is-declared-absent-is-performed",
        clause="X5",
        broken="Sums are declared absent, and formed when they are called.",
        property=UNSUPPORTED_CALLS,
        subject=_sums_undeclared,
    ),
    Mutant(
        name="broadcast-forgets-its-source",
        clause="X4",
        broken="A broadcast of anything but bytes copies what rank 0 has, whoever was named.",
        property=DEFINITION,
        subject=network_with(communicator=OnlyBytesKnowTheirSource),
        # Broadcasts are among its collectives.
        also=("collectives-equal-their-definitions-at-any-size",),
    ),
    Mutant(
        name="small-floats-are-halved",
        clause="X4",
        broken="Half of every tensor of an eight-bit floating type is moved.",
        property=DEFINITION,
        subject=network_with(communicator=SmallFloatsAreHalved),
        # These draw every dtype too: a dtype that cannot be sent breaks them as well.
        also=(SHAPES, ADDRESSES, GROUPS, LAYOUTS, BITS, MISMATCH),
    ),
    Mutant(
        name="an-empty-send-does-not-travel",
        clause="S1",
        broken="An empty tensor is skipped by the sender, and awaited by the receiver.",
        property=SHAPES,
        subject=network_with(communicator=EmptyIsNotSent),
    ),
    Mutant(
        name="a-scalar-counts-as-empty",
        clause="S1",
        broken="A tensor without dimensions is not moved.",
        property=SHAPES,
        subject=network_with(communicator=ScalarsAreEmpty),
    ),
    Mutant(
        name="a-single-byte-is-not-added",
        clause="S1",
        broken="Bytes are added in pairs, and a single one is left as it was.",
        property=SHAPES,
        subject=network_with(collective=BytesAreAddedInPairs),
    ),
    Mutant(
        name="a-strided-result-goes-to-a-copy",
        clause="S2",
        broken="An output that is not contiguous is replaced by a copy that nobody sees.",
        property=LAYOUTS,
        subject=network_with(communicator=ResultGoesToACopy),
    ),
    Mutant(
        name="a-layout-is-refused-too-late",
        clause="S2",
        broken="A layout is refused when the operation is on its way, and writes its output.",
        property=LAYOUTS,
        subject=network_with(communicator=RefusesTooLate),
    ),
    Mutant(
        name="uneven-blocks-are-looked-for-where-even-ones-are",
        clause="S3",
        broken="The blocks of an uneven all-to-all are taken from even places.",
        property=UNEVEN,
        subject=network_with(collective=EvenBlocks),
        # There are more of them, and longer ones.
        also=(
            "thousands-of-uneven-rows-arrive",
            "misaligned-buffers-arrive-and-their-neighbours-stay",
        ),
    ),
    Mutant(
        name="an-idle-rank-stays-away",
        clause="S3",
        broken="A rank without rows to give or take does not come, and the others wait for it.",
        property=UNEVEN,
        subject=network_with(communicator=IdleRankStaysAway),
    ),
    Mutant(
        name="whole-words-are-read",
        clause="S4",
        broken="A send reads from the address rounded down to a word.",
        property=ADDRESSES,
        subject=network_with(communicator=WholeWordsAreRead),
    ),
    Mutant(
        name="whole-words-are-written",
        clause="A4",
        broken="A receive writes up to the end of its last word.",
        property=ADDRESSES,
        subject=network_with(communicator=WholeWordsAreWritten),
    ),
    Mutant(
        name="alone-nothing-is-copied",
        clause="S5",
        broken="A group of one returns without copying its input to its output.",
        property=GROUPS,
        subject=network_with(communicator=AloneNothingIsCopied),
        # A communicator may be rebuilt with one member.
        also=(REBUILT,),
    ),
    Mutant(
        name="members-are-sorted",
        clause="S5",
        broken="A rank's place in a group does not follow from the order of the members.",
        property=GROUPS,
        subject=network_with(fabric=MembersAreSorted),
    ),
    Mutant(
        name="sums-need-a-power-of-two",
        clause="S5",
        broken="Ranks beyond the largest power of two are not added.",
        property=GROUPS,
        subject=network_with(collective=PowersOfTwo),
        # There may be three survivors.
        also=(REBUILT, FAULTS),
    ),
    Mutant(
        name="peers-wrap-around",
        clause="X5",
        broken="A send to rank -1 goes to the last rank.",
        property=UNSUPPORTED_CALLS,
        subject=network_with(communicator=PeersWrapAround),
    ),
    Mutant(
        name="an-unknown-sum-fails-in-a-table",
        clause="X5",
        broken="A dtype that cannot be summed raises whatever the look-up raises.",
        property=UNSUPPORTED_CALLS,
        subject=network_with(communicator=FailsInTheTable),
    ),
    Mutant(
        name="an-unknown-sum-is-taken",
        clause="X5",
        broken="A dtype that cannot be summed is accepted, and nothing is added.",
        property=UNSUPPORTED_CALLS,
        subject=network_with(communicator=UnknownSumsAreTaken),
    ),
)
