"""Family *kernels*: tables and weights of a layer change together."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance import routes
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, told
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role, Stream

EXPERTS, SLOTS, SLOT_BYTES, TOKENS = 2, 3, 8, 8
FIRST = (0, 1, 0)
"""Placement at the beginning."""
MOST_STEPS = 8


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """New placements, committed on the reader's own stream or on another, and reads."""
    placement = st.lists(st.integers(0, EXPERTS - 1), min_size=SLOTS, max_size=SLOTS)
    role = st.sampled_from((Role.COMPUTE.value, Role.COPY.value))
    place = st.builds(lambda role, held: Step("place", (role, *held)), role, placement)
    steps = st.lists(st.one_of(place, st.just(Step("read"))), min_size=2, max_size=MOST_STEPS)
    return steps.map(lambda drawn: program(filter(_complete, drawn)))


def _complete(step: Step) -> bool:
    """Whether every expert has a slot."""
    return step.op == "read" or len(set(step.args[1:])) == EXPERTS


@dataclass
class _Layer:
    """Weights and tables of a layer on one rank; expert e's weights are e + 1 in every byte."""

    bench: Bench
    weights: Tensor
    store: SlotStore
    live: Tables
    ids: Tensor
    held: list[int] = field(default_factory=lambda: list(FIRST))
    kept: list[object] = field(default_factory=list)

    def stream(self, role: str) -> Stream:
        return self.bench.accelerator.stream(Role(role))

    def place(self, role: str, *held: int) -> Play:
        """Commit the slots that change, and the tables, between two reads."""
        stream, compute = self.stream(role), self.stream(Role.COMPUTE)
        moved = [slot for slot in range(SLOTS) if held[slot] != self.held[slot]]
        blob = self.bench.of(_weights(held)[moved]).reshape(-1)
        self.kept.append(blob)
        self.store.unpack(blob, range(len(moved)), stream)
        self.behind(stream, compute)
        yield NEXT
        self.store.commit(list(enumerate(moved)), stream)
        yield NEXT
        self.tables(held, stream)
        self.behind(compute, stream)
        self.held = list(held)

    def tables(self, held: tuple[int, ...], stream: Stream) -> None:
        made = routes.update(0, routes.table(held, [1] * SLOTS))
        self.kept.append(made)
        self.bench.accelerator.kernels.commit_tables(made, self.live, stream)

    def behind(self, later: Stream, earlier: Stream) -> None:
        """What is launched on `later` from now on comes after what is on `earlier`."""
        if later is not earlier:
            event = self.bench.accelerator.event()
            earlier.record(event)
            later.wait(event)

    def read(self) -> Tensor:
        """Route, then read a byte of the slot that each token is sent to."""
        compute = self.stream(Role.COMPUTE)
        out = routes.route(self.bench, self.ids, self.live, Salt(0, 0, 0), compute)
        seen = self.bench.empty((TOKENS, SLOT_BYTES))
        self.kept.append(out)

        def program() -> None:
            slots = out.slots.long().clamp(0, SLOTS - 1)
            torch.index_select(self.weights, 0, slots, out=seen)

        compute.launch(program)
        return seen


def _weights(held: tuple[int, ...]) -> Tensor:
    """uint8 [len(held), SLOT_BYTES]."""
    return torch.tensor(held, dtype=torch.uint8)[:, None].add(1).repeat(1, SLOT_BYTES)


def _layer(bench: Bench) -> _Layer:
    weights = bench.of(_weights(FIRST))
    layout = SlotLayout(tuple((Segment("weight", row),) for row in weights), staging=SLOTS)
    live = routes.tables(bench, 1, EXPERTS, SLOTS, 1)
    ids = bench.of(torch.arange(TOKENS, dtype=torch.int32) % EXPERTS)
    layer = _Layer(bench, weights, bench.accelerator.slot_store(layout), live, ids)
    layer.tables(FIRST, layer.stream(Role.COMPUTE))
    return layer


def _play(bench: Bench, found: Program) -> Play:
    layer, reads = _layer(bench), []
    for step in found.steps:
        if step.op == "read":
            reads.append(layer.read())
        else:
            yield from layer.place(str(step.args[0]), *(int(held) for held in step.args[1:]))
        yield NEXT
    bench.drain()
    due = (told(layer.ids) + 1).to(torch.uint8)
    for number, seen in enumerate(reads):
        wrong = (told(seen) != due[:, None]).any(1).nonzero().flatten().tolist()
        demand("V3", not wrong, f"read {number}: tokens {wrong} find another expert's weights")


TOGETHER = Property(
    name="no-token-finds-another-experts-weights",
    family="kernels",
    clauses=("V3",),
    claim="Between two reads, a layer's slots and its tables change together.",
    programs=_programs,
    play=_play,
)
