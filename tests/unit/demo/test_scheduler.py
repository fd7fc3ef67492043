import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.scheduler import RequestScheduler, cache_slots, outputs_digest
from equipoise.demo.traffic import Traffic, TrafficPhase

TEXT = bytes(range(1, 127)) * 8


def traffic(steps: int, new_tokens: int) -> Traffic:
    return Traffic(
        (TrafficPhase("a", TEXT),), steps, requests_per_step=3, prompt=8, new_tokens=new_tokens
    )


def echo(scheduler: RequestScheduler, step: int) -> None:
    """A model whose logits depend only on the row's own token: it counts upwards."""
    batch = scheduler.next_batch(step)
    tokens = torch.cat([sequence.tokens for sequence in batch]) if batch.rows else torch.zeros(0)
    scheduler.add_logits(batch, torch.eye(256)[(tokens.long() + 1) % 256])


def serve_requests(ranks: int, steps: int, new_tokens: int) -> dict[int, bytes]:
    outputs: dict[int, bytes] = {}
    for rank in range(ranks):
        scheduler = RequestScheduler(traffic(steps, new_tokens), rank, ranks)
        for step in range(steps):
            echo(scheduler, step)
        scheduler.close()
        assert not outputs.keys() & scheduler.finished.keys()
        outputs |= scheduler.finished
    return outputs


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_requests_are_served_once_and_equal_for_any_ranks(
    ranks: int, steps: int, new_tokens: int
) -> None:
    single_rank = serve_requests(1, steps, new_tokens)
    assert sorted(single_rank) == list(range(steps * 3))
    assert serve_requests(ranks, steps, new_tokens) == single_rank


def test_request_gets_one_token_per_step_until_done() -> None:
    scheduler = RequestScheduler(traffic(4, 2), 0, 1)
    rows = []
    for step in range(4):
        batch = scheduler.next_batch(step)
        rows.append((len(batch.prefill), len(batch.decode)))
        tokens = torch.cat([sequence.tokens for sequence in batch])
        scheduler.add_logits(batch, torch.eye(256)[(tokens.long() + 1) % 256])
    assert rows == [(3, 0), (3, 3), (3, 3), (3, 3)]
    first = traffic(4, 2).arrivals(0)[0]
    last = first.prompt[-1]
    assert scheduler.texts[0] == bytes([last + 1, last + 2])


def test_request_positions_follow_prompt() -> None:
    scheduler = RequestScheduler(traffic(3, 3), 0, 1)
    for step in range(2):
        echo(scheduler, step)
    assert [sequence.start for sequence in scheduler.next_batch(2).decode] == [8, 8, 8, 9, 9, 9]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_kv_cache_slots_stay_below_capacity(ranks: int) -> None:
    for rank in range(ranks):
        scheduler = RequestScheduler(traffic(12, 4), rank, ranks)
        slots = set()
        for step in range(12):
            batch = scheduler.next_batch(step)
            slots |= {sequence.slot for sequence in batch}
            scheduler.add_logits(batch, torch.zeros(batch.rows, 256))
        assert all(slot < cache_slots(traffic(12, 4), ranks) for slot in slots)


def test_outputs_digest_changes_with_one_logit_bit() -> None:
    digests = []
    for nudge in (0.0, 1e-38):
        scheduler = RequestScheduler(traffic(1, 1), 0, 1)
        batch = scheduler.next_batch(0)
        logits = torch.zeros(batch.rows, 256)
        logits[5, 7] = nudge
        scheduler.add_logits(batch, logits)
        scheduler.close()
        digests.append(outputs_digest(scheduler.finished))
    assert digests[0] != digests[1]


def test_outputs_digest_depends_on_request_ids() -> None:
    assert outputs_digest({0: b"x", 1: b"y"}) != outputs_digest({0: b"y", 1: b"x"})
