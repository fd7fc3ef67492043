"""Property of family *addresses* about readers: streams whose own launches read the slots."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Shelf, plain, versions
from equipoise.hal.slots import Reader
from equipoise.hal.stream import Role

LONGEST = 12
"""Steps of a program, behind those that attach: only what comes later is ordered."""
STREAM = st.sampled_from(ROLES[:2])


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    reads = ("look", "replay") if traits.accelerator.graph_capture else ("look",)
    changes, by_reader = st.sampled_from(("write", "commit")), st.sampled_from((*reads, "detach"))
    attach = st.builds(lambda role: Step("attach", (role,)), STREAM)
    steps = st.one_of(
        st.builds(lambda op, role: Step(op, (role,)), changes, STREAM),
        st.builds(lambda op, reader: Step(op, (reader,)), by_reader, st.integers(0, 2)),
    )
    return st.builds(
        lambda first, then: program(_valid([*first, *then])),
        st.lists(attach, min_size=1, max_size=3),
        st.lists(steps, min_size=1, max_size=LONGEST),
    )


def _valid(steps: list[Step]) -> list[Step]:
    """Readers are named by their place among those that are attached, of which there are some."""
    attached, kept = 0, []
    for step in steps:
        if isinstance(step.args[0], int):
            if not attached:
                continue
            step = Step(step.op, (step.args[0] % attached,))
        attached += {"attach": 1, "detach": -1}.get(step.op, 0)
        kept.append(step)
    return kept


@dataclass
class _Desk:
    """One slot of one byte, which cannot be torn: what is read wrongly, is read in wrong order.

    A stream may be attached more than once.
    """

    place: Shelf
    version: int = 0
    readers: list[tuple[str, Reader]] = field(default_factory=list)
    due: list[tuple[str, Tensor, int]] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)

    def do(self, number: int, step: Step) -> None:
        """Make one call."""
        if step.op == "attach":
            self.attach(str(step.args[0]))
        elif step.op == "detach":
            self.detach(number, int(step.args[0]))
        elif step.op in ("look", "replay"):
            self.read(number, step.op, self.readers[int(step.args[0])][0])
        else:
            self.change(number, step.op, str(step.args[0]))

    def attach(self, role: str) -> None:
        reader = self.place.store.attach(self.place.bench.accelerator.stream(Role(role)))
        self.readers.append((role, reader))

    def detach(self, number: int, which: int) -> None:
        """Right behind a last look, which is still waited for."""
        role, reader = self.readers.pop(which)
        self.read(number, "look", role)
        reader.detach()

    def read(self, number: int, op: str, role: str) -> None:
        blob = self.place.look([0], role) if op == "look" else self.replay(role)
        self.due.append((f"step {number}: {role}", blob, self.version))

    def replay(self, role: str) -> Tensor:
        """What a graph replayed on the stream reads, which was captured at once before."""
        graph, stream = self.place.bench.accelerator.graph(), self.place.stream(role)
        (view,), blob = self.place.views(0), self.place.bench.empty((1,))
        graph.capture(stream, lambda: stream.launch(lambda: blob.copy_(view)))
        graph.replay(stream)
        self.graphs.append(graph)
        return blob

    def change(self, number: int, op: str, role: str) -> None:
        if op == "write":
            self.place.write([0], number, role)
        else:
            self.place.unpack([number], number, role)
            self.place.store.commit([(number, 0)], self.place.stream(role))
        self.version = number


def _play(bench: Bench, found: Program) -> Play:
    desk = _Desk(plain(bench, 1, len(found.steps) + 1, 1))
    for number, step in enumerate(found.steps, start=1):
        desk.do(number, step)
        yield NEXT
    bench.drain()
    for what, blob, version in desk.due:
        seen = versions(blob)
        demand("A12", seen == [version], f"{what} read version {seen[0]}, {version} was due")


PROPERTIES = (
    Property(
        name="attached-readers-and-commits-keep-the-order-of-issue",
        family="addresses",
        clauses=("A12",),
        claim="A commit comes after what readers launched before it, and before what comes later.",
        programs=_programs,
        play=_play,
    ),
)
