"""Streams are cut into events anywhere, and come out with the same bytes and the same tokens."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.serve.openai_protocol import MAX_EVENT_BYTES, EventReader, TokenUsage, read_usage

BLANKS = st.sampled_from(["\n\n", "\r\n\r\n"])


def event(choice: dict[str, object] | None, **more: object) -> str:
    choices = [] if choice is None else [choice]
    return f"data: {json.dumps({'choices': choices} | more)}"


NOT_TOKENS = (
    event({"delta": {"role": "assistant", "content": ""}}),
    event({"delta": {"role": "assistant"}}),
    event({"delta": {}, "finish_reason": "stop"}),
    event({"text": "", "finish_reason": "length"}),
    event(None),
    "data: [DONE]",
    "data: ",
    "data: {",
    "data: []",
    "data: " + "[" * 5000,
    'data: {"choices": 7}',
    'data: {"choices": [7, null]}',
    'data: {"usage": "much"}',
    ": a comment",
    "event: choices",
    "id: 9",
)
TOKENS = (
    event({"delta": {"content": "a"}}),
    event({"delta": {"role": "assistant", "content": "a"}}),
    event({"delta": {"content": ""}}),
    event({"delta": {"content": "a"}, "finish_reason": "stop"}),
    event({"delta": {"reasoning_content": "hm"}}),
    event({"delta": {"tool_calls": [{"index": 0}]}}),
    event({"text": " b"}),
    event({"text": "é本"}).replace("data: ", "data:"),
)


@pytest.mark.parametrize("text", NOT_TOKENS)
def test_event_without_content_counts_no_token(text: str) -> None:
    reader = EventReader()
    reader.feed(f"{text}\n\n".encode())
    assert reader.tokens == 0


@pytest.mark.parametrize("text", TOKENS)
def test_event_with_content_counts_one_token(text: str) -> None:
    reader = EventReader()
    reader.feed(f"{text}\n\n".encode())
    assert reader.tokens == 1


def test_event_counts_one_token_per_choice() -> None:
    reader = EventReader()
    choices = [{"index": n, "delta": {"content": "a"}} for n in range(3)]
    reader.feed(f"data: {json.dumps({'choices': choices})}\n\n".encode())
    assert reader.tokens == 3


@given(
    events=st.lists(st.tuples(st.sampled_from(NOT_TOKENS + TOKENS), BLANKS), max_size=12),
    tail=st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
)
def test_event_reader_is_independent_of_stream_chunking(
    events: list[tuple[str, str]], tail: bytes, cuts: list[int]
) -> None:
    stream = "".join(text + blank for text, blank in events).encode() + tail.replace(b"d", b"")
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    reader, outputs = EventReader(), []
    for start, stop in pairwise(places):
        outputs.append(reader.feed(stream[start:stop]))
        # What is passed on ends where an event does, so that another one may follow.
        assert outputs[-1] == b"" or outputs[-1].endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
    assert b"".join(outputs) + reader.flush() == stream
    assert reader.tokens == sum(text in TOKENS for text, _ in events)
    assert reader.ended == any(text == "data: [DONE]" for text, _ in events)


@given(
    event_count=st.integers(0, 9),
    received=st.integers(0, 1000),
    prompt=st.integers(0, 1000),
)
def test_worker_usage_overrides_counted_tokens(
    event_count: int, received: int, prompt: int
) -> None:
    reader = EventReader()
    for _ in range(event_count):
        reader.feed(f"{TOKENS[0]}\n\n".encode())
    assert reader.tokens == event_count
    usage = {"prompt_tokens": prompt, "completion_tokens": received}
    reader.feed(f"{event(None, usage=usage)}\n\n".encode())
    assert (reader.tokens, reader.usage) == (received, TokenUsage(prompt, received))


def test_event_reader_follows_usage_of_every_event() -> None:
    reader = EventReader()
    for tokens in (2, 5):
        usage = {"completion_tokens": tokens}
        reader.feed(f"{event({'delta': {'content': 'ab'}}, usage=usage)}\n\n".encode())
        assert reader.tokens == tokens


def test_event_reader_passes_on_oversized_event() -> None:
    reader = EventReader()
    assert reader.feed(b"data: " + b"x" * MAX_EVENT_BYTES).startswith(b"data: x")
    assert reader.tokens == 1
    assert reader.feed(b"\n\n") == b"\n\n"


@pytest.mark.parametrize("value", [-1, 1.5, True, "7", None, (1 << 28) + 1, 1 << 31, 1 << 40])
def test_read_usage_ignores_invalid_counts(value: object) -> None:
    body = json.dumps({"usage": {"prompt_tokens": value, "completion_tokens": value}})
    assert read_usage(body.encode()) == TokenUsage()
    assert read_usage(b"\xff") == TokenUsage()
