"""`PrefixIndex` against sets of prefixes, and what the dispatcher tells a policy of them."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
from helpers.fakes.late_binding_policy import LateBinding
from helpers.fakes.manual_clock import ManualClock
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    DispatchedRequest,
    FailureAction,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy import Decision, Request, WorkerState
from equipoise.balancer.requests.prefix_index import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MAX_BLOCKS,
    PrefixIndex,
    text_blocks,
    token_blocks,
)

WORKERS = 3
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
EVENTS = st.lists(
    st.tuples(st.sampled_from(("send", "send", "send", "lose")), PROMPTS, st.integers(0, 2))
)


def hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Of a prompt with a block of equal tokens for each number."""
    return token_blocks([token for token in prompt for _ in range(BLOCK_TOKENS)])


@given(events=EVENTS, asked_for=PROMPTS)
def test_matches_equal_longest_common_prefix_of_what_was_sent(
    events: list[tuple[str, list[int], int]], asked_for: list[int]
) -> None:
    index = PrefixIndex()
    sent: list[list[list[int]]] = [[] for _ in range(WORKERS)]
    for kind, prompt, worker in events:
        if kind == "send":
            index.insert(hashes(prompt), worker)
            sent[worker].append(prompt)
        else:
            index.forget(worker)
            sent[worker].clear()
    expected = [max((common(one, asked_for) for one in prompts), default=0) for prompts in sent]
    assert index.matches(hashes(asked_for), WORKERS) == expected


def common(one: Sequence[int], other: Sequence[int]) -> int:
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def test_index_evicts_what_was_used_least_recently_from_the_end_on() -> None:
    index = PrefixIndex(most_entries=4)
    index.insert(hashes([1, 1, 1]), 0)
    index.insert(hashes([2, 2]), 1)
    assert len(index) == 4
    assert index.matches(hashes([1, 1, 1]), 2) == [2, 0]
    assert index.matches(hashes([2, 2]), 2) == [0, 2]


def test_blocks_are_whole_and_tell_models_apart() -> None:
    assert text_blocks(b"x" * (BLOCK_BYTES - 1)) == ()
    assert len(text_blocks(b"x" * (2 * BLOCK_BYTES + 1))) == 2
    assert len(text_blocks(b"x" * BLOCK_BYTES * (MAX_BLOCKS + 5))) == MAX_BLOCKS
    prompt = b"x" * BLOCK_BYTES
    assert text_blocks(prompt, "a") != text_blocks(prompt, "b")
    with pytest.raises(OverflowError):
        token_blocks([1 << 70] * BLOCK_TOKENS)


def test_blocks_are_the_same_in_every_process() -> None:
    code = "from equipoise.balancer.requests.prefix_index import *\nprint(text_blocks(b'x' * 600))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(text_blocks(b"x" * 600))


class NotingPolicy(LateBinding):
    """Keeps what it was told of prefixes."""

    def on_arrival(self, request: Request) -> Decision:
        self.hits = request.hits
        return super().on_arrival(request)


def test_dispatcher_tells_policy_what_workers_were_sent_until_they_are_lost() -> None:
    policy, clock = NotingPolicy([2, 2]), ManualClock()
    dispatcher = RequestDispatcher(policy, 2, clock, lambda error: FailureAction.STOP_POLICY)

    def submit(name: str, prompt: Sequence[int]) -> DispatchedRequest:
        blocks = hashes(prompt)
        request = DispatchedRequest(name, BLOCK_TOKENS * (len(prompt) + 1), blocks=blocks)
        dispatcher.submit(request)
        return request

    first = submit("first", [1, 1, 1])
    assert policy.hits == [0, 0]
    assert isinstance(first.status, BoundToWorker)
    worker = first.status.worker
    submit("second", [1, 1, 2])
    expected = [0, 0]
    expected[worker] = 2 * BLOCK_TOKENS
    assert policy.hits == expected
    submit("short", [])
    assert policy.hits is None
    dispatcher.set_health(worker, WorkerState.LOST)
    submit("third", [1, 1, 1])
    assert policy.hits is not None
    assert policy.hits[worker] == 0
