"""What a play must show, and what it may never show."""

from collections.abc import Callable, Iterator

from exploration.channel.case import Case, Fault, Manner
from exploration.channel.run_case import Observation, Record, expected

from equipoise.hal.errors import CommunicatorFailed, MessageMismatch, StreamError

EXPLAINED = (CommunicatorFailed, MessageMismatch, StreamError)


def whole(case: Case, record: Record) -> Iterator[str]:
    """What is read of a step is what was sent, all of it, unless the read raised, or `settle`."""
    for observation in record.observations:
        sent_values = expected(case, observation.rank, observation.step)
        matching = {name: sent_values[name] for name in observation.values}
        if observation.values != matching and not _was_reported(observation, record):
            where = f"rank {observation.rank}, step {observation.step}"
            yield f"{where}: read {observation.values}, sent was {sent_values}"


def read(case: Case, record: Record) -> Iterator[str]:
    """Every step is read that a reader does not skip, once, in order; without a fault."""
    if case.fault is not Fault.NONE:
        return
    for rank in range(case.parts, 2 * case.parts):
        manners = case.manners if rank == case.parts else case.manners[::-1]
        expected_steps = [n for n, manner in enumerate(manners) if manner is not Manner.SKIPS]
        steps = [s.step for s in record.observations if s.rank == rank and len(s.values) == 2]
        if steps != expected_steps:
            yield f"rank {rank} read steps {steps} of {expected_steps}"


def ends(case: Case, record: Record) -> Iterator[str]:
    """All hosts come to an end, and without a fault nothing is left on the network."""
    unfinished = [r for r in record.stuck_ranks if not (case.fault is Fault.KILLED and r == 0)]
    if unfinished:
        yield f"ranks {unfinished} are stuck"
    if record.pending_operations and case.fault is Fault.NONE:
        yield f"{record.pending_operations} operations are left"


def explained(case: Case, record: Record) -> Iterator[str]:
    """Nobody raises where nothing is wrong, and what is raised says what was."""
    errors = [*record.errors.values(), *(e for s in record.observations for e in s.errors)]
    if case.fault is Fault.NONE and errors:
        yield f"raised without a fault: {errors[0]!r}"
    for error in errors:
        if not isinstance(error, EXPLAINED):
            yield f"raised for what nobody did: {error!r}"


def again(case: Case, record: Record) -> Iterator[str]:
    """A read that has raised raises the same at the next."""
    for observation in record.observations:
        if observation.errors and (
            len(observation.errors) != 2 or observation.errors[0] is not observation.errors[1]
        ):
            yield f"rank {observation.rank}, step {observation.step}: {observation.errors!r}"


def steady(case: Case, record: Record) -> Iterator[str]:
    """One message a step and edge, and no buffer but those of the beginning."""
    new_buffers = {rank: count for rank, count in record.new_buffers.items() if count}
    if new_buffers:
        yield f"buffers were made by {new_buffers}"
    if case.fault is Fault.NONE and set(record.messages.values()) - {len(case.rows)}:
        yield f"{record.messages} messages for {len(case.rows)} steps"


def lent(case: Case, record: Record) -> Iterator[str]:
    """What a sender keeps of what it was lent stays as it wrote it, until it lets go."""
    for actual, written_values in record.lent_reads:
        if actual != written_values:
            yield f"a sender wrote {written_values} where it was lent, and read {actual}"


PROPERTIES: dict[str, Callable[[Case, Record], Iterator[str]]] = {
    "whole": whole,
    "read": read,
    "ends": ends,
    "explained": explained,
    "again": again,
    "steady": steady,
    "lent": lent,
}


def violations(case: Case, record: Record) -> dict[str, str]:
    """The first violation of each property, by name."""
    first_by_property = {name: next(rule(case, record), "") for name, rule in PROPERTIES.items()}
    return {name: what for name, what in first_by_property.items() if what}


def _was_reported(observation: Observation, record: Record) -> bool:
    """Whether the reader was told, by its read or before its host came to an end."""
    return bool(observation.errors) or observation.rank in record.errors
