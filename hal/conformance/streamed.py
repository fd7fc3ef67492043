"""Part of family *progress*: operations and streams, without the host in between."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import NEXT, Bench, Play, Until, equal
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    Transfer,
    company,
    fit,
    issue,
    land,
    lone,
    numbers_of,
    operations,
    payload,
    perhaps_warm,
    warm_up,
)
from equipoise.hal.stream import Role, Stream

FAMILY = "progress"
MOST = 4
ROLES = tuple(role.value for role in Role)
BEFORE = 0x11
"""What buffers hold, and are set to late, before the operation may touch them."""


def _ordered(traits: Traits) -> str | None:
    return company(traits) or (None if traits.groups.stream_ordered else "stream_ordered")


def _ordered_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`message(source, target, nbytes)`, each followed by the roles that issue it: `on(s, t)`."""
    role = st.sampled_from(ROLES)
    roles = st.builds(lambda *pair: Step("on", pair), role, role)
    step = st.one_of(operations(traits, ("message",)), roles)

    def made(size: int, first: list[Step], steps: list[Step]) -> Program:
        return program([*first, *lone(fit(steps, size))], size)

    drawn = st.lists(step, min_size=1, max_size=2 * MOST)
    return st.builds(made, few(traits), perhaps_warm(), drawn)


def _play_ordered(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    warm_up(group, found.steps)
    roles = (ROLES[0], ROLES[0])
    transfers = []
    for number, step in enumerate(found.steps):
        if step.op == "on":
            roles = (str(step.args[0]), str(step.args[1]))
        elif step.op == "message" and bench.rank in numbers_of(step)[:2]:
            transfers.append(_issue_late(bench, group, (step, number), roles))
            yield NEXT
    yield from land(bench, transfers, "X6")


def _issue_late(
    bench: Bench, group: Communicator, order: tuple[Step, int], roles: tuple[str, str]
) -> Transfer:
    """Launch what writes the buffer last, and issue the message behind it."""
    source, target, nbytes = numbers_of(order[0])
    data = payload(order[1], source, target, nbytes)
    buffer, given = bench.filled((nbytes,), BEFORE), bench.of(data)
    stream = bench.accelerator.stream(Role(roles[bench.rank == target]))
    bench.disturb(stream)
    if bench.rank == target:
        stream.launch(lambda: buffer.fill_(BEFORE))
    else:
        stream.launch(lambda: buffer.copy_(given))
    with stream.current():
        if bench.rank == target:
            return Transfer(str(order[0]), group.irecv(buffer, source), ((buffer, data),))
        return Transfer(str(order[0]), group.isend(buffer, target), operands=(buffer, given))


def _awaited_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Operations, and `await(place, role)`: a stream waits for the operation in that place."""
    awaits = st.builds(
        lambda *args: Step("await", args), st.integers(0, MOST - 1), st.sampled_from(ROLES)
    )
    step = st.one_of(operations(traits), awaits)

    def made(size: int, steps: list[Step]) -> Program:
        valid = _placed(lone(fit(steps, size)))
        if traits.accelerator.streams == 1:  # such a stream may run launches inside the call
            valid = _awaits_last(valid)
        return program(valid, size)

    return st.builds(made, few(traits), st.lists(step, min_size=2, max_size=2 * MOST))


def _placed(steps: list[Step]) -> list[Step]:
    """Each *await* names the place of an operation before it."""
    kept: list[Step] = []
    for step in steps:
        if step.op == "await":
            issued = [place for place, earlier in enumerate(kept) if earlier.op != "await"]
            if not issued:
                continue
            step = Step("await", (issued[int(step.args[0]) % len(issued)], step.args[1]))
        kept.append(step)
    return kept


def _awaits_last(steps: list[Step]) -> list[Step]:
    """All operations first; places follow."""
    places = [place for place, step in enumerate(steps) if step.op != "await"]
    moved = {place: number for number, place in enumerate(places)}
    awaits = [s for s in steps if s.op == "await"]
    after = [Step("await", (moved[int(s.args[0])], s.args[1])) for s in awaits]
    return [steps[place] for place in places] + after


@dataclass
class _Copies:
    """What streams saw that had waited for an operation."""

    bench: Bench
    pairs: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)

    def take(self, transfer: Transfer, stream: Stream) -> None:
        """Copy the results behind the operation, on the stream."""
        transfer.work.wait(stream)
        for found, wanted in transfer.results:
            seen = self.bench.filled(found.shape, BEFORE, found.dtype)
            stream.launch(lambda seen=seen, found=found: seen.copy_(found))  # type: ignore[misc]
            self.pairs.append((seen, wanted, f"{transfer.what}, seen by a stream that waited"))

    def check(self) -> None:
        """Demand that all saw the end."""
        for seen, wanted, what in self.pairs:
            equal("X7", seen, wanted, what)


def _play_awaited(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    transfers: dict[int, Transfer] = {}
    copies = _Copies(bench)
    for number, step in enumerate(found.steps):
        if step.op != "await":
            if (made := issue(bench, group, step, number)) is not None:
                transfers[number] = made
        elif step.args[0] in transfers:
            stream = bench.accelerator.stream(Role(str(step.args[1])))
            copies.take(transfers[int(step.args[0])], stream)
        yield NEXT
    for transfer in transfers.values():
        yield Until(transfer.work.done, transfer.what)
    bench.drain()
    copies.check()


PROPERTIES = (
    Property(
        name="operations-come-after-what-the-current-stream-was-given",
        family=FAMILY,
        clauses=("X6",),
        claim="What was launched on the current stream before a message comes before the message.",
        programs=_ordered_programs,
        play=_play_ordered,
        needs=_ordered,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="a-stream-waits-for-an-operation-without-the-host",
        family=FAMILY,
        clauses=("X7",),
        claim="What a stream does after waiting sees the result; the host is not held up.",
        programs=_awaited_programs,
        play=_play_awaited,
        needs=company,
        ranks=Ranks.GROUP,
    ),
)
