"""Mutants of family *kernels*.

Those that replace a kernel check its operands like the healthy ones: one behaviour is broken (G11).
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.mutation import AnyKernels, Mutation
from conformance.mutants.subjects import device_with
from torch import Tensor

from equipoise import _native
from equipoise.backends.virtual.kernels import VirtualKernels
from equipoise.backends.virtual.stream import VirtualGraph, own_stream
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import RoutingTable
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash, route_by_rule
from equipoise.hal.stream import Stream
from equipoise.hal.support.validation import (
    check_checksum,
    check_count,
    check_group,
    check_routing,
    check_rule,
    check_shares,
    check_update,
)


class WordByWord(VirtualKernels):
    """Routing looks at the generation word again for every array."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        check_routing(ids, tables, salt.layer, slots, counts)

        def steps() -> Iterator[None]:
            start, _, _ = self.arrays(tables, self.live(tables, salt.layer))
            yield
            _, replicas, cumulative = self.arrays(tables, self.live(tables, salt.layer))
            place = (salt.rank, salt.layer, salt.step)
            _native.route_hashed(ids, start, replicas, cumulative, *place, slots, counts)

        own_stream(stream).perform(steps)


class WordFirst(VirtualKernels):
    """A commit writes the word, then fills the set."""

    def parts_of_commit(
        self, update: TableUpdate, tables: Tables, place: int
    ) -> tuple[Callable[[], object], ...]:
        *arrays, word = super().parts_of_commit(update, tables, place)
        return word, *arrays


class TablesAtTheCall(VirtualKernels):
    """A commit of tables happens at the call, ahead of the weights that it belongs to."""

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        check_update(update, tables)
        for place in range(len(update.layers)):
            for part in self.parts_of_commit(update, tables, place):
                part()


class CountWaitsForStream(AnyKernels):
    """Counting waits until the stream has drained."""

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        super().count(ids, counts, stream)
        stream.synchronize(1.0)


class CopiesIdsAtCall(AnyKernels):
    """Routing takes a copy of the ids at the call."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        check_routing(ids, tables, salt.layer, slots, counts)  # a copy would hide strides
        super().route_and_count(ids.clone(), tables, salt, slots, counts, stream)


class ChecksumsWholeWords(AnyKernels):
    """A checksum leaves out the last bytes that fill no word."""

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        check_checksum(data, out)
        flat = data.reshape(-1).view(torch.uint8)
        super().checksum(flat[: flat.numel() // 4 * 4], out, stream)


class IgnoresSolvedShares(AnyKernels):
    """An apportioned pass uses the shares of the table instead of its argument."""

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
        check_routing(ids, tables, salt.layer, slots, counts)
        check_shares(cumulative, tables)
        shares = tables.cumulative[int(tables.generation[salt.layer]) & 1, salt.layer]
        super().route_apportioned(ids, tables, shares, salt, slots, counts, stream)


class GroupsBeginAtTheFirstQuota(AnyKernels):
    """A levelled pass forgets the rows of the ranks before this one."""

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
        check_group(group, tables)
        alone = group and GroupCounts(group.total, torch.zeros_like(group.before))
        super().route_levelled(ids, tables, salt, alone, slots, counts, stream)


class LevelledRanksRoundAlike(AnyKernels):
    """The rank does not enter the rounding of a levelled pass."""

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
        alike = dataclasses.replace(salt, rank=0)
        super().route_levelled(ids, tables, alike, group, slots, counts, stream)


class OneRank(VirtualKernels):
    """The rank does not enter the hash."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        alike = dataclasses.replace(salt, rank=0)
        super().route_and_count(ids, tables, alike, slots, counts, stream)


class NegativeIsLast(VirtualKernels):
    """Ids below 0 count from the end, as indices of Python do."""

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        check_count(ids, counts)
        experts = counts.numel()

        def program() -> None:
            wrapped_ids = torch.where((ids < 0) & (ids >= -experts), ids + experts, ids)
            _native.count_experts(wrapped_ids, counts)

        stream.launch(program)


