"""Traffic: messages, rounds and collectives as steps, with what every rank is due.

`message(source, target, nbytes)` and `exchange(source, target, nbytes, ...)` name both ends;
collectives say how many elements a rank gives (to each, where it gives parts), a broadcast also
from whom. The steps of a program are issued in one order by all ranks.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, Parcel
from equipoise.hal.conformance.bench import Bench, Play, Until, demand, equal, finish
from equipoise.hal.conformance.collectives import SUMS, Call, Plain, due, noise, start, tame
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.work import Work

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SINGLE = ("message", *COLLECTIVES)
KINDS = ("exchange", *SINGLE)
RANKS = st.integers(0, 7)
"""Drawn before the size is known; `fit` makes ranks of them."""
ELEMENTS = (4, 1, 33)
LARGE = 50_000
"""Bytes that take a real network a while."""


def company(traits: Traits) -> str | None:
    """Needs a peer."""
    return None if max(traits.sizes) > 1 else "more than one rank"


def operations(traits: Traits, kinds: Sequence[str] = KINDS) -> st.SearchStrategy[Step]:
    """One operation, not yet fitted to a size."""
    nbytes = st.sampled_from(ELEMENTS if traits.controlled else (*ELEMENTS, LARGE))
    counts = st.sampled_from(ELEMENTS)
    message = st.tuples(RANKS, RANKS, nbytes)
    drawn = {
        "message": message,
        "exchange": st.lists(message, max_size=10).map(lambda all: sum(all, ())),
        "broadcast": st.tuples(counts, RANKS),
    }

    def one(kind: str) -> st.SearchStrategy[Step]:
        return st.builds(Step, st.just(kind), drawn.get(kind, st.tuples(counts)))

    return st.one_of([one(kind) for kind in kinds])


def between(traits: Traits, steps: st.SearchStrategy[list[Step]]) -> st.SearchStrategy[Program]:
    """Programs of these steps, fitted, for common sizes."""
    return st.builds(lambda size, drawn: program(fit(drawn, size), size), few(traits), steps)


def fit(steps: Iterable[Step], size: int) -> list[Step]:
    """The operations among `size` ranks; those that are impossible there are left out."""
    fitted = [_fit(step, size) for step in steps]
    return [step for step in fitted if step is not None]


def _fit(step: Step, size: int) -> Step | None:
    numbers = numbers_of(step)
    if step.op == "message":
        source, hop, nbytes = numbers
        if size == 1:
            return None
        return _with(step, (source % size, _after(source, hop, size), nbytes))
    if step.op == "exchange":
        pairs = {
            (source % size, _after(source, hop, size)): nbytes
            for source, hop, nbytes in triples(numbers)
            if size > 1
        }
        return _with(step, tuple(n for pair, nbytes in pairs.items() for n in (*pair, nbytes)))
    if step.op == "broadcast":
        return _with(step, (numbers[0], numbers[1] % size))
    return step


def _after(source: int, hop: int, size: int) -> int:
    return (source + 1 + hop % (size - 1)) % size


def _with(step: Step, numbers: tuple[int, ...]) -> Step:
    """The step with other numbers; words stay behind them."""
    words = tuple(arg for arg in step.args if isinstance(arg, str))
    return replace(step, args=(*numbers, *words))


def numbers_of(step: Step) -> list[int]:
    """The arguments that are numbers."""
    return [arg for arg in step.args if isinstance(arg, int)]


def triples(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, target, nbytes) of every blob of a round."""
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


WARM = Step("warm")
"""First of a program whose links are there before anything is issued."""


def perhaps_warm() -> st.SearchStrategy[list[Step]]:
    """What a program begins with: a message whose link is still to be made goes other ways than one
    that is launched at once."""
    return st.sampled_from(([], [WARM]))


def warm_up(group: Communicator, steps: Sequence[Step]) -> None:
    """Make the links of all messages, where the program begins so."""
    if WARM in steps[:1]:
        messages = (numbers_of(step) for step in steps if step.op == "message")
        group.warm([(source, target) for source, target, *_ in messages])


def lone(steps: Iterable[Step]) -> list[Step]:
    """At most one message or blob from a rank to another: nothing that order could mix up (P2)."""
    used: set[tuple[int, int]] = set()
    kept = []
    for step in steps:
        if step.op in ("message", "exchange"):
            fresh = [t for t in triples(numbers_of(step)) if t[:2] not in used]
            used.update(t[:2] for t in fresh)
            if step.op == "message" and not fresh:
                continue
            step = _with(step, tuple(n for triple in fresh for n in triple))
        kept.append(step)
    return kept


