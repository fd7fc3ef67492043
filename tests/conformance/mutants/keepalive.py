"""Mutants of family *keepalive*."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with, gloo_with, network_with
from torch import Tensor

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.backends.virtual.arena import Bytes, bytes_of
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.operation import VirtualOperation
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.transfer import Contribution
from equipoise.backends.virtual.work import DEADLINE, VirtualWork
from equipoise.hal.errors import CommunicatorError
from equipoise.hal.stream import Stream

Peers = Sequence[tuple[int, Tensor]]


def without_owner(tensor: Tensor) -> Tensor:
    """The same bytes, uint8 [nbytes], without a share in their ownership."""
    if not tensor.nbytes:
        return tensor
    place = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(place, dtype=torch.uint8)


def all_borrowed(messages: Peers) -> Peers:
    return [(peer, without_owner(tensor)) for peer, tensor in messages]


class SendsBorrow(VirtualCommunicator):
    """A send reads memory that it does not keep alive."""

    def _messages(self, what: str, sends: Peers, receives: Peers) -> VirtualWork:
        return super()._messages(what, all_borrowed(sends), receives)


class ReceivesBorrow(VirtualCommunicator):
    """A receive writes to memory that it does not keep alive."""

    def _messages(self, what: str, sends: Peers, receives: Peers) -> VirtualWork:
        return super()._messages(what, sends, all_borrowed(receives))


class WorkThatOwns(VirtualWork):
    """A work that can hold buffers."""

    buffers: tuple[Tensor, ...] = ()


class OnlyWorksOwn(VirtualCommunicator):
    """Buffers of messages live as long as the caller's work, and no longer."""

    def _messages(self, what: str, sends: Peers, receives: Peers) -> VirtualWork:
        work = super()._messages(what, all_borrowed(sends), all_borrowed(receives))
        assert isinstance(work, WorkThatOwns)
        work.buffers = tuple(tensor for _, tensor in (*receives, *sends))
        return work


class CollectivesBorrow(VirtualCommunicator):
    """A collective keeps its output alive, but not its input."""

    def _collective(self, make: partial[Contribution], *tensors: Tensor) -> VirtualWork:
        kind, source, out = make.args
        lent: Bytes = bytes_of(without_owner(torch.from_numpy(source)))
        return super()._collective(
            partial(Contribution, kind, lent, out, **make.keywords), *tensors[:1]
        )


class DropCancels(VirtualWork):
    """When the caller drops its work, the operation is withdrawn."""

    def __del__(self) -> None:
        operation = self._operation
        if not operation.over:
            operation.outbox.withdraw(operation)


class KeepsEverything(VirtualWork):
    """The buffers of every operation stay with the communicator until the end of the run."""

    def __init__(self, operation: VirtualOperation) -> None:
        super().__init__(operation)
        vars(operation.communicator).setdefault("kept", []).append(operation.tensors)


class BlobsBorrow(VirtualSlotStore):
    """A blob is read, or written, when the stream comes to it, and is not kept alive until then."""

    def _rows(self, blob: Tensor, count: int) -> list[Bytes]:
        return super()._rows(without_owner(blob), count)


class SourcesBorrow(VirtualSlotStore):
    """What is written into a slot is read when the stream comes to it, as long as it is there."""

    def _source(self, source: Sequence[Tensor]) -> list[Bytes]:
        return [bytes_of(without_owner(torch.from_numpy(part))) for part in super()._source(source)]


class DropWaits(VirtualWork):
    """The destructor of a handle waits for the end of the operation."""

    def __del__(self) -> None:
        with suppress(CommunicatorError):
            self.result(DEADLINE)


class JoinedHandle:
    """A handle of gloo whose destructor waits, as that of a future of `std::async` does."""

    def __init__(self, work: GlooWork) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.done()

    def wait(self, stream: Stream) -> None:
        self._work.wait(stream)

    def result(self, timeout: float) -> None:
        self._work.result(timeout)

    def cancel(self) -> None:
        self._work.cancel()

    def __del__(self) -> None:
        with suppress(CommunicatorError):
            self._work.result(JOIN_TIMEOUT)


class JoinsHandles(GlooCommunicator):
    """Hands out handles that wait when they are dropped."""

    def all_reduce(self, tensor: Tensor) -> GlooWork:
        return JoinedHandle(super().all_reduce(tensor))  # type: ignore[return-value]


