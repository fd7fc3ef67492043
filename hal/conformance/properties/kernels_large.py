"""Family *kernels*: tables and batches as large as those of real models.

A kernel that is right for three experts may be wrong for 257: it works in blocks and searches in
powers of two. Each case plays every size below; the contents of the tables are drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    require,
    require_equal,
    to_host,
)
from equipoise.hal.conformance.fixtures import routing_tables
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.kernels import Kernels, Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import (
    SHARE_ONE,
    RoutingTable,
    build_table,
    count_experts,
    route_apportioned,
    route_hashed,
    solve_cumulative,
)
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash, route_by_rule
from equipoise.hal.stream import Role, Stream

FAMILY = "kernels"
MODELS = (
    # experts, slots, ranks, layers, tokens
    (257, 297, 33, 3, 4097),
    (384, 512, 2, 2, 16385),
    (8, 66, 3, 61, 1025),
    (128, 130, 65, 1, 2047),
)
"""Experts beyond a block of 256, tens of ranks, slots and layers; batches beyond a block."""
TOP_K = 8
WINDOW_BITS = 22
"""How many batches, as a power of two, the load of a window is made of."""
REPLICATED_EXPERTS = 3
"""Experts of the longest runs: spare slots go to the first ones, so that some runs are long."""
CHECKSUM_BYTES = (1023, 4096, 65_537, (1 << 20) + 1, (4 << 20) - 1)
"""Bytes that are summed: powers of two, a copy's chunk, and neighbours."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """`model(experts, slots, ranks, layers, tokens, key)` of every kind; `key` draws the rest."""
    return st.integers(0, 255).map(
        lambda key: make_program([Step("model", (*shape, key)) for shape in MODELS])
    )


def _generator(key: int, *more: int) -> torch.Generator:
    """Random numbers of a step: the same ones on every machine."""
    seed = 0
    for number in (key, *more):
        seed = seed * 1009 + number + 1
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=256)
def _table(experts: int, slots: int, key: int, layer: int) -> RoutingTable:
    """Every expert has a slot, some have many; shares as drawn, of which some are 0."""
    generator = _generator(key, experts, layer)
    spare = torch.randint(0, REPLICATED_EXPERTS, (slots - experts,), generator=generator)
    placement = torch.cat([torch.arange(experts), spare])[
        torch.randperm(slots, generator=generator)
    ]
    weights = torch.randint(0, 4, (slots,), generator=generator)
    shares = torch.zeros(slots, dtype=torch.int64)
    for expert in range(experts):
        run = (placement == expert).nonzero()[:, 0]
        parts = weights[run] if int(weights[run].sum()) else torch.ones_like(run)
        ends = SHARE_ONE * parts.cumsum(0) // parts.sum()
        shares[run] = ends.diff(prepend=ends.new_zeros(1))
    return build_table(placement.int(), shares.int(), experts)


def update_of_layers(layers: Sequence[int], tables: Sequence[RoutingTable]) -> TableUpdate:
    """What installs these tables as those of these layers, in one commit."""
    return TableUpdate(
        tuple(layers),
        torch.stack([table.start for table in tables]),
        torch.stack([table.replicas for table in tables]),
        torch.stack([table.cumulative for table in tables]),
    )


