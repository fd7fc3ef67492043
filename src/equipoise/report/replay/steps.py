"""Steps of a trace: rows of every expert, and the tokens themselves where the trace has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import BatchCounts
from equipoise.balancer.formats.routing_trace import (
    CountsTrace,
    RoutedTokens,
    RoutingTrace,
    TraceUnit,
)
from equipoise.report.text import pluralize

StepCounts = npt.NDArray[np.int32]
"""(steps, layers, experts): rows of all ranks together."""
Tokens = npt.NDArray[np.int32]
"""(tokens, layers, top_k): the experts of each token; -1 for none."""

BLOCK_BYTES = 64 << 20
"""Of the counts of a block: what is in memory of a trace at a time."""


EVALUATED_STEPS = 4096
"""Of a trace of counts. All steps are counted and planned on; the mean over so many of them differs
from that over all by less than anything that is compared here, and the table says by how much."""
EVALUATED_ROWS = 1 << 29
"""Likewise of a trace of tokens, which engines' rules send row by row."""


class Phase(StrEnum):
    """How the tokens of recorded requests come together in steps."""

    PREFILL = "prefill"
    """A step takes the next tokens, request after request."""
    DECODE = "decode"
    """A step takes the next token of each of as many requests."""


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The tokens of one step.

    Attributes:
        ids: int32 (tokens, layers, top_k).
        sources: int32 (tokens,), ascending: the rank that each token is on.
    """

    ids: Tokens
    sources: npt.NDArray[np.int32]

    def counts(self, experts: int, ranks: int) -> BatchCounts:
        """Rows by the rank that sends them, int32 (ranks, layers, experts)."""
        layers = self.ids.shape[1]
        known = self.ids >= 0
        keys = (self.sources[:, None] * layers + np.arange(layers))[:, :, None] * experts + self.ids
        size = ranks * layers * experts
        counted = np.bincount(keys[known], minlength=size).astype(np.int32)
        return counted.reshape(ranks, layers, experts)


@dataclass(frozen=True, eq=False)
class StepBlock:
    """Consecutive steps.

    Attributes:
        first: number of the first one.
        counts: int32 (steps, layers, experts).
        tokens: of each step; empty where the trace has counts only.
    """

    first: int
    counts: StepCounts
    tokens: tuple[StepTokens, ...] = ()

    def __len__(self) -> int:
        return len(self.counts)

    def by_layer(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Counts of these steps, (layers, places, experts), for products; exact below 2**24."""
        return np.ascontiguousarray(self.counts[places].transpose(1, 0, 2), dtype=np.float32)


class StepSource(Protocol):
    """A trace as steps; can be read several times."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the layers."""
        ...

    @property
    def experts(self) -> int:
        """Of a layer."""
        ...

    @property
    def steps(self) -> int | None:
        """How many there are; None where only reading says it."""
        ...

    @property
    def first(self) -> int:
        """Step of the trace that the steps begin with."""
        ...

    @property
    def every(self) -> int:
        """One of so many steps is enough to evaluate, evenly spaced."""
        ...

    @property
    def description(self) -> str:
        """What a step is, for people."""
        ...

    def blocks(self) -> Iterator[StepBlock]:
        """All steps, in order."""
        ...


