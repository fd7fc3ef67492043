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

LONGEST = 10
"""Steps of a program."""
STREAM = st.sampled_from(ROLES)


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    reads = ("look", "replay") if traits.accelerator.graph_capture else ("look",)
    ops = st.sampled_from(("attach", *reads, "write", "commit", "detach"))
    steps = st.lists(st.builds(lambda op, role: Step(op, (role,)), ops, STREAM), min_size=2)
    return steps.map(lambda drawn: program(_valid(drawn)[:LONGEST]))


def _valid(steps: list[Step]) -> list[Step]:
    """Only attached streams read, and only they are detached."""
    attached, kept = dict.fromkeys(ROLES, 0), []
    for step in steps:
        role = str(step.args[0])
        if step.op in ("look", "replay", "detach") and not attached[role]:
            continue
        attached[role] += {"attach": 1, "detach": -1}.get(step.op, 0)
        kept.append(step)
    return kept


@dataclass
class _Desk:
    """One slot of one byte, which cannot be torn; so whatever else is read, is in the wrong order.

    A stream may be attached more than once; detaching ends the reader that came first.
    """

    place: Shelf
    version: int = 0
    readers: dict[str, list[Reader]] = field(default_factory=dict)
    due: list[tuple[str, Tensor, int]] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)

    def do(self, number: int, step: Step) -> None:
        """Make one call."""
        role = str(step.args[0])
        if step.op == "attach":
            # Only what is issued from now on is ordered: let the rest end.
            self.place.bench.drain()
            reader = self.place.store.attach(self.place.bench.accelerator.stream(Role(role)))
            self.readers.setdefault(role, []).append(reader)
        elif step.op == "detach":
            self.readers[role].pop(0).detach()
        elif step.op in ("look", "replay"):
            self.read(number, step.op, role)
        else:
            self.change(number, step.op, role)

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
    desk = _Desk(plain(bench, 1, LONGEST + 1, 1))
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
