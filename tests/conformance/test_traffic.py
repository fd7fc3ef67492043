"""The traffic of group properties: what is drawn, and what every rank computes for itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.virtual.backend import EVERY_OPERATION, EVERYTHING
from equipoise.hal.conformance.program import Step
from equipoise.hal.conformance.property import Traits
from equipoise.hal.conformance.traffic import (
    fit,
    lone,
    numbers_of,
    operations,
    payload,
    triples,
)

TRAITS = Traits(EVERYTHING, EVERY_OPERATION, (1, 2, 3, 4), controlled=True)
STEPS = st.lists(operations(TRAITS), max_size=8)
SIZES = st.integers(1, 5)


def pairs(steps: list[Step]) -> list[tuple[int, int]]:
    """Source and target of every message and every blob."""
    found = [triples(numbers_of(s)) for s in steps if s.op in ("message", "exchange")]
    return [triple[:2] for some in found for triple in some]


@given(STEPS, SIZES)
def test_clip_messages_to_group_keeps_distinct_ranks(steps: list[Step], size: int) -> None:
    for source, target in pairs(fit(steps, size)):
        assert source != target
        assert source in range(size)
        assert target in range(size)


@given(STEPS, SIZES)
def test_deduplicate_messages_keeps_one_per_rank_pair(steps: list[Step], size: int) -> None:
    kept = pairs(lone(fit(steps, size)))
    assert len(set(kept)) == len(kept)
    assert set(kept) == set(pairs(fit(steps, size)))


@given(STEPS, SIZES)
def test_deduplicate_messages_is_idempotent_and_keeps_other_steps(
    steps: list[Step], size: int
) -> None:
    kept = lone(fit(steps, size))
    assert lone(kept) == kept
    assert [step.op for step in kept if step.op not in ("message", "exchange")] == [
        step.op for step in steps if step.op not in ("message", "exchange")
    ]


def test_clip_messages_to_group_keeps_trailing_words() -> None:
    assert fit([Step("message", (5, 6, 4, "sends"))], 2) == [Step("message", (1, 0, 4, "sends"))]


@given(st.integers(0, 300), st.integers(0, 3))
def test_payload_is_deterministic_and_distinct_per_message(nbytes: int, number: int) -> None:
    data = payload(number, 0, 1, nbytes)
    assert torch.equal(data, payload(number, 0, 1, nbytes))
    assert data.shape == (nbytes,)
    if nbytes > 8:
        assert not torch.equal(data, payload(number + 1, 0, 1, nbytes))
        assert not torch.equal(data, payload(number, 1, 0, nbytes))
