"""What the transfer holds of a device's memory while a chunk is under way."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.balancer.experts.planning.migration import (
    LocalCopies,
    RankTransfers,
    Recv,
    RoundTransfers,
    Send,
)
from equipoise.balancer.experts.runtime.jobs import run_blocking
from equipoise.balancer.experts.transfer.p2p import P2PTransfer
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Communicator, Exchange
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work

WAIT = 20.0
ROUNDS, LOCAL_COPIES, SLOTS_PER_MESSAGE = 5, 6, 2
SLOTS = 2 * ROUNDS + LOCAL_COPIES


class MessageCounter:
    """Counts the message buffers that are alive, of all that were packed, sent or received."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self.packed: list[int] = []
        self.in_flight: list[int] = []
        self.unpacked: list[int] = []

    def see(self, blob: Tensor) -> None:
        ref = StorageWeakRef(blob.untyped_storage())  # type: ignore[no-untyped-call]
        if not any(old == ref and is_alive(old) for old in self._storages.values()):
            self._storages[len(self._storages)] = ref

    @property
    def alive(self) -> int:
        return sum(is_alive(ref) for ref in self._storages.values())


def is_alive(ref: StorageWeakRef) -> bool:
    return not ref.expired()  # type: ignore[no-untyped-call]


class CountingStore(CpuSlotStore):
    """A slot store that counts live message buffers when it packs or unpacks."""

    def __init__(self, layout: SlotLayout, blobs: MessageCounter) -> None:
        super().__init__(layout)
        self._blobs = blobs

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        self._blobs.see(blob)
        self._blobs.packed.append(self._blobs.alive)
        super().pack(slots, blob, stream)

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        self._blobs.see(blob)
        self._blobs.unpacked.append(self._blobs.alive)
        super().unpack(blob, staging, stream)
        stream.synchronize(WAIT)  # a copy stream that lags would keep blobs of rounds before


class CountingCommunicator:
    """A communicator that counts live message buffers in each round."""

    def __init__(
        self, inner: Communicator, blobs: MessageCounter, capabilities: CommunicatorCapabilities
    ) -> None:
        self._inner = inner
        self._blobs = blobs
        self.capabilities = capabilities

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def exchange(self, round: Exchange) -> Work:
        for buffer in (*round.sends, *round.receives):
            self._blobs.see(buffer.blob)
        self._blobs.in_flight.append(self._blobs.alive)
        return self._inner.exchange(round)


def transfers_of(rank: int) -> RankTransfers:
    """A slot each way a round, to and from the other rank; then copies within this one."""
    rounds = tuple(
        RoundTransfers(Send(1 - rank, (at,)), Recv(1 - rank, (at,), (ROUNDS + at,)))
        for at in range(ROUNDS)
    )
    sources = tuple(at % ROUNDS for at in range(LOCAL_COPIES))
    staging = tuple(range(ROUNDS, ROUNDS + LOCAL_COPIES))
    slots = tuple(range(2 * ROUNDS, SLOTS))
    return RankTransfers(rounds, LocalCopies(sources, staging, slots), ())


def stage(
    member: GroupMember, declare: Callable[[CommunicatorCapabilities], CommunicatorCapabilities]
) -> MessageCounter:
    """Stages and checks the chunk; returns the counts of live message buffers."""
    weights = torch.arange(SLOTS * 8, dtype=torch.float32).reshape(SLOTS, 8) + 1000 * member.rank
    layout = SlotLayout(
        tuple((Segment("w", row),) for row in weights), staging=ROUNDS + LOCAL_COPIES
    )
    blobs = MessageCounter()
    store = CountingStore(layout, blobs)
    inner = member.fabric.open("moves")
    group = CountingCommunicator(inner, blobs, declare(inner.capabilities))
    transfer = P2PTransfer(
        member.accelerator,
        group,  # type: ignore[arg-type]
        store,
        range(2),
        WAIT,
        slots_per_message=SLOTS_PER_MESSAGE,
    )
    compute, transfers = member.accelerator.stream(Role.COMPUTE), transfers_of(member.rank)
    event = member.accelerator.event()
    compute.record(event)
    staged_chunk = run_blocking(transfer.stage(transfers, event), WAIT)
    store.commit(staged_chunk.copies, compute)
    member.accelerator.synchronize(WAIT)
    expected_weights = weights[:ROUNDS] + 1000 * (1 - 2 * member.rank)
    assert torch.equal(weights[ROUNDS : 2 * ROUNDS], expected_weights)
    assert torch.equal(weights[2 * ROUNDS :], weights[list(transfers.local.sources)])
    assert blobs.alive == 0
    return blobs


def test_transfer_holds_at_most_one_round_of_messages() -> None:
    for blobs in on_ranks(2, lambda member: stage(member, lambda capabilities: capabilities)):
        # One is sent while the copy stream may still unpack what the round before has brought.
        assert blobs.in_flight == [2] * ROUNDS
        assert max(blobs.packed) <= 2
        assert max(blobs.unpacked) <= 2


def test_transfer_packs_local_copies_by_messages() -> None:
    for blobs in on_ranks(2, lambda member: stage(member, lambda capabilities: capabilities)):
        assert len(blobs.packed) == ROUNDS + LOCAL_COPIES // SLOTS_PER_MESSAGE


def test_transfer_frees_messages_as_concurrent_rounds_arrive() -> None:
    def declare_dependent(capabilities: CommunicatorCapabilities) -> CommunicatorCapabilities:
        return replace(capabilities, independent_groups=False)

    for blobs in on_ranks(2, lambda member: stage(member, declare_dependent)):
        assert max(blobs.in_flight) <= 2 * ROUNDS
        for round_number, alive in enumerate(blobs.unpacked[:ROUNDS]):
            # What was sent may go with what was received or before; the last program's closure may
            # still be there.
            assert alive <= 2 * (ROUNDS - round_number) + 1
        assert max(blobs.packed[ROUNDS:]) <= 2