class PaddingIsRouted(AnyKernels):
    """Padding is sent to the last slot there is."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        super().route_and_count(ids, tables, salt, slots, counts, stream)
        stream.launch(lambda: slots.clamp_(max=tables.slots - 1))


class RuleWordByWord(VirtualKernels):
    """A pass by a rule looks at the generation word again for every array."""

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
        check_routing(ids, tables, layer, slots, counts)
        check_rule(rule, tables)

        def steps() -> Iterator[None]:
            start, _, _ = self.arrays(tables, self.live(tables, layer))
            yield
            _, replicas, cumulative = self.arrays(tables, self.live(tables, layer))
            slots_and_counts = route_by_rule(ids, RoutingTable(start, replicas, cumulative), rule)
            slots.copy_(slots_and_counts[0])
            counts.copy_(slots_and_counts[1])

        own_stream(stream).perform(steps)


class IgnoresRankOffset(AnyKernels):
    """All ranks begin their turns at the first replica."""

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
        alike = BlockTurns(0) if isinstance(rule, BlockTurns) else rule
        super().route_by_rule(alike, ids, tables, layer, slots, counts, stream)


class HashesElementsForRows(AnyKernels):
    """vLLM's hash takes the element's place for its row's."""

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
        single = RowHash(1, rule.rows) if isinstance(rule, RowHash) else rule
        super().route_by_rule(single, ids, tables, layer, slots, counts, stream)


class CountsEveryRow(AnyKernels):
    """Rows that only fill a batch up are counted too."""

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
        super().route_by_rule(rule, ids, tables, layer, slots, counts, stream)
        self.count(ids, counts, stream)


class BlocksOf512(AnyKernels):
    """Turns begin anew after 512 elements."""

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
            super().route_by_rule(rule, ids, tables, layer, slots, counts, stream)
            return
        for number, (some, out) in enumerate(
            zip(torch.split(ids, 512), torch.split(slots, 512), strict=True)
        ):
            block_rule = BlockTurns(rule.offset + number)
            super().route_by_rule(block_rule, some, tables, layer, out, counts, stream)
        self.count(ids, counts, stream)


class RunningCapture(VirtualGraph):
    """What is captured runs as well."""

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        super().capture(stream, program)
        self.replay(stream)


class OneReplay(VirtualGraph):
    """A graph is used up by its first replay."""

    def replay(self, stream: Stream) -> None:
        super().replay(stream)
        self._ops = ()


