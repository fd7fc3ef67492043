"""Mutants of kernels: operands, and tables that are not there yet."""

from dataclasses import replace

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.mutation import AnyKernels, Mutation
from conformance.mutants.subjects import cpu_with
from torch import Tensor

from equipoise import _native
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.routing import SWEEPS
from equipoise.hal.stream import Stream
from equipoise.hal.support.validation import check_layer


class IgnoresStrides(AnyKernels):
    """A strided operand is read as if it were contiguous, as by a kernel that gets a pointer."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        near = ids.as_strided((ids.numel(),), (1,))
        super().route_and_count(near, tables, salt, slots, counts, stream)


class FillsAnyIntegerType(AnyKernels):
    """Counts of any integer type are filled."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        near = torch.empty(counts.shape, dtype=torch.int32, device=counts.device)
        super().route_and_count(ids, tables, salt, slots, near, stream)
        stream.launch(lambda: counts.copy_(near))


class TakesLongerResult(AnyKernels):
    """What is longer than it needs to be is taken."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        super().route_and_count(ids, tables, salt, slots[: ids.numel()], counts, stream)


class NegativeLayerWraps(AnyKernels):
    """Layer -1 is the last one, as indices of Python are."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        salt = replace(salt, layer=salt.layer % tables.layers)
        super().route_and_count(ids, tables, salt, slots, counts, stream)


class SolvesAnyIntegerType(AnyKernels):
    """A load is taken in any type of integers."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        super().solve_shares(counts.long(), tables, layer, cumulative, stream)


class RepeatedLayerTakesLast(AnyKernels):
    """A layer that is named twice gets the later of its rows."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        last = {layer: row for row, layer in enumerate(update.layers)}
        rows = list(last.values())
        few = TableUpdate(
            tuple(last), update.start[rows], update.replicas[rows], update.cumulative[rows]
        )
        super().commit_tables(few, tables, stream)


class SkipsUnknownLayers(AnyKernels):
    """Layers that there are none of are left out of an update."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        rows = [row for row, layer in enumerate(update.layers) if layer < tables.layers]
        few = TableUpdate(
            tuple(update.layers[row] for row in rows),
            update.start[: len(rows)],
            update.replicas[: len(rows)],
            update.cumulative[: len(rows)],
        )
        super().commit_tables(few, tables, stream)


class ReadsUpdateAtCommit(CpuKernels):
    """An update is read when the stream comes to its commit."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        if len(set(update.layers)) < len(update.layers):
            super().commit_tables(update, tables, stream)
            return
        for layer in update.layers:
            check_layer(layer, tables)
        stream.launch(
            lambda: super(ReadsUpdateAtCommit, self).commit_tables(update, tables, stream)
        )


class FailsWithoutTables(CpuKernels):
    """A layer without tables fails the stream that is to solve it."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        super().solve_shares(counts, tables, layer, cumulative, stream)

        def program() -> None:
            live = int(tables.generation[layer]) & 1, layer
            _native.solve_cumulative(
                counts.numpy(),
                tables.start[live].numpy(),
                tables.replicas[live].numpy(),
                tables.ranks,
                SWEEPS,
                cumulative.clone().numpy(),
            )

        stream.launch(program)


class ZerosWithoutTables(AnyKernels):
    """Shares of a layer without tables are zeros."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        super().solve_shares(counts, tables, layer, cumulative, stream)
        stream.launch(lambda: cumulative.mul_((tables.generation[layer] > 0).to(cumulative.dtype)))


OPERANDS = "an-operand-that-does-not-fit-changes-nothing"
TABLE_UPDATE_OPERANDS = "an-update-of-tables-is-taken-at-the-call"
UNSOLVED = "solve-shares-ignores-layers-without-tables"
MUTATIONS = (
    Mutation(
        name="strides-of-ids-are-not-looked-at",
        clause="G11",
        broken="A column of ids is routed as if its elements stood side by side.",
        property=OPERANDS,
        kernels=IgnoresStrides,
    ),
    Mutation(
        name="counts-of-any-type-are-written",
        clause="G11",
        broken="Counts of 64 bits are taken.",
        property=OPERANDS,
        kernels=FillsAnyIntegerType,
    ),
    Mutation(
        name="longer-results-are-taken",
        clause="G11",
        broken="A result that is longer than the batch is taken.",
        property=OPERANDS,
        kernels=TakesLongerResult,
    ),
    Mutation(
        name="layers-count-from-the-end",
        clause="G11",
        broken="Layer -1 is the last one.",
        property=OPERANDS,
        kernels=NegativeLayerWraps,
    ),
    Mutation(
        name="loads-of-any-type-are-solved",
        clause="G11",
        broken="A load of 32 bits is taken.",
        property=OPERANDS,
        kernels=SolvesAnyIntegerType,
    ),
    Mutation(
        name="the-last-row-of-a-layer-counts",
        clause="G11",
        broken="A layer that an update names twice gets the later row.",
        property=OPERANDS,
        kernels=RepeatedLayerTakesLast,
    ),
    Mutation(
        name="unknown-layers-are-skipped",
        clause="G11",
        broken="An update installs the layers that there are, and forgets the others.",
        property=OPERANDS,
        kernels=SkipsUnknownLayers,
    ),
    Mutation(
        name="shares-without-tables-are-zeros",
        clause="G12",
        broken="Solving a layer ahead of its first commit writes zeros.",
        property=UNSOLVED,
        kernels=ZerosWithoutTables,
    ),
)
MUTANTS = (
    *(mutation.on_cpu() for mutation in MUTATIONS),
    Mutant(
        name="an-update-is-read-by-the-stream",
        clause="G10",
        broken="An update that is changed behind the call installs what it was changed to.",
        property=TABLE_UPDATE_OPERANDS,
        subject=cpu_with(kernels=ReadsUpdateAtCommit),
        real=True,
    ),
    Mutant(
        name="solving-without-tables-fails-the-stream",
        clause="G12",
        broken="Solving a layer ahead of its first commit fails the stream for good.",
        property=UNSOLVED,
        subject=cpu_with(kernels=FailsWithoutTables),
        real=True,
    ),
)
