"""Part of family *keepalive*: what a handle says after the end, however often it is asked."""

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, Until, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    SINGLE,
    Transfer,
    company,
    fit,
    handover,
    issue,
    land,
    lone,
    operations,
)
from equipoise.hal.conformance.unanswered import lonely, lonely_steps
from equipoise.hal.errors import CommunicatorFailed, ResultPending, StreamFailed
from equipoise.hal.stream import Role
from equipoise.hal.work import Work

FAMILY = "keepalive"
HOSTS = 2
MOST = 3
LOOKS = ("result", "done", "wait")


def _look(which: int, call: str, host: int) -> Step:
    return Step("look", (which, call), host=host)


def _looks(count: int) -> st.SearchStrategy[list[Step]]:
    """Questions to works by either host."""
    which, host = st.integers(0, count - 1), st.integers(0, HOSTS - 1)
    return st.lists(st.builds(_look, which, st.sampled_from(LOOKS), host), max_size=6)


def _ended_programs(traits: Traits) -> st.SearchStrategy[Program]:
    drawn = st.lists(operations(traits), min_size=1, max_size=MOST)

    def made(size: int, steps: list[Step], looks: list[Step]) -> Program:
        fitted = lone(fit(steps, size))
        valid = [look for look in looks if int(look.args[0]) < len(fitted)]
        return program([*fitted, *valid], size)

    return st.builds(made, few(traits), drawn, _looks(MOST))


def _play_ended(bench: Bench, found: Program) -> Play:
    """Host 0 issues, host 1 waits for the ends, then both ask."""
    issued, ended = handover(bench, "issued"), handover(bench, "ended")
    if bench.host == 0:
        issued.give((yield from _issue_all(bench, found)))
    transfers: dict[int, Transfer] = yield from issued.take(bench, "what host 0 issued")
    if bench.host == 1:
        yield from land(bench, transfers.values(), "K3")
        ended.give()
    yield from ended.take(bench, "the ends that host 1 waits for")
    stream = bench.accelerator.stream(Role.AUX)
    for step in found.of(bench.rank, bench.host):
        if step.op == "look" and step.args[0] in transfers:
            transfer = transfers[int(step.args[0])]
            _ask(transfer.work, str(step.args[1]), bench)
            transfer.check("K3")
            yield NEXT
    bench.drain(stream)


def _issue_all(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    transfers = {}
    for number, step in enumerate(found.steps):
        if step.op != "look" and (made := issue(bench, group, step, number)) is not None:
            transfers[number] = made
        yield NEXT
    return transfers


def _ask(work: Work, question: str, bench: Bench) -> None:
    """Ask a work that has ended well."""
    if question == "wait":
        work.wait(bench.accelerator.stream(Role.AUX))
    elif question == "done":
        demand("K3", work.done(), "a work that had ended says that it has not")
    else:
        work.result(0.0)


def _done_programs(traits: Traits) -> st.SearchStrategy[Program]:
    drawn = st.lists(operations(traits, SINGLE), min_size=1, max_size=MOST)
    return st.builds(lambda n, steps: program(lone(fit(steps, n)), n), few(traits), drawn)


def _play_done(bench: Bench, found: Program) -> Play:
    for transfer in (yield from _issue_all(bench, found)).values():
        raised = yield from after_done(bench, transfer.work, transfer.what)
        demand("K5", raised is None, f"{transfer.what} is done, yet result() gives {raised!r}")
        transfer.check("K5")


def _failed_programs(traits: Traits) -> st.SearchStrategy[Program]:
    def made(size: int, alone: Step, looks: list[Step]) -> Program:
        return program([alone, *looks], size)

    return st.builds(made, few(traits), lonely_steps(), _looks(1))


def _play_failed(bench: Bench, found: Program) -> Play:
    """Host 0 waits for the failure, then both ask."""
    failed = handover(bench, "failed")
    if bench.host == 0:
        group = yield from bench.communicator()
        op, made = lonely(bench, group, found.steps[0])
        raised = yield from after_done(bench, made, f"the failure of {op}")
        what = f"rank {bench.rank}: {op} is done, nobody answered it, and result() gives {raised!r}"
        demand("K5", _failure(raised), what)
        failed.give(made)
    work: Work = yield from failed.take(bench, "what failed")
    for step in found.of(bench.rank, bench.host):
        if step.op == "look":
            _ask_failed(bench, work, str(step.args[1]))
            yield NEXT


def after_done(bench: Bench, work: Work, what: str) -> Play:
    """What `result` raises, without any time, once `done` is true; to be used with `yield from`."""
    yield Until(work.done, what)
    if not work.done():  # on a real device nothing has waited yet
        attempt(lambda: work.result(bench.patience), CommunicatorFailed)
    return _asked(work)


def _asked(work: Work) -> Exception | None:
    return attempt(lambda: work.result(0.0), CommunicatorFailed, ResultPending)


def _failure(raised: Exception | None) -> bool:
    return isinstance(raised, CommunicatorFailed)


def _ask_failed(bench: Bench, work: Work, question: str) -> None:
    """Ask a work that has failed; what becomes of a stream that waits is judged by E10."""
    if question == "wait":
        stream = bench.accelerator.stream(Role.AUX)
        attempt(lambda: work.wait(stream), CommunicatorFailed, StreamFailed)
        attempt(lambda: bench.drain(stream), StreamFailed)
    elif question == "done":
        demand("K3", work.done(), "a work that had failed says that it has not ended")
    else:
        demand("K3", _failure(_asked(work)), "a work that had failed did not raise again")


PROPERTIES = (
    Property(
        name="a-work-may-be-asked-again-by-anyone-after-its-end",
        family=FAMILY,
        clauses=("K3",),
        claim="done, wait and result may be called any number of times from any thread.",
        programs=_ended_programs,
        play=_play_ended,
        needs=company,
        ranks=Ranks.GROUP,
        hosts=HOSTS,
    ),
    Property(
        name="done-means-that-the-result-is-there",
        family=FAMILY,
        clauses=("K5",),
        claim="Once done is true result returns at once, and everything has arrived.",
        programs=_done_programs,
        play=_play_done,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="a-failed-work-says-so-every-time",
        family=FAMILY,
        clauses=("K3", "K5"),
        claim="After a failure done is true, and result raises it to everyone who asks.",
        programs=_failed_programs,
        play=_play_failed,
        needs=company,
        ranks=Ranks.GROUP,
        hosts=HOSTS,
        pace=Pace.BRISK,
    ),
)
