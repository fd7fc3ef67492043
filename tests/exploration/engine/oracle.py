"""What may never be seen: each property says in words where a record breaks it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations, groupby, pairwise

import numpy as np
from exploration.engine.case import Case, FaultKind
from exploration.engine.forward_model import HALF, Observation, mark
from exploration.engine.lane import Planted
from exploration.engine.records import RankRecord, Record

from equipoise.balancer.experts.engine.engine import PLANNING_STALL_FACTOR
from equipoise.balancer.experts.runtime.events import COMPLETED
from equipoise.hal.errors import CommunicatorError, StreamError, VoteOutcomeUnknown

Property = Callable[[Record], Iterator[str]]
ENDS_RANKS = frozenset(
    {
        FaultKind.STOPPED,
        FaultKind.KILLED,
        FaultKind.VOTE_RAISES,
        FaultKind.SOLVER_RAISES,
        FaultKind.STORE_CUT,
        FaultKind.STORE_LOST,
    }
)
"""Faults after which a rank stops; its peers cannot serve without it."""
PASSING = frozenset(
    {
        FaultKind.PLANNER_RAISES,
        FaultKind.BALLOT_LOST,
        FaultKind.HASTY_VOTE,
        FaultKind.OTHER_PLAN,
        FaultKind.OTHER_TABLES,
        FaultKind.BLOB_FLIPPED,
        FaultKind.STAGING_FLIPPED,
        FaultKind.WRITE_FLIPPED,
        FaultKind.SLOW,
    }
)
"""Faults that cost a rebalance or two, and leave everything whole."""
SETTLING = 3
"""Eager boundaries after which ranks that ended a rebalance apart are together again."""
REWRITES = frozenset({FaultKind.TRANSFER_RAISES, FaultKind.WRITE_FAILS})
"""The same where slots are rewritten in place: behind the decision there is no way back."""
BEHIND = ("a rank still drains an aborted rebalance", "a rank is still in the rebalance before")
"""Reasons for which a rank that comes late to a rebalance is left out of it, with all others."""
REASONS: dict[FaultKind, tuple[str, ...]] = {
    FaultKind.PLANNER_RAISES: ("planner failed",),
    FaultKind.TRANSFER_RAISES: ("transfer failed", "staged bytes differ"),
    FaultKind.BALLOT_LOST: ("no ballot",),
    FaultKind.HASTY_VOTE: ("no ballot",),
    FaultKind.OTHER_PLAN: ("plans differ",),
    FaultKind.OTHER_TABLES: ("tables differ",),
    FaultKind.BLOB_FLIPPED: ("staged bytes differ",),
    FaultKind.STAGING_FLIPPED: ("staged bytes differ",),
    FaultKind.MESSAGE_LOST: ("transfer failed", "staged bytes differ"),
    FaultKind.EXCHANGE_EXPIRES: ("transfer failed",),
}
"""What a fault may be aborted for."""


def one_generation(record: Record) -> Iterator[str]:
    """In one step all streams of all ranks route a layer by the same tables."""
    for (step, layer), observations in _by_layer(record).items():
        for what, distinct in (
            ("generations", {observation.generation for observation in observations}),
            ("tables", {observation.table for observation in observations}),
            ("shares", {observation.shares for observation in observations}),
        ):
            if len(distinct) > 1:
                yield f"step {step}, layer {layer}: {what} differ"


def right_weights(record: Record) -> Iterator[str]:
    """Every slot that the table names which the same stream read holds, whole, that expert."""
    for rank_record in record.rank_records:
        for observation in _valid(record, rank_record):
            expected = _expected(
                record.case, observation.layer, observation.table, observation.rank
            )
            first, second = (
                _read(expected, half) for half in (observation.first, observation.second)
            )
            if first != expected or second != expected:
                kind = "wrong" if first == second else "torn"
                where = f"step {observation.step}, rank {observation.rank}, {observation.reader}"
                yield f"{where}: layer {observation.layer} is {kind}"


def same_history(record: Record) -> Iterator[str]:
    """Ranks have the same installed behind each boundary, and end rebalances alike."""
    for one, other in combinations(record.rank_records, 2):
        for step, (mine, yours) in enumerate(zip(one.after, other.after, strict=False)):
            if mine != yours:
                yield f"boundary {step}: ranks {one.rank} and {other.rank} have other layouts"
                break
        ours, theirs = _outcomes(one), _outcomes(other)
        for number in ours.keys() & theirs.keys():
            if ours[number] != theirs[number]:
                yield f"rebalance {number}: {ours[number]} and {theirs[number]}"


def accounted(record: Record) -> Iterator[str]:
    """Every rebalance ends within bounds, and each abort is counted by its reason."""
    for rank_record in record.rank_records:
        outcomes = Counter(r.outcome for r in rank_record.reports if r.outcome not in COMPLETED)
        if outcomes != Counter(rank_record.aborts):
            yield (
                f"rank {rank_record.rank} counts {rank_record.aborts} "
                f"where rebalances ended {dict(outcomes)}"
            )
        numbers = [report.number for report in rank_record.reports]
        if len(numbers) != len(set(numbers)):
            yield f"rank {rank_record.rank} reports a rebalance twice"
        yield from _too_long(record, rank_record)


def explained(record: Record) -> Iterator[str]:
    """Rebalances abort for what went wrong and for nothing else; ranks stop only if one had to."""
    expected_reasons = {reason for fault in record.struck for reason in REASONS.get(fault.kind, ())}
    if record.case.max_stalled_steps < record.case.tail:
        expected_reasons.add("no progress in time")
    aborted = False
    for rank_record in record.rank_records:
        for reason in rank_record.aborts:
            aborted = True
            if not reason.startswith((*expected_reasons, *BEHIND)) and not _ranks_may_end(record):
                yield f"rank {rank_record.rank} aborts for {reason!r}"
        if rank_record.error is not None and not (
            _ranks_may_end(record) and _may_end(rank_record.error)
        ):
            yield f"rank {rank_record.rank} ends by {rank_record.error!r}"
    may_wait = record.case.max_stalled_steps >= record.case.tail and not record.case.in_place
    if record.struck == () and aborted and may_wait:
        yield "an abort without a fault"


def decided(record: Record) -> Iterator[str]:
    """What is committed was decided, and what was decided is committed by whoever serves on."""
    word = b"move" if record.case.in_place else b"commit"
    decisions = sum(decision.startswith(word) for decision in record.decisions.values())
    most = decisions * (record.case.shape.layers if record.case.in_place else 1)
    for rank_record in record.rank_records:
        changes = sum(a.placement != b.placement for a, b in pairwise(rank_record.after))
        if changes > most:
            yield f"rank {rank_record.rank} commits {changes} times where {decisions} were decided"
        last = rank_record.open is not None  # its vote may have ended behind the last boundary
        serves = not rank_record.rank_lost and rank_record.error is None
        if serves and not record.case.in_place and changes < decisions - last:
            yield (
                f"rank {rank_record.rank} commits {changes} times, though {decisions} were decided"
            )


def recovers(record: Record) -> Iterator[str]:
    """When faults that break nothing for good are over, rebalances commit again."""
    if record.armed or any(fault.kind not in PASSING for fault in record.struck):
        return
    settled = record.case.steps + (SETTLING if record.struck else 1)
    aborted = [
        r
        for rank_record in record.rank_records
        for r in rank_record.reports
        if r.outcome not in COMPLETED
    ]
    retry_steps = [report.step + SETTLING for report in aborted if report.opened_at < settled]
    for rank_record in record.rank_records:
        for report in rank_record.reports:
            if report.opened_at >= max([settled, *retry_steps]) and report.outcome not in COMPLETED:
                yield (
                    f"rank {rank_record.rank}: "
                    f"rebalance {report.number} still aborts: {report.outcome}"
                )


def no_hang(record: Record) -> Iterator[str]:
    """Somebody can always move, at the latest when deadlines strike; and there is an end."""
    if record.hang:
        yield record.hang


def nothing_left(record: Record) -> Iterator[str]:
    """What was launched and issued has ended, where nothing was lost for good."""
    whole = all(fault.kind in PASSING for fault in record.struck)
    if record.unfinished and not record.hang and whole:
        yield f"{record.unfinished} launches and operations never end"


PROPERTIES: dict[str, Property] = {
    "one-generation": one_generation,
    "right-weights": right_weights,
    "same-history": same_history,
    "accounted": accounted,
    "explained": explained,
    "decided": decided,
    "recovers": recovers,
    "no-hang": no_hang,
    "nothing-left": nothing_left,
}


def violations(record: Record) -> dict[str, str]:
    """The properties that the record breaks, each with the first place where it does."""
    first_by_property = {name: next(rule(record), "") for name, rule in PROPERTIES.items()}
    return {name: what for name, what in first_by_property.items() if what}


def _by_layer(record: Record) -> dict[tuple[int, int], list[Observation]]:
    by_layer: dict[tuple[int, int], list[Observation]] = defaultdict(list)
    for rank_record in record.rank_records:
        for observation in _valid(record, rank_record):
            by_layer[observation.step, observation.layer].append(observation)
    return by_layer


def _expected(case: Case, layer: int, table: bytes, rank: int) -> bytes:
    """The first (and the second) halves of the rank's slots of that layer; 0 of unnamed ones."""
    shape = case.shape
    words = np.frombuffer(table, dtype=np.int32).tolist()
    start, replicas = words[: shape.experts + 1], words[shape.experts + 1 :]
    marks = [0] * shape.slots
    for expert in range(shape.experts):
        for slot in replicas[start[expert] : start[expert + 1]]:
            marks[slot] = mark(layer, expert, shape.experts)
    size = shape.slots_per_rank
    return b"".join(bytes([marks[slot]]) * HALF for slot in range(rank * size, (rank + 1) * size))


