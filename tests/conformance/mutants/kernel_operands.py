"""Mutants of the CPU about operands of kernels, and about tables that are not there yet."""

from dataclasses import replace

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import cpu_with
from torch import Tensor

from equipoise import _native
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.hal.kernel_operands import check_layer
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.routing import SWEEPS
from equipoise.hal.stream import Stream


class IgnoresStrides(CpuKernels):
    """What is strided is read as if it were not, as a kernel does that is given a pointer."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        near = ids.as_strided((ids.numel(),), (1,))
        super().route_and_count(near, tables, salt, slots, counts, stream)


class FillsAnyIntegerType(CpuKernels):
    """Counts of any integer type are filled."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        near = torch.empty(counts.shape, dtype=torch.int32)
        super().route_and_count(ids, tables, salt, slots, near, stream)
        stream.launch(lambda: counts.copy_(near))


class TakesLongerResult(CpuKernels):
    """What is longer than it needs to be is taken."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        super().route_and_count(ids, tables, salt, slots[: ids.numel()], counts, stream)


class NegativeLayerWraps(CpuKernels):
    """Layer -1 is the last one, as indices of Python are."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        salt = replace(salt, layer=salt.layer % tables.layers)
        super().route_and_count(ids, tables, salt, slots, counts, stream)


class SolvesAnyIntegerType(CpuKernels):
    """A load is taken in any type of integers."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        super().solve_shares(counts.long(), tables, layer, cumulative, stream)


class RepeatedLayerTakesLast(CpuKernels):
    """A layer that is named twice gets the later of its rows."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        last = {layer: row for row, layer in enumerate(update.layers)}
        rows = list(last.values())
        few = TableUpdate(
            tuple(last), update.start[rows], update.replicas[rows], update.cumulative[rows]
        )
        super().commit_tables(few, tables, stream)


class SkipsUnknownLayers(CpuKernels):
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


class ZerosWithoutTables(CpuKernels):
    """Shares of a layer without tables are zeros."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        super().solve_shares(counts, tables, layer, cumulative, stream)
        stream.launch(lambda: cumulative.mul_((tables.generation[layer] > 0).to(cumulative.dtype)))


OPERANDS = "an-operand-that-does-not-fit-changes-nothing"
TAKEN = "an-update-of-tables-is-taken-at-the-call"
UNSOLVED = "shares-of-a-layer-without-tables-are-left-alone"
MUTANTS = (
    Mutant(
        name="strides-of-ids-are-not-looked-at",
        clause="G11",
        broken="A column of ids is routed as if its elements stood side by side.",
        property=OPERANDS,
        subject=cpu_with(kernels=IgnoresStrides),
        real=True,
    ),
    Mutant(
        name="counts-of-any-type-are-written",
        clause="G11",
        broken="Counts of 64 bits are taken.",
        property=OPERANDS,
        subject=cpu_with(kernels=FillsAnyIntegerType),
        real=True,
    ),
    Mutant(
        name="longer-results-are-taken",
        clause="G11",
        broken="A result that is longer than the batch is taken.",
        property=OPERANDS,
        subject=cpu_with(kernels=TakesLongerResult),
        real=True,
    ),
    Mutant(
        name="layers-count-from-the-end",
        clause="G11",
        broken="Layer -1 is the last one.",
        property=OPERANDS,
        subject=cpu_with(kernels=NegativeLayerWraps),
        real=True,
    ),
    Mutant(
        name="loads-of-any-type-are-solved",
        clause="G11",
        broken="A load of 32 bits is taken.",
        property=OPERANDS,
        subject=cpu_with(kernels=SolvesAnyIntegerType),
        real=True,
    ),
    Mutant(
        name="the-last-row-of-a-layer-counts",
        clause="G11",
        broken="A layer that an update names twice gets the later row.",
        property=OPERANDS,
        subject=cpu_with(kernels=RepeatedLayerTakesLast),
        real=True,
    ),
    Mutant(
        name="unknown-layers-are-skipped",
        clause="G11",
        broken="An update installs the layers that there are, and forgets the others.",
        property=OPERANDS,
        subject=cpu_with(kernels=SkipsUnknownLayers),
        real=True,
    ),
    Mutant(
        name="an-update-is-read-by-the-stream",
        clause="G10",
        broken="An update that is changed behind the call installs what it was changed to.",
        property=TAKEN,
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
    Mutant(
        name="shares-without-tables-are-zeros",
        clause="G12",
        broken="Solving a layer ahead of its first commit writes zeros.",
        property=UNSOLVED,
        subject=cpu_with(kernels=ZerosWithoutTables),
        real=True,
    ),
)
