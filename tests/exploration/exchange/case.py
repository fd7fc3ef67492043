"""What ranks exchange in a test: a few steps of a few batches."""

from dataclasses import dataclass
from typing import Any

import torch
from helpers.rank_programs.tensor_patterns import DTYPES
from torch import Tensor

from equipoise.pipeline.all_to_all.formats import ExchangeFormat, RowFormat

Grid = list[list[int]]
"""Slot ids by token and choice."""
Rows = tuple[list[int], str]
"""Shape and dtype of a row."""


@dataclass(frozen=True)
class Case:
    """Everything that is drawn, in types that pass through JSON.

    Attributes:
        size: ranks.
        per_rank: slots a rank.
        top_k: slots a token.
        experts: of the histograms.
        payloads: formats of the rows that travel.
        result: format of what comes back.
        capacity: rows a pair; 0 for what cannot overflow.
        result_capacity: results a pair; 0 for what cannot overflow.
        active: ranks that take part; empty for all, by a collective.
        placement: expert of each slot, replicas and all; of slot s it is s if empty.
        steps: grids by step, batch of the step and rank.
        odd: (step, batch, rank) of dispatches of another generation.
        streams: roles on which batches are computed, in turn.
        reader: role of the stream that reads results.
        split: whether another stream than the one that computes is the first to wait.
        judge: role of the stream on which the words are read.
        ahead: whether a step begins before the words of the one before were taken.
        late: role of a stream that moves only when nothing else can; none if empty.
        world: profile of the virtual backend; the healthy one if empty.
        schedule: who moves next, in a world where that can be chosen.
    """

    size: int
    per_rank: int
    top_k: int
    experts: int
    payloads: list[Rows]
    result: Rows
    capacity: int
    result_capacity: int
    active: list[int]
    placement: list[int]
    steps: list[list[list[Grid]]]
    odd: list[list[int]]
    streams: list[str]
    reader: str
    split: bool
    judge: str
    ahead: bool
    late: str
    world: str
    schedule: list[int]

    @property
    def slots(self) -> int:
        """Of all ranks."""
        return self.size * self.per_rank

    @property
    def ranks(self) -> list[int]:
        """Those that take part."""
        return self.active or list(range(self.size))

    @property
    def max_tokens(self) -> int:
        """Of any batch."""
        return max(1, *(len(g) for step in self.steps for batch in step for g in batch))

    def experts_of(self, slots: Tensor) -> Tensor:
        """Of global slot ids, int64; anything of others."""
        placement = torch.tensor(self.placement or list(range(self.slots)))
        return placement[slots.long().clamp(0, self.slots - 1)]

    def form(self) -> ExchangeFormat:
        """What an exchange of it is made with."""
        rows = [RowFormat(tuple(shape), DTYPES[name]) for shape, name in self.payloads]
        result = RowFormat(tuple(self.result[0]), DTYPES[self.result[1]])
        ample = ExchangeFormat.without_overflow(
            self.size, self.per_rank, self.experts, self.max_tokens, self.top_k, rows, result
        )
        return ample.with_capacities(
            self.capacity or ample.capacity, self.result_capacity or ample.result_capacity
        )

    def generation(self, step: int, batch: int, rank: int) -> int:
        """Of one dispatch."""
        return 40 + step + 100 * ([step, batch, rank] in self.odd)


def case(fields: dict[str, Any]) -> Case:
    """From JSON."""
    return Case(**fields)


PLAIN = Case(
    size=3,
    per_rank=2,
    top_k=2,
    experts=4,
    payloads=[([4], "bfloat16"), ([], "float32")],
    result=([4], "float32"),
    capacity=0,
    result_capacity=0,
    active=[],
    placement=[],
    steps=[],
    odd=[],
    streams=["compute"],
    reader="compute",
    split=False,
    judge="compute",
    ahead=False,
    late="",
    world="",
    schedule=[],
)
"""No steps yet: where a test says itself what is sent."""