def _read(expected: bytes, half: bytes) -> bytes:
    """Halves of slots; nobody looks at those that the table does not name."""
    return bytes(
        actual if expected_byte else 0 for expected_byte, actual in zip(expected, half, strict=True)
    )


def _outcomes(rank_record: RankRecord) -> dict[int, tuple[str, int]]:
    """How each rebalance ended: for what reason, and with how many bytes."""
    return {report.number: (report.outcome, report.bytes_moved) for report in rank_record.reports}


def _too_long(record: Record, rank_record: RankRecord) -> Iterator[str]:
    """No stage of a rebalance lasts longer than `max_stalled_steps`, and eager steps end what is
    healthy."""
    max_stalled_steps = record.case.max_stalled_steps
    for stage, boundaries in groupby(rank_record.stages):
        count = sum(1 for _ in boundaries)
        most = (
            max_stalled_steps if "/commit/" in stage else max_stalled_steps * PLANNING_STALL_FACTOR
        )
        if stage and count > most + 1:
            yield f"rank {rank_record.rank}: {stage} is voted on at {count} boundaries"
    if (
        rank_record.open is not None
        and not record.struck
        and rank_record.open[1] <= record.case.steps
    ):
        number, opened_at = rank_record.open
        yield f"rank {rank_record.rank}: rebalance {number}, opened at {opened_at}, has not ended"


def _ranks_may_end(record: Record) -> bool:
    ends = ENDS_RANKS | (REWRITES if record.case.in_place else frozenset())
    return any(fault.kind in ends for fault in record.struck)


def _valid(record: Record, rank_record: RankRecord) -> Iterator[Observation]:
    """Observations but those of void steps: a lock was poisoned, and the rank has stopped.

    Either it found that at the boundary after them, or it did not come there, because a peer whose
    write had failed too was gone before: no output of such a step has left the rank.
    """
    end = len(rank_record.after)
    if record.case.in_place and isinstance(
        rank_record.error, VoteOutcomeUnknown | CommunicatorError | StreamError
    ):
        end -= 1 + record.case.ahead
    return (observation for observation in rank_record.observations if observation.step < end)


def _may_end(error: BaseException) -> bool:
    """Fail-stop: by an error that says so."""
    return isinstance(error, VoteOutcomeUnknown | CommunicatorError | StreamError | Planted)
