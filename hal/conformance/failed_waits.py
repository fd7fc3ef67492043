"""Part of family *failures*: streams that wait for what fails."""

from functools import partial

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, Until, attempt, demand, told
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import company
from equipoise.hal.conformance.unanswered import lonely, lonely_steps
from equipoise.hal.errors import CommunicatorFailed, StreamFailed
from equipoise.hal.stream import Role, Stream

WAITING, LATE = Role.AUX, Role.COPY
"""The stream that waits for the operation, and one that comes when it has failed."""


def _released(traits: Traits) -> str | None:
    """On a device that cannot end an operation, a stream that waits for it stands for good."""
    on_device = traits.groups.stream_ordered and not traits.groups.abort
    return company(traits) or ("abort" if on_device else None)


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`lonely(...)`, then what the stream that waits for it is given: launches and recordings.

    Not a round: each rank answers in its own way what it expects, so that what nobody sends can
    still meet something else, and end in an error of the device, which the stream never loses.
    """
    alone = lonely_steps().filter(lambda step: step.args[0] != "exchange")
    after = st.lists(st.sampled_from((Step("launch"), Step("record"))), max_size=3)
    return st.builds(
        lambda size, alone, steps: program([alone, *steps], size),
        few(traits),
        alone,
        after,
    )


def _play(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    waiting = bench.accelerator.stream(WAITING)
    alone, *steps = found.steps
    op, work = lonely(bench, group, alone)
    what = f"rank {bench.rank}: a stream that waits for {op}, which fails,"
    refused = attempt(partial(work.wait, waiting), CommunicatorFailed)
    yield NEXT
    flag = bench.filled((1,), 0)
    for step in steps:
        _give(bench, waiting, step)
        yield NEXT
    yield Until(work.done, f"the failure of {op}")
    raised = attempt(partial(work.result, bench.patience), CommunicatorFailed)
    demand("P3", raised, f"rank {bench.rank}: {op}, which nobody answers, ended well")
    if group.capabilities.abort:
        group.abort()  # a device holds the stream until then: nobody else can end the operation
    if not refused:  # at the call it was not known yet
        failed = attempt(partial(bench.drain, waiting), StreamFailed)
        demand("E10", failed, f"{what} is said to have drained")
        cause = failed.__cause__ if failed is not None else None
        demand("E10", isinstance(cause, CommunicatorFailed), f"{what} blames {cause!r}")
        later = attempt(partial(waiting.launch, partial(flag.fill_, 1)), StreamFailed)
        demand("E10", later, f"{what} takes launches")
    late = bench.accelerator.stream(LATE)
    refused = attempt(partial(work.wait, late), CommunicatorFailed)
    demand("E10", refused, f"rank {bench.rank}: waiting for {op}, which has failed, raises nothing")
    late.launch(partial(flag.fill_, 2))
    bench.drain(late)
    demand("E10", int(told(flag)) == 2, "a stream that was refused a failed operation stands still")


def _give(bench: Bench, stream: Stream, step: Step) -> None:
    """The stream may have failed by now."""
    if step.op == "launch":
        attempt(partial(stream.launch, lambda: None), StreamFailed)
    else:
        attempt(partial(stream.record, bench.accelerator.event()), StreamFailed)


PROPERTIES = (
    Property(
        name="a-stream-that-waits-for-what-fails-has-failed",
        family="failures",
        clauses=("E10", "P3"),
        claim="It never drains well; what has failed already is refused, and the stream goes on.",
        programs=_programs,
        play=_play,
        needs=_released,
        ranks=Ranks.GROUP,
        pace=Pace.BRISK,
    ),
)
