"""Mutants of kernels, tables and slots that are right for small sizes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.mutation import AnyKernels, AnySlots, Mutation
from conformance.mutants.subjects import cpu_with
from torch import Tensor

from equipoise import _native
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.hal.checksum import as_int64
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash
from equipoise.hal.stream import Stream

BLOCK = 4096
MEGABYTE = 1 << 20
CHUNK = 4 << 20


class ExpertsInOneByte(AnyKernels):
    """An expert's number is a byte."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        masked_ids = torch.empty_like(ids)
        stream.launch(lambda: masked_ids.copy_(ids.masked_fill(ids >= 256, -1)))
        super().route_and_count(masked_ids, tables, salt, slots, counts, stream)


class HashPerBlock(AnyKernels):
    """The place of a token is its place in a block of 4096."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        for some, out in zip(torch.split(ids, BLOCK), torch.split(slots, BLOCK), strict=True):
            super().route_and_count(some, tables, salt, out, counts, stream)
        self.count(ids, counts, stream)


class QuotasPerBlock(AnyKernels):
    """Quotas are those of a block of 4096."""

    def route_apportioned(
        self,
        ids: Tensor,
        tables: Tables,
        cumulative: Tensor,
        salt: Salt,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        for some, out in zip(torch.split(ids, BLOCK), torch.split(slots, BLOCK), strict=True):
            super().route_apportioned(some, tables, cumulative, salt, out, counts, stream)
        self.count(ids, counts, stream)


class LevelsPerBlock(AnyKernels):
    """A levelled batch is divided block by block."""

    def route_levelled(
        self,
        ids: Tensor,
        tables: Tables,
        salt: Salt,
        group: GroupCounts | None,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        for some, out in zip(torch.split(ids, BLOCK), torch.split(slots, BLOCK), strict=True):
            super().route_levelled(some, tables, salt, group, out, counts, stream)
        self.count(ids, counts, stream)


class CountsOneBlock(AnyKernels):
    """Tokens after the first 16384 are not counted."""

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        super().count(ids[: 4 * BLOCK], counts, stream)


class RanksWrapAt64(AnyKernels):
    """Ranks from 64 on are not looked at: their slots are taken for those of the first 64."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        few = replace(tables, ranks=1) if tables.ranks > 64 else tables
        super().solve_shares(counts, few, layer, cumulative, stream)