class JoinsMessages(GlooCommunicator):
    """Hands out such handles of messages."""

    def isend(self, tensor: Tensor, destination: int) -> GlooWork:
        return JoinedHandle(super().isend(tensor, destination))  # type: ignore[return-value]


JOIN_TIMEOUT = 60.0
"""Seconds; an operation ends at its deadline at the latest."""


BUFFER_OWNERSHIP = "operations-own-their-buffers"
SLOT_OPS = "slot-operations-own-their-buffers"
WORKS = "dropped-works-neither-cancel-nor-leak"
SOFT = "result-timeout-does-not-cancel-the-operation"
CANCELLED = "a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator"
FAULTS = "a-fault-ends-what-depends-on-it-and-nothing-else"

DROPS = "dropping-a-work-waits-for-no-peer"
MUTANTS = (
    Mutant(
        name="a-send-does-not-own-its-buffer",
        clause="K1",
        broken="What is sent is read from memory that may be in use again (Megatron-LM #4047).",
        property=BUFFER_OWNERSHIP,
        subject=network_with(communicator=SendsBorrow),
        # all of them drop what was sent: with its work, after a soft wait, after a cancel
        also=(WORKS, SOFT, CANCELLED),
    ),
    Mutant(
        name="a-receive-does-not-own-its-buffer",
        clause="K1",
        broken="A late message is written to memory that is in use again (vLLM #49274).",
        property=BUFFER_OWNERSHIP,
        subject=network_with(communicator=ReceivesBorrow),
        # both drop the buffer of a receive in flight: with its work, or after a cancel
        also=(WORKS, CANCELLED),
    ),
    Mutant(
        name="a-collective-does-not-own-its-input",
        clause="K1",
        broken="Inputs of collectives are freed in flight (PyTorch #193903).",
        property=BUFFER_OWNERSHIP,
        subject=network_with(communicator=CollectivesBorrow),
        also=(WORKS, SOFT),  # both drop inputs: with their works, after a soft wait
    ),
    Mutant(
        name="only-the-work-owns-the-buffers",
        clause="K1",
        broken="With the caller's last reference to the work its buffers go, in flight or not.",
        property=WORKS,
        subject=network_with(communicator=OnlyWorksOwn, work=WorkThatOwns),
    ),
    Mutant(
        name="a-dropped-work-cancels-its-operation",
        clause="K2",
        broken="An operation is withdrawn with the caller's last reference to its work.",
        property=WORKS,
        subject=network_with(work=DropCancels),
        # It drops works, too.
        also=(DROPS,),
    ),
    Mutant(
        name="dropping-a-work-waits-for-its-end",
        clause="K6",
        broken="The destructor of a handle waits for the peer (torchcomms' gloo: 4 s).",
        property=DROPS,
        subject=network_with(work=DropWaits),
        # It drops works, too.
        also=(WORKS,),
    ),
    Mutant(
        name="dropping-a-sum-joins-its-thread",
        clause="K6",
        broken="The handle of a sum waits for the other ranks when it is dropped.",
        property=DROPS,
        subject=gloo_with(communicator=JoinsHandles),
        real=True,
    ),
    Mutant(
        name="dropping-a-send-joins-its-thread",
        clause="K6",
        broken="The handle of a send waits for its receiver when it is dropped.",
        property=DROPS,
        subject=gloo_with(communicator=JoinsMessages),
        real=True,
    ),
    Mutant(
        name="buffers-are-kept-for-the-whole-run",
        clause="K2",
        broken="No operation ever lets go of its tensors (PyTorch's pipeline schedules).",
        property=WORKS,
        subject=network_with(work=KeepsEverything),
        also=(FAULTS,),  # it counts what survivors still hold
    ),
    Mutant(
        name="a-blob-belongs-to-its-caller",
        clause="K1",
        broken="A blob that is dropped behind `pack` or `unpack` is in use again (record_stream).",
        property=SLOT_OPS,
        subject=device_with(slots=BlobsBorrow),
        also=("a-bad-argument-changes-nothing",),  # it passes blobs and drops them
    ),
    Mutant(
        name="a-source-belongs-to-its-caller",
        clause="K1",
        broken="The tensors of `write` are freed in flight (record_stream).",
        property=SLOT_OPS,
        subject=device_with(slots=SourcesBorrow),
    ),
)