@dataclass(frozen=True)
class CountedSteps:
    """Steps of a trace of counts.

    Attributes:
        trace: as read.
        first: step to begin with.
        last: step to end before; None for all.
    """

    trace: CountsTrace
    first: int = 0
    last: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the layers."""
        return self.trace.layers

    @property
    def experts(self) -> int:
        """Of a layer."""
        return self.trace.experts

    @property
    def steps(self) -> int:
        """How many there are."""
        last = self.trace.steps if self.last is None else min(self.last, self.trace.steps)
        return max(0, last - self.first)

    @property
    def every(self) -> int:
        """So that `EVALUATED_STEPS` are evaluated."""
        return max(1, -(-self.steps // EVALUATED_STEPS))

    @property
    def description(self) -> str:
        """What a step is."""
        return "a window of the counts is a step; who sends which row is drawn"

    def blocks(self) -> Iterator[StepBlock]:
        """Skips what is outside the range."""
        place = 0
        end = self.first + self.steps
        for counts in self.trace.blocks(BLOCK_BYTES):
            low, high = max(self.first - place, 0), min(end - place, len(counts))
            if low < high:
                yield StepBlock(place + low - self.first, counts[low:high])
            place += len(counts)
            if place >= end:
                return


@dataclass(frozen=True)
class TokenSteps:
    """Steps made of the tokens of a trace.

    Attributes:
        trace: as read.
        ranks: that the tokens of a step are dealt to, in equal runs, where the trace does not say.
        step_tokens: tokens of a step, where the trace holds requests; the last step may have fewer.
        phase: how tokens of requests come together.
        first: step to begin with.
        last: step to end before; None for all.
    """

    trace: RoutingTrace
    ranks: int
    step_tokens: int
    phase: Phase
    first: int = 0
    last: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the layers."""
        return self.trace.layers

    @property
    def experts(self) -> int:
        """Of a layer."""
        return self.trace.experts

    @property
    def steps(self) -> None:
        """Only reading says it."""
        return None

    @property
    def every(self) -> int:
        """So that `EVALUATED_ROWS` are evaluated."""
        rows = self.trace.tokens * len(self.layers) * self.trace.top_k
        return max(1, -(-rows // EVALUATED_ROWS))

    @property
    def description(self) -> str:
        """What a step is, and where the number of experts comes from if not from the trace."""
        if self.trace.experts_known:
            return self._step
        return f"{self._step}; {self.experts} experts by the largest id, unless --experts says more"

    @property
    def _step(self) -> str:
        if self.trace.unit is TraceUnit.STEP:
            return "steps are those of the trace"
        if self.phase is Phase.PREFILL:
            return f"a step is the next {self.step_tokens:,} tokens, request after request"
        requests = self.trace.part_count
        if requests >= self.step_tokens:
            return f"a step is the next token of each of {self.step_tokens:,} requests"
        return (
            f"a step is the next token of each of {pluralize(requests, 'request')}, all that the "
            f"trace has: steps of {self.step_tokens:,} need a trace of more requests"
        )

    def blocks(self) -> Iterator[StepBlock]:
        """As many steps at a time as fit."""
        size = 4 * len(self.layers) * self.experts
        first, waiting, held = 0, [], 0
        for step in islice(self._steps(), self.first, self.last):
            waiting.append(step)
            held += size + step.ids.nbytes
            if held >= BLOCK_BYTES:
                yield self._block(first, waiting)
                first, waiting, held = first + len(waiting), [], 0
        if waiting:
            yield self._block(first, waiting)

    def _block(self, first: int, steps: list[StepTokens]) -> StepBlock:
        counts = [
            step.counts(self.experts, self.ranks).sum(axis=0, dtype=np.int32) for step in steps
        ]
        return StepBlock(first, np.array(counts), tuple(steps))

    def _steps(self) -> Iterator[StepTokens]:
        if self.trace.unit is TraceUnit.STEP:
            return self._recorded_steps()
        return self._prefill() if self.phase is Phase.PREFILL else self._decode()

    def _recorded_steps(self) -> Iterator[StepTokens]:
        """Passes of the same step come one after the other."""
        parts: list[RoutedTokens] = []
        for part in self.trace.parts():
            if parts and (part.step is None or part.step != parts[0].step):
                yield self._joined(parts)
                parts = []
            parts.append(part)
        if parts:
            yield self._joined(parts)

    def _joined(self, parts: list[RoutedTokens]) -> StepTokens:
        ranks = [part.rank for part in parts]
        ids = np.concatenate([part.ids for part in parts])
        if any(rank is None or rank >= self.ranks for rank in ranks) or len(parts) < 2:
            return self._dealt(ids)
        sources = np.concatenate([np.full(len(part.ids), part.rank, np.int32) for part in parts])
        order = np.argsort(sources, kind="stable")
        return StepTokens(ids[order], sources[order])

    def _dealt(self, ids: Tokens) -> StepTokens:
        sources = np.arange(len(ids)) * self.ranks // max(len(ids), 1)
        return StepTokens(np.ascontiguousarray(ids), sources.astype(np.int32))

    def _prefill(self) -> Iterator[StepTokens]:
        rest: list[Tokens] = []
        held = 0
        for part in self.trace.parts():
            rest.append(part.ids)
            held += len(part.ids)
            while held >= self.step_tokens:
                joined = np.concatenate(rest)
                yield self._dealt(joined[: self.step_tokens])
                rest, held = [joined[self.step_tokens :]], held - self.step_tokens
        if held:
            yield self._dealt(np.concatenate(rest))

    def _decode(self) -> Iterator[StepTokens]:
        """A request that ends gives its place to the next one.

        Tokens of the prompt are left out where the trace says how many they are.
        """
        coming = (part.ids[part.prompt_tokens or 0 :] for part in self.trace.parts())
        waiting = (ids for ids in coming if len(ids))
        running: list[Tokens] = []
        while True:
            running += islice(waiting, self.step_tokens - len(running))
            if not running:
                return
            yield self._dealt(np.stack([ids[0] for ids in running]))
            running = [ids[1:] for ids in running if len(ids) > 1]