class StopsAt32Replicas(AnyKernels):
    """Only the first 32 replicas of an expert take tokens of an apportioned batch."""

    def route_apportioned(
        self,
        ids: Tensor,
        tables: Tables,
        cumulative: Tensor,
        salt: Salt,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        start = tables.start[int(tables.generation[salt.layer]) & 1, salt.layer]
        short = torch.empty_like(cumulative)
        runs = list(zip(start[:-1].tolist(), start[1:].tolist(), strict=True))

        def program() -> None:
            short.copy_(cumulative)
            for first, last in runs:
                short[first + 31 : last].fill_(1 << 16)

        stream.launch(program)
        super().route_apportioned(ids, tables, short, salt, slots, counts, stream)


class RuleRowsInOneByte(AnyKernels):
    """A rule counts at most 255 rows."""

    def route_by_rule(
        self,
        rule: ReplicaRule,
        ids: Tensor,
        tables: Tables,
        layer: int,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        if isinstance(rule, RowHash):
            rule = RowHash(rule.top_k, rule.rows.clamp(max=255))
        super().route_by_rule(rule, ids, tables, layer, slots, counts, stream)


class TurnsPerBlock(AnyKernels):
    """Turns begin anew after 4096 elements."""

    def route_by_rule(
        self,
        rule: ReplicaRule,
        ids: Tensor,
        tables: Tables,
        layer: int,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        if not isinstance(rule, BlockTurns) or ids.numel() <= BLOCK:
            super().route_by_rule(rule, ids, tables, layer, slots, counts, stream)
            return
        for some, out in zip(torch.split(ids, BLOCK), torch.split(slots, BLOCK), strict=True):
            super().route_by_rule(rule, some, tables, layer, out, counts, stream)
        self.count(ids, counts, stream)


def _rows(update: TableUpdate, rows: Sequence[int], layers: Sequence[int]) -> TableUpdate:
    row_index = torch.tensor(rows)
    return TableUpdate(
        tuple(layers),
        update.start[row_index],
        update.replicas[row_index],
        update.cumulative[row_index],
    )


class InstallsOneLayer(AnyKernels):
    """An update installs its first layer."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        super().commit_tables(_rows(update, [0], update.layers[:1]), tables, stream)


class InstallsFirstTables(AnyKernels):
    """Every layer of an update gets the tables of the first."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        alike = _rows(update, [0] * len(update.layers), update.layers)
        super().commit_tables(alike, tables, stream)


class Installs32Layers(AnyKernels):
    """An update installs at most 32 layers."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        rows = range(min(len(update.layers), 32))
        super().commit_tables(_rows(update, rows, update.layers[:32]), tables, stream)


class SortsLayersOnly(AnyKernels):
    """Layers of an update are taken in ascending order, its rows as they come."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        sorted_update = replace(update, layers=tuple(sorted(update.layers)))
        super().commit_tables(sorted_update, tables, stream)


class ChecksumsOneMegabyte(AnyKernels):
    """A checksum ends after a megabyte."""

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        flat = data.reshape(-1).view(torch.uint8)
        super().checksum(flat[:MEGABYTE], out, stream)


class CommitsOneChunk(CpuSlotStore):
    """A commit ends after 4 MiB of a segment."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        def program() -> None:
            for staging, slot in copies:
                for piece, segment in zip(self._staged[staging], self._slots[slot], strict=True):
                    segment[:CHUNK].copy_(piece[:CHUNK])

        self._issue_write(program, stream, tuple(slot for _, slot in copies))


class PacksWithoutLastByte(AnySlots):
    """Packing leaves out the last byte of a segment that is longer than 64 KiB by an odd number."""

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        super().pack(slots, blob, stream)
        first = self.layout.descriptor[0].nbytes
        if first > 1 << 16 and first % 2:
            rows = blob.view(len(slots), -1)
            stream.launch(lambda: rows[:, first - 1].zero_())


class WriteSwapsChunks(AnySlots):
    """A write of more than 4 MiB turns two chunks round."""

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        super().write(
            slots, [[_swap_chunks(part) for part in source] for source in sources], stream
        )


def _swap_chunks(part: Tensor) -> Tensor:
    flat = part.reshape(-1)
    return torch.roll(flat, 1).view(part.shape) if flat.nbytes > CHUNK else part


class UnpacksWholeKilobytes(AnySlots):
    """A row of 64 KiB and more lacks what goes beyond whole kilobytes."""

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        size = self.layout.slot_bytes
        if size >= 1 << 16:
            blob = blob.clone()
            blob.view(len(staging), size)[:, size // 1024 * 1024 :] = 0
        super().unpack(blob, staging, stream)


class Commits64Pairs(AnySlots):
    """A commit takes at most 64 pairs."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        super().commit(copies[:64], stream)


class SlotsInOneByte(AnySlots):
    """The number of a slot that is packed is a byte."""

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        super().pack([slot % 256 for slot in slots], blob, stream)


class Sums128Slots(AnySlots):
    """At most 128 slots are summed in a call."""

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        super().checksum_slots(slots[:128], out[: min(128, len(slots))], stream)


class SumsOneMegabyteOfStaging(CpuSlotStore):
    """The checksum of a staging buffer ends after a megabyte."""

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        buffers = [self._staging[number][:MEGABYTE] for number in staging]

        def program() -> None:
            for place, data in enumerate(buffers):
                out[place] = as_int64(_native.checksum(data.contiguous().numpy()))

        self._issue(program, stream, reads=tuple(("staging", number) for number in staging))


KERNELS = "kernels-equal-the-reference-at-the-sizes-of-models"
SUMS = "checksums-equal-the-reference-at-any-length"
LONG = "slots-of-any-length-are-copied-whole"
MANY = "an-operation-takes-hundreds-of-slots"
MUTATIONS = (
    Mutation(
        name="an-expert-is-a-byte",
        clause="G4",
        broken="Experts from 256 on are taken for padding.",
        property=KERNELS,
        kernels=ExpertsInOneByte,
    ),
    Mutation(
        name="places-begin-anew-in-each-block",
        clause="G4",
        broken="The hash takes the place in a block of 4096 for the place in the batch.",
        property=KERNELS,
        kernels=HashPerBlock,
    ),
    Mutation(
        name="quotas-are-those-of-a-block",
        clause="G4",
        broken="Batches of more than 4096 ids are apportioned block by block.",
        property=KERNELS,
        kernels=QuotasPerBlock,
    ),
    Mutation(
        name="batches-are-levelled-block-by-block",
        clause="G13",
        broken="Batches of more than 4096 ids are levelled block by block.",
        property=KERNELS,
        kernels=LevelsPerBlock,
    ),
    Mutation(
        name="counting-ends-with-a-block",
        clause="G4",
        broken="Ids behind the first 16384 are not counted.",
        property=KERNELS,
        kernels=CountsOneBlock,
    ),
    Mutation(
        name="ranks-beyond-a-word-are-not-levelled",
        clause="G4",
        broken="On more than 64 ranks shares are solved as if all slots were on one.",
        property=KERNELS,
        kernels=RanksWrapAt64,
    ),
    Mutation(
        name="long-runs-are-cut",
        clause="G4",
        broken="Replicas behind the first 32 of an expert get nothing.",
        property=KERNELS,
        kernels=StopsAt32Replicas,
    ),
    Mutation(
        name="rows-are-counted-in-a-byte",
        clause="G8",
        broken="vLLM's rule counts at most 255 rows.",
        property=KERNELS,
        kernels=RuleRowsInOneByte,
    ),
    Mutation(
        name="turns-begin-anew-after-many-blocks",
        clause="G8",
        broken="TensorRT-LLM's turns begin anew after 4096 elements.",
        property=KERNELS,
        kernels=TurnsPerBlock,
    ),
    Mutation(
        name="one-layer-of-an-update-is-installed",
        clause="G10",
        broken="Of an update of several layers only the first is installed.",
        property=KERNELS,
        kernels=InstallsOneLayer,
    ),
    Mutation(
        name="all-layers-get-the-first-table",
        clause="G10",
        broken="All layers of an update get the tables of its first one.",
        property=KERNELS,
        kernels=InstallsFirstTables,
    ),
    Mutation(
        name="an-update-has-32-layers",
        clause="G10",
        broken="Layers behind the first 32 of an update keep their tables.",
        property=KERNELS,
        kernels=Installs32Layers,
    ),
    Mutation(
        name="layers-of-an-update-are-sorted",
        clause="G10",
        broken="Rows of an update go to its layers in ascending order, not in the order given.",
        property=KERNELS,
        kernels=SortsLayersOnly,
    ),
    Mutation(
        name="a-checksum-ends-after-a-megabyte",
        clause="G4",
        broken="Bytes behind the first megabyte do not count.",
        property=SUMS,
        kernels=ChecksumsOneMegabyte,
    ),
    Mutation(
        name="the-last-byte-of-a-long-segment-is-not-packed",
        clause="A6",
        broken="The last byte of a segment beyond 64 KiB of odd length is left out.",
        property=LONG,
        slots=PacksWithoutLastByte,
    ),
    Mutation(
        name="chunks-of-a-write-are-shifted",
        clause="A6",
        broken="A write of more than 4 MiB is off by one byte.",
        property=LONG,
        slots=WriteSwapsChunks,
    ),
    Mutation(
        name="long-rows-arrive-in-whole-kilobytes",
        clause="A6",
        broken="Unpacking a row of 64 KiB and more leaves out what exceeds whole kilobytes.",
        property=LONG,
        slots=UnpacksWholeKilobytes,
    ),
    Mutation(
        name="a-commit-takes-64-pairs",
        clause="A8",
        broken="Pairs behind the first 64 of a commit are forgotten.",
        property=MANY,
        slots=Commits64Pairs,
    ),
    Mutation(
        name="a-slot-that-is-packed-is-a-byte",
        clause="A8",
        broken="Packing slot 256 packs slot 0.",
        property=MANY,
        slots=SlotsInOneByte,
    ),
    Mutation(
        name="128-slots-are-summed-in-a-call",
        clause="D4",
        broken="Sums behind the first 128 of a call are not written.",
        property=MANY,
        slots=Sums128Slots,
    ),
)
MUTANTS = (
    *(mutation.on_cpu() for mutation in MUTATIONS),
    Mutant(
        name="a-commit-ends-with-a-chunk",
        clause="A6",
        broken="A commit copies 4 MiB of each segment.",
        property=LONG,
        subject=cpu_with(slots=CommitsOneChunk),
        real=True,
    ),
    Mutant(
        name="staging-is-summed-to-a-megabyte",
        clause="D4",
        broken="The checksum of a staging buffer ends after a megabyte.",
        property=LONG,
        subject=cpu_with(slots=SumsOneMegabyteOfStaging),
        real=True,
    ),
)