@dataclass(frozen=True)
class _LargeModelRunner:
    """Tables of one size on the device, and the same ones on the host, by layer."""

    ctx: RankContext
    stream: Stream
    tables: Tables
    host_tables: dict[int, RoutingTable]
    key: int

    @property
    def kernels(self) -> Kernels:
        return self.ctx.accelerator.kernels

    def install(self, layers: Sequence[int], key: int) -> None:
        """New tables of these layers, in one commit."""
        slots, experts = self.tables.slots, self.tables.experts
        self.host_tables.update({layer: _table(experts, slots, key, layer) for layer in layers})
        update = update_of_layers(layers, [self.host_tables[layer] for layer in layers])
        self.kernels.commit_tables(update, self.tables, self.stream)
        self.ctx.drain(self.stream)

    def check_installed(self) -> None:
        """Every layer's live set holds its own tables, and its word has advanced."""
        words = to_host(self.tables.generation).tolist()
        for layer, table in self.host_tables.items():
            for name in ("start", "replicas", "cumulative"):
                contents = to_host(getattr(self.tables, name))[words[layer] & 1, layer]
                what = f"{name} of layer {layer} of {self.tables.layers}, generation {words[layer]}"
                require_equal("G10", contents, getattr(table, name), what)

    def route(self, layer: int, tokens: int) -> None:
        """Every kernel over one batch."""
        ctx, experts, table = self.ctx, self.tables.experts, self.host_tables[layer]
        generator = _generator(self.key, tokens, layer)
        ids = torch.randint(-1, experts + 1, (tokens,), generator=generator, dtype=torch.int32)
        near, salt = ctx.copy_of(ids), Salt(layer % 5, layer, self.key)
        rows = torch.tensor([tokens // TOP_K - 1], dtype=torch.int32)
        place = (salt.rank, salt.layer, salt.step)
        launches: dict[
            str, tuple[Callable[[routing_tables.RoutingOutput], None], tuple[Tensor, Tensor]]
        ] = {
            "hashed": (
                lambda out: self.kernels.route_and_count(
                    near, self.tables, salt, out.slots, out.counts, self.stream
                ),
                route_hashed(ids, table, *place),
            ),
            "apportioned": (
                lambda out: self.kernels.route_apportioned(
                    near,
                    self.tables,
                    ctx.copy_of(table.cumulative),
                    salt,
                    *_outputs(out),
                    self.stream,
                ),
                route_apportioned(ids, table, salt.rank, salt.layer),
            ),
        }
        for name, (launch, expected) in launches.items():
            self.judge("G4", name, launch, ids, expected)
        for group in (None, self.group(ids, layer)):
            copied = group and GroupCounts(ctx.copy_of(group.total), ctx.copy_of(group.before))
            expected = route_levelled(ids, table, self.tables.ranks, salt.rank, layer, group)
            name = "levelled in a group" if group else "levelled"
            launch = partial(self.levelled, near, salt, copied)
            self.judge("G13", name, launch, ids, expected)
        for rule, reference in (
            (RowHash(TOP_K, ctx.copy_of(rows)), RowHash(TOP_K, rows)),
            (BlockTurns(self.key % 7), BlockTurns(self.key % 7)),
        ):
            launch = partial(self.by_rule, rule, near, layer)
            self.judge("G8", str(reference), launch, ids, route_by_rule(ids, table, reference))

    def group(self, ids: Tensor, layer: int) -> GroupCounts:
        """Counts of a group that the batch is part of."""
        experts = self.tables.experts
        generator = _generator(self.key, layer, 2)
        before, after = torch.randint(0, 99, (2, experts), generator=generator, dtype=torch.int32)
        return GroupCounts(before + count_experts(ids, experts) + after, before)

    def levelled(
        self,
        ids: Tensor,
        salt: Salt,
        group: GroupCounts | None,
        out: routing_tables.RoutingOutput,
    ) -> None:
        """One pass."""
        self.kernels.route_levelled(ids, self.tables, salt, group, *_outputs(out), self.stream)

    def by_rule(
        self, rule: ReplicaRule, ids: Tensor, layer: int, out: routing_tables.RoutingOutput
    ) -> None:
        """One pass."""
        self.kernels.route_by_rule(rule, ids, self.tables, layer, *_outputs(out), self.stream)

    def judge(
        self,
        clause: str,
        name: str,
        launch: Callable[[routing_tables.RoutingOutput], None],
        ids: Tensor,
        expected: tuple[Tensor, Tensor],
    ) -> None:
        """Launch, and compare."""
        out = routing_tables.empty_output(self.ctx, ids.numel(), self.tables.experts)
        launch(out)
        self.ctx.drain(self.stream)
        tables = self.tables
        what = f"{name}, {ids.numel()} ids of {tables.experts} experts in {tables.slots} slots"
        require_equal(clause, out.slots, expected[0], f"{what}: slots")
        require_equal(clause, out.counts, expected[1], f"{what}: counts")

    def count_and_solve(self, layer: int, tokens: int) -> None:
        """Counts of a skewed batch, and the shares that level them; those of odd layers are the
        load of a window that 32 bits do not hold."""
        experts = self.tables.experts
        generator = _generator(self.key, tokens, layer, 1)
        ids = (torch.rand(tokens, generator=generator) ** 3 * experts).int()
        out = self.ctx.empty((experts,), torch.int32)
        self.kernels.count(self.ctx.copy_of(ids), out, self.stream)
        counted = count_experts(ids, experts)
        load = counted.long() << (WINDOW_BITS if layer % 2 else 0)
        shares = self.ctx.empty((self.tables.slots,), torch.int32)
        operand = self.ctx.copy_of(load)
        self.kernels.solve_shares(operand, self.tables, layer, shares, self.stream)
        self.ctx.drain(self.stream)
        what = f"{tokens} ids of {experts} experts"
        require_equal("G4", out, counted.int(), f"count of {what}")
        require_equal("G11", operand, load, "the load that was solved")
        expected = solve_cumulative(load, self.host_tables[layer], self.tables.ranks)
        require_equal("G4", shares, expected, f"shares for {what} on {self.tables.ranks} ranks")


def _outputs(out: routing_tables.RoutingOutput) -> tuple[Tensor, Tensor]:
    return out.slots, out.counts


def _play(ctx: RankContext, program: Program) -> Play:
    """A commit of all layers, one of some, in no order; then batches on the last and the first."""
    stream = ctx.accelerator.stream(Role.COMPUTE)
    for step in program.steps:
        experts, slots, ranks, layers, tokens, key = (int(number) for number in step.args)
        live = routing_tables.zeroed_tables(ctx, layers, experts, slots, ranks)
        model = _LargeModelRunner(ctx, stream, live, {}, key)
        everyone = torch.randperm(layers, generator=_generator(key, layers)).tolist()
        model.install(everyone, key)
        model.install(everyone[: (layers + 1) // 2], key + 1)
        model.check_installed()
        for layer in {everyone[0], everyone[-1]}:
            model.route(layer, tokens)
            model.count_and_solve(layer, tokens)
            yield NEXT


def _checksum_programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.integers(0, 255).map(
        lambda key: make_program([Step("checksum", (length, key)) for length in CHECKSUM_BYTES])
    )


def random_bytes(length: int, key: int) -> Tensor:
    """uint8 [length], the same ones on every machine."""
    return torch.randint(0, 256, (length,), generator=_generator(key, length), dtype=torch.uint8)


@lru_cache(maxsize=64)
def _expected_checksum(length: int, key: int) -> int:
    return as_int64(checksum(random_bytes(length, key)))


def _play_checksums(ctx: RankContext, program: Program) -> Play:
    stream, checksums = ctx.accelerator.stream(Role.COMPUTE), []
    for step in program.steps:
        length, key = (int(number) for number in step.args)
        data, out = ctx.copy_of(random_bytes(length, key)), ctx.empty((1,), torch.int64)
        ctx.accelerator.kernels.checksum(data, out, stream)
        checksums.append((length, key, data, out))
        yield NEXT
    ctx.drain(stream)
    for length, key, _, out in checksums:
        require(
            "G4",
            int(to_host(out)) == _expected_checksum(length, key),
            f"the checksum of {length} bytes",
        )


LARGE_MODELS = (
    Property(
        name="kernels-equal-the-reference-at-the-sizes-of-models",
        family=FAMILY,
        clauses=("G4", "G8", "G10", "G13", "G11"),
        claim="Hundreds of experts, tens of ranks, updates of many layers, thousands of tokens.",
        programs=_programs,
        play=_play,
        large=True,
    ),
    Property(
        name="checksums-equal-the-reference-at-any-length",
        family=FAMILY,
        clauses=("G4",),
        claim="So do checksums of megabytes, at chunk borders and beside them.",
        programs=_checksum_programs,
        play=_play_checksums,
        large=True,
    ),
)
