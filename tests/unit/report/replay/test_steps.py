"""Steps of traces: of counts, of recorded passes, and of requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.formats.routing_trace import (
    CountsTrace,
    RoutedTokens,
    RoutingTrace,
    TraceUnit,
)
from equipoise.report.replay.steps import CountedSteps, Phase, StepSource, TokenSteps

EXPERTS, LAYERS, TOP_K = 8, 2, 2


def requests(lengths: list[int], prompts: list[int | None] | None = None) -> RoutingTrace:
    chances = np.random.default_rng(sum(lengths))
    known = prompts or [None] * len(lengths)
    parts = [
        RoutedTokens(
            np.argsort(chances.random((length, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(
                np.int32
            ),
            prompt_tokens=prompt,
        )
        for length, prompt in zip(lengths, known, strict=True)
    ]
    return trace(TraceUnit.REQUEST, parts)


def trace(unit: TraceUnit, parts: list[RoutedTokens]) -> RoutingTrace:
    tokens = sum(len(part.ids) for part in parts)
    numbers = tuple(range(LAYERS))
    return RoutingTrace(
        unit, numbers, EXPERTS, True, TOP_K, tokens, len(parts), "here", lambda: iter(parts)
    )


def counts_trace(counts: np.ndarray) -> CountsTrace:
    def blocks(steps: int) -> object:
        return (counts[first : first + steps] for first in range(0, len(counts), steps))

    layers = tuple(range(counts.shape[1]))
    return CountsTrace(layers, counts.shape[2], None, len(counts), "here", blocks)  # type: ignore[arg-type]


def step_sizes(source: StepSource) -> list[int]:
    return [len(step.ids) for block in source.blocks() for step in block.tokens]


def total(source: StepSource) -> np.ndarray:
    return sum((block.counts.sum(axis=0) for block in source.blocks()), np.zeros((), np.int64))


def test_counted_steps_keep_only_their_range() -> None:
    counts = np.arange(5 * LAYERS * 3, dtype=np.int32).reshape(5, LAYERS, 3)
    source = CountedSteps(counts_trace(counts), first=1, last=4)
    blocks = list(source.blocks())
    assert source.steps == 3
    assert [block.first for block in blocks] == [0]
    assert (np.concatenate([block.counts for block in blocks]) == counts[1:4]).all()


def test_prefill_steps_take_the_next_tokens_of_requests() -> None:
    source = TokenSteps(requests([3, 4, 1]), 2, 3, Phase.PREFILL)
    assert step_sizes(source) == [3, 3, 2]
    [block] = source.blocks()
    assert block.tokens[0].sources.tolist() == [0, 0, 1]
    parts = [part.ids for part in source.trace.parts()]
    assert (block.tokens[1].ids == parts[1][:3]).all()


def test_decode_steps_take_one_token_of_each_request() -> None:
    """A request that has ended gives its place to the next; prompts are left out."""
    source = TokenSteps(requests([3, 5, 2], [1, 2, 0]), 2, 2, Phase.DECODE)
    assert step_sizes(source) == [2, 2, 2, 1]
    parts = [part.ids for part in source.trace.parts()]
    [block] = source.blocks()
    assert (block.tokens[0].ids == np.stack([parts[0][1], parts[1][2]])).all()
    assert (block.tokens[2].ids == np.stack([parts[1][4], parts[2][0]])).all()


def test_passes_of_one_step_are_one_step_and_keep_their_ranks() -> None:
    ids = requests([2, 3, 4]).parts()
    first, second, third = (part.ids for part in ids)
    parts = [
        RoutedTokens(first, step=7, rank=1),
        RoutedTokens(second, step=7, rank=0),
        RoutedTokens(third, step=8, rank=1),
    ]
    [block] = TokenSteps(trace(TraceUnit.STEP, parts), 2, 1, Phase.PREFILL).blocks()
    joined, last = block.tokens
    assert joined.sources.tolist() == [0, 0, 0, 1, 1]
    assert (joined.ids == np.concatenate([second, first])).all()
    assert last.sources.tolist() == [0, 0, 1, 1]  # one pass of one rank is dealt to all


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(Phase),
)
def test_steps_of_requests_lose_no_token(
    lengths: list[int], step_tokens: int, ranks: int, phase: Phase
) -> None:
    recorded = requests(lengths)
    source = TokenSteps(recorded, ranks, step_tokens, phase)
    everything = np.concatenate([part.ids for part in recorded.parts()])
    layers = np.arange(LAYERS)[:, None]
    expected = np.zeros((LAYERS, EXPERTS), np.int64)
    for token in everything:
        np.add.at(expected, (layers, token), 1)
    assert (total(source) == expected).all()
    assert max(step_sizes(source), default=0) <= step_tokens


@pytest.mark.parametrize("phase", Phase)
def test_steps_of_a_range_are_those_of_the_whole(phase: Phase) -> None:
    recorded = requests([9, 4, 7])
    whole = [step for block in TokenSteps(recorded, 2, 3, phase).blocks() for step in block.tokens]
    part = TokenSteps(recorded, 2, 3, phase, first=1, last=3)
    chosen = [step for block in part.blocks() for step in block.tokens]
    assert len(chosen) == 2
    assert all((a.ids == b.ids).all() for a, b in zip(chosen, whole[1:3], strict=True))


def test_counts_by_rank_leave_out_tokens_without_expert() -> None:
    ids = np.array([[[0, 1], [2, -1]], [[1, 3], [-1, -1]]], np.int32)
    parts = [RoutedTokens(ids)]
    [block] = TokenSteps(trace(TraceUnit.REQUEST, parts), 2, 2, Phase.PREFILL).blocks()
    by_rank = block.tokens[0].counts(EXPERTS, 2)
    assert by_rank[0, 0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert by_rank[1, 0].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert by_rank[:, 1].sum() == 1


def test_decode_steps_say_where_trace_has_fewer_requests() -> None:
    enough, few = (TokenSteps(requests([3, 4]), 1, n, Phase.DECODE).description for n in (2, 256))
    assert enough == "a step is the next token of each of 2 requests"
    assert few == (
        "a step is the next token of each of 2 requests, all that the trace has: steps of 256 "
        "need a trace of more requests"
    )