@dataclass(frozen=True)
class Transfer:
    """An operation that this rank has issued.

    Attributes:
        what: the operation in words.
        work: its handle.
        results: each buffer that it fills, and what must be there in the end.
        operands: the buffers that it reads, held as long as this is.
    """

    what: str
    work: Work
    results: tuple[tuple[Tensor, Tensor], ...] = ()
    operands: tuple[Tensor, ...] = field(default=(), repr=False)

    def check(self, clause: str) -> None:
        """Demand that everything is there."""
        for found, wanted in self.results:
            equal(clause, found, wanted, self.what)

    def land(self, bench: Bench, clause: str) -> Play:
        """Wait until it ended well, and check; to be used with `yield from`."""
        yield from finish(bench, self.work, self.what)
        self.check(clause)


def land(bench: Bench, transfers: Iterable[Transfer | None], clause: str) -> Play:
    """Land all of them in this order; to be used with `yield from`."""
    for transfer in transfers:
        if transfer is not None:
            yield from transfer.land(bench, clause)


def issue(bench: Bench, group: Communicator, step: Step, number: int) -> Transfer | None:
    """Issue this rank's part of step `number` of a program; None when it has none."""
    if step.op == "message":
        return _message(bench, group, step, number)
    if step.op == "exchange":
        return _exchange(bench, group, step, number)
    call = call_of(step, number)
    flight = start(group, call, Plain(bench))
    wanted = due(call, group.rank, group.size, tame)
    what = f"rank {group.rank}, step {number}: {call}"
    return Transfer(what, flight.works[0], ((flight.result, wanted),), (flight.operand,))


def call_of(step: Step, number: int) -> Call:
    """The collective that step `number` stands for."""
    dtype = torch.int32 if step.op in SUMS else torch.uint8
    numbers = numbers_of(step)
    source = numbers[1] if step.op == "broadcast" else 0
    return Call(step.op, dtype, (numbers[0],), source, number)


def payload(number: int, source: int, target: int, nbytes: int) -> Tensor:
    """What step `number` sends from one rank to another: uint8 [nbytes], on the host."""
    data = noise(nbytes, number, source, target)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _message(bench: Bench, group: Communicator, step: Step, number: int) -> Transfer | None:
    source, target, nbytes = numbers_of(step)
    if group.rank not in (source, target):
        return None
    data = payload(number, source, target, nbytes)
    what = f"rank {group.rank}, step {number}: {nbytes} bytes from {source} to {target}"
    if group.rank == target:
        out = bench.empty((nbytes,))
        return Transfer(what, group.irecv(out, source), ((out, data),))
    given = bench.of(data)
    return Transfer(what, group.isend(given, target), operands=(given,))


def _exchange(bench: Bench, group: Communicator, step: Step, number: int) -> Transfer:
    sends, receives, results = [], [], []
    for source, target, nbytes in triples(numbers_of(step)):
        data = payload(number, source, target, nbytes)
        if source == group.rank:
            sends.append(Parcel(target, bench.of(data)))
        elif target == group.rank:
            receives.append(Parcel(source, bench.empty((nbytes,))))
            results.append((receives[-1].blob, data))
    work = group.exchange(Exchange(tuple(sends), tuple(receives)))
    operands = tuple(parcel.blob for parcel in sends)
    return Transfer(f"rank {group.rank}, step {number}: exchange", work, tuple(results), operands)


@dataclass
class Handover:
    """Something that one host of a rank gives to the others, once."""

    given: threading.Event = field(default_factory=threading.Event)
    value: object = None

    def give(self, value: object = None) -> None:
        """From now on the others go on with it."""
        self.value = value
        self.given.set()

    def take(self, bench: Bench, what: str) -> Play:
        """Wait for it; bounded. To be used with `yield from`."""
        yield Until(self.given.is_set, what)
        demand("C8", self.given.wait(bench.patience), f"{what} never came")
        return self.value


def handover(bench: Bench, name: str) -> Handover:
    """The one of that name among the hosts of this rank."""
    found: Handover = bench.shared.setdefault(name, Handover())
    return found


def together(bench: Bench, *purposes: str) -> Play:
    """Communicators that the hosts of a rank share: {purpose: communicator}; host 0 opens."""
    opened = handover(bench, "communicators")
    if bench.host == 0:
        made: Mapping[str, Communicator] = {}
        for purpose in purposes:
            group = yield from bench.communicator(purpose)
            made = {**made, purpose: group}
        opened.give(made)
    return (yield from opened.take(bench, "the rank's communicators"))
