"""What the host of a rank does: the same in a world and in a process of its own."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from exploration.exchange import oracle
from exploration.exchange.case import Case
from helpers.rank_programs.tensor_patterns import same
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import GenerationMismatch
from equipoise.hal.stream import Role, Stream
from equipoise.pipeline.all_to_all.fixed_capacity import (
    FixedCapacityExchange,
    FixedCombineHandle,
    FixedDispatchHandle,
)
from equipoise.pipeline.all_to_all.formats import Batch, ReceivedRows
from equipoise.pipeline.all_to_all.status import StatusReadback, StepFitted, StepOverflowed

Ready = Callable[[], bool]
Empty = Callable[[int], Tensor]
"""uint8 [n] whose contents are junk."""
PARTS = 2
"""Launches in which results are read, so that others may come between."""


@dataclass
class RankReport:
    """What a rank saw.

    Attributes:
        wrong: by property, the first thing that was not as it should be.
        verdicts: in words, by step.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)

    def expect(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.setdefault(name, what)


@dataclass
class Script:
    """Plays a case on one rank.

    Attributes:
        case: what is played.
        rank: whose host this is.
        exchange: under test.
        accelerator: its streams.
        empty: memory for what a host makes and drops.
        report: what was seen.
    """

    case: Case
    rank: int
    exchange: FixedCapacityExchange
    accelerator: Accelerator
    empty: Empty
    report: RankReport = field(default_factory=RankReport)

    def play(self) -> Generator[Ready, None, None]:
        """All steps; each yield is a place where others may move."""
        pending: list[tuple[int, StatusReadback]] = []
        for step, batches in enumerate(self.case.steps):
            for first in range(0, len(batches), 2):
                yield from self._pair(step, range(first, min(first + 2, len(batches))))
            yield from self._take(pending)
            judge = self.accelerator.stream(Role(self.case.judge))
            pending.append((step, self.exchange.read_status(judge)))
            if not self.case.ahead:
                yield from self._take(pending)
        yield from self._take(pending)

    def _take(self, pending: list[tuple[int, StatusReadback]]) -> Generator[Ready, None, None]:
        """What became of the step whose words are being read, if there is any."""
        while pending:
            step, reading = pending.pop()
            yield reading.ready
            try:
                verdict: StepFitted | StepOverflowed | str = reading.result(WATCHDOG)
            except GenerationMismatch:
                verdict = "mismatch"
            self.report.verdicts.append(str(verdict))
            self._judge(step, verdict)

    def _pair(self, step: int, numbers: range) -> Generator[Ready, None, None]:
        """Two batches, so that one travels while the other is computed."""
        dispatches: list[FixedDispatchHandle] = []
        for number in numbers:
            dispatches.append(self._dispatch(step, number))
            yield _at_once
        combines: list[FixedCombineHandle] = []
        for number, dispatched in zip(numbers, dispatches, strict=True):
            combines.append(self._compute(step, number, dispatched))
            yield _at_once
        for number, combined in zip(numbers, combines, strict=True):
            self._read(step, number, combined)
            yield _at_once

    def batch(self, step: int, number: int) -> Batch:
        """In memory that is scribbled once nobody holds it."""
        case, rank = self.case, self.rank
        grid = case.steps[step][number][rank]
        payloads = [oracle.payload(case, step, number, rank, n) for n in range(len(case.payloads))]
        return Batch(
            slots=self._lend(torch.tensor(grid, dtype=torch.int32).view(-1, case.top_k)),
            payloads=tuple(map(self._lend, payloads)),
            generation=self._lend(torch.tensor([case.generation(step, number, rank)])),
            loads=self._lend(oracle.loads(case, step, number, rank)),
        )

    def _dispatch(self, step: int, number: int) -> FixedDispatchHandle:
        batch, stream = self.batch(step, number), self.stream(number)
        dispatched = self.exchange.dispatch(batch, stream)
        stream.launch(partial(_spoil, (batch.slots, batch.loads, *batch.payloads)))
        return dispatched

    def _compute(
        self, step: int, number: int, dispatched: FixedDispatchHandle
    ) -> FixedCombineHandle:
        stream = self.stream(number)
        if self.case.split:
            dispatched.wait(self.accelerator.stream(Role.COPY))
        arrivals = dispatched.wait(stream)
        form = self.case.form()
        nbytes = form.max_entries * form.result.nbytes
        rows = self.empty(nbytes).view(form.result.dtype).view(form.max_entries, *form.result.shape)
        stream.launch(lambda: self._look(step, number, arrivals))
        stream.launch(lambda: rows.copy_(self.expert(arrivals)))
        return dispatched.combine(rows, stream)

    def expert(self, arrivals: ReceivedRows) -> Tensor:
        rows = [arrivals.gather_payload(n) for n in range(len(self.case.payloads))]
        slots = arrivals.entry_slots + self.rank * self.case.per_rank
        return oracle.expert(rows, self.case.experts_of(slots), self.case.result)

    def _look(self, step: int, number: int, arrivals: ReceivedRows) -> None:
        """Histograms, and that every entry names a slot and a row that exist."""
        case = self.case
        self.look_at_loads(step, number, arrivals)
        if oracle.excess(case, step) != oracle.Excess(0, 0):
            return
        expected = [self._arriving(step, number, source) for source in range(case.size)]
        by_source = arrivals.entry_slots.view(case.size, -1)
        valid = [[s for s in part.tolist() if s != case.per_rank] for part in by_source]
        self.report.expect("entries", valid == expected, f"entries {valid}, not {expected}")
        rows = [self._rows(step, number, source) for source in range(case.size)]
        row_counts = arrivals.rows_from_rank.tolist()
        self.report.expect(
            "entries", row_counts == rows, f"rows by source {row_counts}, not {rows}"
        )

    def look_at_loads(self, step: int, number: int, arrivals: ReceivedRows) -> None:
        """Histograms and rows of every rank; zeros of those that take no part."""
        case = self.case
        for rank, actual in enumerate(arrivals.loads):
            expected = oracle.loads(case, step, number, rank) * (rank in case.ranks)
            self.report.expect("loads", torch.equal(actual, expected), f"loads {actual} of {rank}")
            absent = rank not in case.ranks and int(arrivals.rows_from_rank[rank]) > 0
            self.report.expect("loads", not absent, f"rows of {rank}, which takes no part")

    def _arriving(self, step: int, number: int, source: int) -> list[int]:
        """Local slots of the choices of `source` that fall here, in order."""
        if source not in self.case.ranks:
            return []
        flat = [s for token in self.case.steps[step][number][source] for s in token]
        first = self.rank * self.case.per_rank
        return [s - first for s in flat if 0 <= s - first < self.case.per_rank]

    def _rows(self, step: int, number: int, source: int) -> int:
        """Tokens of `source` that chose this rank."""
        homes = [
            {s // self.case.per_rank for s in token}
            for token in self.case.steps[step][number][source]
        ]
        return sum(self.rank in home for home in homes) * (source in self.case.ranks)

    def _read(self, step: int, number: int, combined: FixedCombineHandle) -> None:
        stream = self.accelerator.stream(Role(self.case.reader))
        if self.case.split:
            combined.wait(self.accelerator.stream(Role.COPY))
        results = combined.wait(stream)
        expected = oracle.dense(self.case, step, number, self.rank)
        for part in range(PARTS):
            some = slice(part, None, PARTS)
            stream.launch(partial(self._compare, step, results[some], expected[some]))
        combined.release(stream)

    def _compare(self, step: int, actual: Tensor, expected: Tensor) -> None:
        if oracle.excess(self.case, step) == oracle.Excess(0, 0):
            what = f"step {step}: {actual.tolist()}, not {expected.tolist()}"
            self.report.expect("dense", same(actual.contiguous(), expected.contiguous()), what)

    def _judge(self, step: int, verdict: StepFitted | StepOverflowed | str) -> None:
        excess = oracle.excess(self.case, step)
        expected: StepFitted | StepOverflowed | str = StepFitted(
            oracle.stray(self.case, step, self.rank)
        )
        if excess != oracle.Excess(0, 0):
            expected = StepOverflowed(excess.rows, excess.results)
        if oracle.mismatched(self.case, step):
            expected = "mismatch"
        what = f"step {step}: {verdict}, not {expected}"
        name = "generation" if "mismatch" in (expected, verdict) else "verdict"
        self.report.expect(name, verdict == expected, what)

    def stream(self, number: int) -> Stream:
        roles = self.case.streams
        return self.accelerator.stream(Role(roles[number % len(roles)]))

    def _lend(self, tensor: Tensor) -> Tensor:
        """The same in memory that is scribbled once nobody holds it."""
        memory = self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return memory.copy_(tensor)


def _spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8).fill_(0x5A)


def _at_once() -> bool:
    return True
