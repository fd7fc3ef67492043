"""Family *kernels*: other engines' rules for choosing a replica."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance import routes
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, equal, told
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.kernels import Tables
from equipoise.hal.routing import RoutingTable
from equipoise.hal.routing_rules import BlockTurns, RowHash, Rule, route_by_rule
from equipoise.hal.stream import Role, Stream

LAYERS = 2
EXPERTS = 3
SLOTS = 7
HELD = (0, 1, 0, 2, 1, 0, 0)
"""Runs of four, two and one: of three, blocks of 1024 would make no difference."""
REPEATS = (1, 40, 400)
"""How often the ids of a step follow each other: blocks are 1024 elements long."""
ROWS = (0, 3, 2**31 - 1)
"""How many rows are counted."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Tables of every layer, then passes by both rules, and further tables."""
    layers = st.integers(0, LAYERS - 1)
    first = st.tuples(*(_tables(st.just(layer)) for layer in range(LAYERS)))
    steps = st.lists(
        st.one_of(_row_hash(layers), _block_turns(layers), _tables(layers)), min_size=1
    )
    return st.builds(lambda first, steps: program([*first, *steps[:6]]), first, steps)


def _tables(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    turn = st.integers(0, SLOTS - 1)
    return st.builds(lambda layer, turn: Step("table", (layer, turn)), layer, turn)


def _table(turn: int) -> RoutingTable:
    """All shares on one replica, since the rules read none."""
    held = [*HELD[turn:], *HELD[:turn]]
    return routes.table(held, [held.index(expert) == slot for slot, expert in enumerate(held)])


def _row_hash(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    return st.builds(
        lambda layer, top_k, rows, repeat, ids: Step(
            "row_hash", (layer, top_k, rows, repeat, *ids)
        ),
        layer,
        st.integers(1, 4),
        st.sampled_from(ROWS),
        st.sampled_from(REPEATS),
        _ids(),
    )


def _block_turns(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    return st.builds(
        lambda layer, offset, repeat, ids: Step("block_turns", (layer, offset, repeat, *ids)),
        layer,
        st.integers(0, 4),
        st.sampled_from(REPEATS),
        _ids(),
    )


def _ids() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-1, EXPERTS), max_size=8)


@dataclass
class _Desk:
    """Kernels on the device, and the same tables on the host, by layer."""

    bench: Bench
    stream: Stream
    live: Tables
    known: dict[int, RoutingTable] = field(default_factory=dict)

    def do(self, step: Step) -> None:
        """Run one kernel to its end, and compare."""
        calls: dict[str, Callable[..., None]] = {
            "table": self.install,
            "row_hash": self.row_hash,
            "block_turns": self.block_turns,
        }
        calls[step.op](*step.args)

    def install(self, layer: int, turn: int) -> None:
        self.known[layer] = _table(turn)
        made = routes.update(layer, self.known[layer])
        self.bench.accelerator.kernels.commit_tables(made, self.live, self.stream)
        self.bench.drain(self.stream)

    def row_hash(self, layer: int, top_k: int, rows: int, repeat: int, *drawn: int) -> None:
        counted = torch.tensor([rows], dtype=torch.int32)
        rule = RowHash(top_k, self.bench.of(counted))
        self.judge(layer, rule, RowHash(top_k, counted), [*drawn] * repeat)

    def block_turns(self, layer: int, offset: int, repeat: int, *drawn: int) -> None:
        rule = BlockTurns(offset)
        self.judge(layer, rule, rule, [*drawn] * repeat)

    def judge(self, layer: int, rule: Rule, reference: Rule, drawn: list[int]) -> None:
        """First the padding, then every bit; `reference` is the same rule on the host."""
        ids = torch.tensor(drawn, dtype=torch.int32)
        out = routes.routed(self.bench, ids.numel(), EXPERTS)
        self.bench.accelerator.kernels.route_by_rule(
            rule, self.bench.of(ids), self.live, layer, out.slots, out.counts, self.stream
        )
        self.bench.drain(self.stream)
        slots, counts = route_by_rule(ids, self.known[layer], reference)
        self.judge_padding(ids, out.slots)
        equal("G8", out.slots, slots, f"{reference}: slots")
        equal("G8", out.counts, counts, f"{reference}: counts")

    def judge_padding(self, ids: Tensor, slots: Tensor) -> None:
        strays = told(slots)[(ids < 0) | (ids >= EXPERTS)]
        demand("G8", bool((strays == SLOTS).all()), f"padding goes to {strays.tolist()}")


def _play(bench: Bench, found: Program) -> Play:
    live = routes.tables(bench, LAYERS, EXPERTS, SLOTS, 1)
    desk = _Desk(bench, bench.accelerator.stream(Role.COMPUTE), live)
    for step in found.steps:
        desk.do(step)
        yield NEXT


RULES = Property(
    name="kernels-keep-the-rules-of-other-engines",
    family="kernels",
    clauses=("G8",),
    claim="Routing by a published rule gives that rule's slots and counts bit for bit.",
    programs=_programs,
    play=_play,
)