VALUES = "kernels-equal-the-reference"
RULES = "kernels-keep-the-rules-of-other-engines"
RULED = "a-pass-by-a-rule-reads-one-generation"
SALTED = "rank-and-layer-enter-the-routing-hash"
COMMITTED = "a-commit-of-tables-writes-the-word-last"
ROUTED = "a-routing-pass-reads-one-generation"
TOGETHER = "tables-and-weights-of-a-layer-change-together"
GRAPHS = "a-graph-runs-at-its-replays-only"
FOLLOWING = "kernels-follow-their-stream"
LOCKED = "a-captured-lock-hands-over-at-every-replay"
REPLAYED = "a-graph-replays-on-the-stream-it-is-given"
LARGE = "kernels-equal-the-reference-at-the-sizes-of-models"
MACHINE = "accelerator-state-machine-matches-its-model"
MUTATIONS = (
    Mutation(
        name="counting-waits-for-the-stream",
        clause="G3",
        broken="A kernel drains its stream before it returns.",
        property=FOLLOWING,
        kernels=CountWaitsForStream,
    ),
    Mutation(
        name="ids-are-copied-at-the-call",
        clause="G3",
        broken="Routing reads what the ids were when it was issued, or captured.",
        property=FOLLOWING,
        kernels=CopiesIdsAtCall,
    ),
    Mutation(
        name="a-checksum-ends-with-the-last-whole-word",
        clause="G4",
        broken="The last one to three bytes are left out.",
        property=VALUES,
        kernels=ChecksumsWholeWords,
        # There, too, lengths are no multiples of four.
        also=("checksums-equal-the-reference-at-any-length",),
    ),
    Mutation(
        name="solved-shares-are-ignored",
        clause="G4",
        broken="Quotas follow the table's shares, not those that were solved for this batch.",
        property=VALUES,
        kernels=IgnoresSolvedShares,
    ),
    Mutation(
        name="a-group-begins-at-the-first-quota",
        clause="G13",
        broken="All ranks of a group send their first rows to the first replica.",
        property=VALUES,
        kernels=GroupsBeginAtTheFirstQuota,
        # Groups are among them, too.
        also=(LARGE,),
    ),
    Mutation(
        name="levelled-ranks-round-alike",
        clause="G13",
        broken="All ranks round the quotas of a levelled batch in the same direction.",
        property=VALUES,
        kernels=LevelledRanksRoundAlike,
        also=(LARGE,),
    ),
    Mutation(
        name="padding-goes-to-a-real-slot",
        clause="G6",
        broken="Padding is sent to the last slot.",
        property=VALUES,
        kernels=PaddingIsRouted,
        # The same kernels, on batches that hold padding, too.
        also=(LARGE,),
    ),
    Mutation(
        name="all-ranks-begin-at-the-first-replica",
        clause="G8",
        broken="TensorRT-LLM's rule is kept without the rank's offset.",
        property=RULES,
        kernels=IgnoresRankOffset,
    ),
    Mutation(
        name="blocks-are-smaller",
        clause="G8",
        broken="TensorRT-LLM's turns begin anew after 512 elements.",
        property=RULES,
        kernels=BlocksOf512,
        # The same rules, on larger batches.
        also=(LARGE,),
    ),
    Mutation(
        name="the-elements-of-a-row-part",
        clause="G8",
        broken="vLLM's hash takes the number of the element for the number of its row.",
        property=RULES,
        kernels=HashesElementsForRows,
        # The same rules, on larger batches.
        also=(LARGE,),
    ),
    Mutation(
        name="rows-that-fill-up-are-counted",
        clause="G8",
        broken="All rows are counted, not the first ones only.",
        property=RULES,
        kernels=CountsEveryRow,
        # The same rules, on larger batches.
        also=(LARGE,),
    ),
)
MUTANTS = (
    *(mutation.on_virtual() for mutation in MUTATIONS),
    Mutant(
        name="the-word-is-read-for-every-array",
        clause="G1",
        broken="A routing pass mixes arrays of two generations (vLLM #55228).",
        property=ROUTED,
        subject=device_with(kernels=WordByWord),
    ),
    Mutant(
        name="the-word-is-written-first",
        clause="G2",
        broken="A generation is announced before its tables are filled (vLLM #55228).",
        property=COMMITTED,
        subject=device_with(kernels=WordFirst),
        # A routing pass is a reader of the tables like any other.
        also=(ROUTED, RULED),
    ),
    Mutant(
        name="tables-change-at-the-call",
        clause="V3",
        broken="Tables change on the host while their weights wait on the stream (vLLM #55228).",
        property=TOGETHER,
        subject=device_with(kernels=TablesAtTheCall),
        # Commits at the call overlap reads that they must come after.
        also=(
            COMMITTED,
            ROUTED,
            RULED,
            MACHINE,
        ),
    ),
    Mutant(
        name="all-ranks-choose-alike",
        clause="G5",
        broken="The rank does not enter the hash, so that all ranks pick one replica at a time.",
        property=SALTED,
        subject=device_with(kernels=OneRank),
        # The rank is a part of the reference.
        also=(VALUES, LARGE),
    ),
    Mutant(
        name="negative-ids-count-from-the-end",
        clause="G6",
        broken="Padding of -1 is counted for the last expert.",
        property=VALUES,
        subject=device_with(kernels=NegativeIsLast),
    ),
    Mutant(
        name="a-rule-reads-the-word-for-every-array",
        clause="G1",
        broken="A pass by another engine's rule mixes arrays of two generations (vLLM #55228).",
        property=RULED,
        subject=device_with(kernels=RuleWordByWord),
    ),
    Mutant(
        name="capturing-runs",
        clause="B7",
        broken="What is captured runs at once, too.",
        property=GRAPHS,
        subject=device_with(graph=RunningCapture),
        # What runs while it is captured takes a signal, or waits for one; or is counted.
        also=(
            LOCKED,
            REPLAYED,
            "a-graph-holds-hundreds-of-launches",
        ),
    ),
    Mutant(
        name="a-graph-replays-once",
        clause="B7",
        broken="The second replay runs nothing.",
        property=GRAPHS,
        subject=device_with(graph=OneReplay),
        # All of them replay a graph of their own more than once.
        also=(
            LOCKED,
            FOLLOWING,
            REPLAYED,
            "a-graph-holds-hundreds-of-launches",
        ),
    ),
)
