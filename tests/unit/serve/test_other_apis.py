"""What engines serve beside chat and completions: bound to a worker, or passed on, or refused."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import ProxySetup, chat_request, proxied, run
from hypothesis import given
from hypothesis import strategies as st

from equipoise.serve.client_connection import HEARTBEAT
from equipoise.serve.forwarded_paths import TOKENIZER_PATHS
from equipoise.serve.openai_protocol import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    UNREAD_PATHS,
    EventReader,
    TokenUsage,
    parse_request,
    read_usage,
    whole_as_events,
)
from equipoise.serve.outcomes import RequestRefused
from equipoise.serve.settings import AccessSettings, Limits, Timeouts


def sse(*events: dict[str, Any]) -> list[str]:
    return [f"event: {one.get('type')}\ndata: {json.dumps(one)}\n\n" for one in events]


RESPONSE_STREAM = sse(
    {"type": "response.created", "response": {"usage": None}},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.output_text.delta", "delta": "b"},
    {"type": "response.output_text.done", "text": "ab"},
    {
        "type": "response.completed",
        "response": {"usage": {"input_tokens": 11, "output_tokens": 2, "total_tokens": 13}},
    },
)
MESSAGE_STREAM = sse(
    {"type": "message_start", "message": {"usage": {"input_tokens": 11, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
)
GENERATE_STREAM = [
    *sse(
        {"text": "a", "meta_info": {"prompt_tokens": 11, "completion_tokens": 1}},
        {"text": "ab", "meta_info": {"prompt_tokens": 11, "completion_tokens": 2}},
    ),
    "data: [DONE]\n\n",
]
USER = {"role": "user", "content": "hello"}
REQUESTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/responses": ({"model": "m", "input": "hello"}, RESPONSE_STREAM),
    "/v1/messages": ({"model": "m", "messages": [USER], "max_tokens": 9}, MESSAGE_STREAM),
    "/generate": ({"text": "hello"}, GENERATE_STREAM),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_stream_of_other_api_is_relayed_and_counted(path: str) -> None:
    fields, events = REQUESTS[path]

    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            answer = await setup.post(
                {**fields, "stream": True, "fake": {"w0": {"raw": events}}}, path
            )
            assert (answer.status, answer.body) == (200, "".join(events).encode())
            assert await setup.metric("output_tokens_total") == 2

    run(work())


@pytest.mark.parametrize("path", REQUESTS)
def test_events_of_other_api_give_tokens_usage_and_end(path: str) -> None:
    reader = EventReader()
    tokens = []
    for event in REQUESTS[path][1]:
        reader.feed(event.encode())
        tokens.append(reader.tokens)
    assert tokens[0] == (1 if path == "/generate" else 0)
    assert 1 in tokens
    assert (reader.tokens, reader.ended, reader.usage) == (2, True, TokenUsage(11, 2))


def test_usage_of_whole_answers_is_read_in_every_api() -> None:
    answers = (
        {"usage": {"prompt_tokens": 11, "completion_tokens": 2}, "choices": []},
        {"usage": {"input_tokens": 11, "output_tokens": 2}, "object": "response"},
        {"text": "ab", "meta_info": {"prompt_tokens": 11, "completion_tokens": 2}},
    )
    for answer in answers:
        assert read_usage(json.dumps(answer).encode()) == TokenUsage(11, 2)


SIZES: tuple[tuple[str, dict[str, Any], tuple[int, int]], ...] = (
    ("/v1/responses", {"input": "hello", "instructions": "be short"}, (0, 13)),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "function_call_output", "call_id": "1234", "output": "42"},
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:long"}]},
            ]
        },
        (0, 7),
    ),
    ("/v1/messages", {"messages": [USER], "system": [{"type": "text", "text": "ab"}]}, (0, 7)),
    ("/generate", {"input_ids": [1, 2, 3]}, (3, 0)),
    ("/generate", {"text": ["ab", "c"]}, (0, 3)),
    ("/inference/v1/generate", {"token_ids": [1, 2]}, (2, 0)),
)


@pytest.mark.parametrize(("path", "fields", "size"), SIZES)
def test_prompt_size_is_read_in_every_api(
    path: str, fields: dict[str, Any], size: tuple[int, int]
) -> None:
    parsed = parse_request(path, json.dumps(fields).encode(), {})
    assert (parsed.prompt_tokens, parsed.prompt_bytes) == size


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/v1/responses", {"model": "m"}, "input"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "model": 7}, "model"),
        ("/v1/messages", {"messages": []}, "messages"),
        ("/generate", {}, "text"),
        ("/generate", {"input_ids": ["a", 1]}, "input_ids"),
        ("/inference/v1/generate", {"token_ids": [True]}, "token_ids"),
    ],
)  # fmt: skip
def test_malformed_request_of_other_api_is_refused(
    path: str, fields: dict[str, Any], word: str
) -> None:
    with pytest.raises(RequestRefused, match=word):
        parse_request(path, json.dumps(fields).encode(), {})


def test_text_nested_too_deeply_is_refused() -> None:
    body = f'{{"input": {"[" * 99_999}{"]" * 99_999}}}'.encode()
    with pytest.raises(RequestRefused, match="nested"):
        parse_request("/v1/responses", body, {})
    # Near the interpreter's limit the decoder may take what is then too deep to be measured.
    for depth in range(900, 1000):
        with suppress(RequestRefused):
            parse_request("/v1/responses", f'{{"input": {"[" * depth}{"]" * depth}}}'.encode(), {})


@pytest.mark.parametrize("path", sorted(UNREAD_PATHS))
def test_proxy_passes_unread_body_on(path: str) -> None:
    async def work() -> None:
        access = AccessSettings(worker_key="theirs")
        async with proxied(fake := Fake("w0"), access=access) as setup:
            answer = await setup.post(b"not { read", path, Content_Type="application/json")
            assert answer.status == 200
            [echo] = fake.events("echo")
            assert (echo["path"], echo["body"]) == (path, 10)
            assert echo["headers"]["Authorization"] == "Bearer theirs"
            assert setup.proxy.dispatcher.requests == ()

    run(work())


def test_embedding_waits_for_a_slot_of_a_worker() -> None:
    async def work() -> None:
        async with proxied(Fake("w0", slots=1)) as setup:
            first = asyncio.create_task(
                setup.post(chat_request(stream=True, fake={"w0": {"stall": 1}}))
            )
            await setup.until(lambda: setup.fakes[0].events("token"))
            call = asyncio.create_task(setup.post({"input": "a"}, "/v1/embeddings"))
            await setup.until(lambda: setup.proxy.dispatcher.queued == 1)
            assert setup.fakes[0].events("echo") == []
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert (await call).status == 200

    run(work())


def test_size_of_sound_file_does_not_count_as_text() -> None:
    body = b"x" * 5000
    for kind, size in (("multipart/form-data; boundary=b", 0), ("application/json", 5000)):
        parsed = parse_request("/v1/audio/transcriptions", body, {"Content-Type": kind})
        assert (parsed.prompt_tokens, parsed.prompt_bytes) == (0, size)


def test_tokenizer_requests_go_to_workers_in_turn() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            for path in sorted(TOKENIZER_PATHS):
                assert (await setup.post({"prompt": "a"}, path)).status == 200
            counts = [len(one.events("echo")) for one in setup.fakes]
            assert sum(counts) == len(TOKENIZER_PATHS)
            assert max(counts) - min(counts) <= 1
            assert {one["body"] for one in setup.fakes[0].events("echo")} == {15}

    run(work())


def test_tokenizer_request_needs_a_key_and_is_bounded() -> None:
    async def work() -> None:
        access, limits = AccessSettings(keys=("one",)), Limits(body=2000)
        async with proxied(fake := Fake("w0"), access=access, limits=limits) as setup:
            assert (await setup.post({"prompt": "a"}, "/tokenize")).status == 401
            key = {"Authorization": "Bearer one"}
            compressed = await setup.post(b"x", "/tokenize", Content_Encoding="gzip", **key)
            assert compressed.status == 415
            assert (await setup.post(b"x" * 3000, "/tokenize", **key)).status == 413
            assert fake.events("echo") == []

    run(work())


def test_lost_worker_ends_stream_of_messages_as_their_api_has_it() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            broken = {**REQUESTS[MESSAGES][0], "stream": True, "fake": {"w0": {"hang_up": 1}}}
            answer = await setup.post(broken, MESSAGES)
            event, data = answer.body.decode().strip().splitlines()[-2:]
            assert event == "event: error"
            content = json.loads(data.removeprefix("data: "))
            assert (content["type"], content["error"]["code"]) == ("error", "worker_lost")

    run(work())


def error_event_of(body: bytes) -> dict[str, Any]:
    """The error of the only event, as Anthropic's clients read it."""
    event, data = body.replace(HEARTBEAT, b"").decode().strip().splitlines()
    assert event == "event: error"
    content = json.loads(data.removeprefix("data: "))
    assert content["type"] == "error"
    return dict(content["error"])


def test_error_of_held_open_messages_has_their_apis_shape() -> None:
    async def work() -> None:
        timeouts = Timeouts(heartbeat=0.05)
        async with proxied(Fake("w0", slots=1), timeouts=timeouts) as setup:
            first = asyncio.create_task(
                setup.post(chat_request(stream=True, fake={"w0": {"stall": 1}}))
            )
            await setup.until(lambda: setup.fakes[0].events("token"))
            refused = {**REQUESTS[MESSAGES][0], "stream": True, "fake": {"w0": {"status": 404}}}
            url = setup.url + MESSAGES
            async with setup.client.post(url, json=refused) as answer:
                assert await answer.content.readexactly(len(HEARTBEAT)) == HEARTBEAT
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                error = error_event_of(await answer.read())
            assert (answer.status, error["type"]) == (200, "not_found_error")
            assert error["message"] == "as told"

    run(work())


OWN = {"type": "error", "error": {"type": "own_error", "message": "own"}}


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (400, {"error": {"message": "m", "type": "x"}}, ("invalid_request_error", "m")),
        (500, {"error": "only text"}, ("api_error", "only text")),
        (413, {"detail": "no message"}, ("request_too_large", "the worker answered 413")),
        (503, {}, ("overloaded_error", "the worker answered 503")),
        (200, {"error": {"message": "m"}}, ("api_error", "m")),
        (500, {"error": None}, ("api_error", "the worker answered 500")),
        (400, {"error": None, "detail": "d"}, ("invalid_request_error", "the worker answered 400")),
        (200, {"a": 1}, ("api_error", "the worker answered 200")),  # no message
        (418, OWN, ("own_error", "own")),
    ],
)
def test_whole_error_becomes_an_event_of_anthropics_api(
    status: int, content: dict[str, Any], error: tuple[str, str]
) -> None:
    event = whole_as_events(MESSAGES, status, json.dumps(content).encode())
    fields = error_event_of(event)
    assert (fields["type"], fields["message"]) == error


def test_whole_error_of_openai_api_stays_as_the_worker_sent_it() -> None:
    content = {"error": {"message": "m", "type": "x", "code": 7}}
    event = f"data: {json.dumps(content)}\n\n".encode()
    assert whole_as_events(CHAT, 400, json.dumps(content).encode()) == event
    assert whole_as_events(CHAT, 400, json.dumps(content["error"]).encode()) == event
    for body in (b'{"error": null}', b"{}", b"no JSON"):
        [(_, refusal)] = events_of(whole_as_events(CHAT, 500, body))
        error = refusal["error"]
        assert (error["message"], error["type"]) == ("the worker answered 500", "server_error")


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """Name and data of each event; the name of one without is empty."""
    events = []
    for event in body.replace(HEARTBEAT, b"").decode().strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = lines["data"]
        events.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def message_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """A message as Anthropic's clients put it together."""
    assert all(name == event["type"] for name, event in events)
    [first, *middle, change, last] = [event for _, event in events]
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    arguments = ""
    for event in middle:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
            case {"type": "content_block_stop"} if arguments:
                message["content"][-1]["input"], arguments = json.loads(arguments), ""
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                arguments += text
            case {"delta": {"type": "signature_delta", "signature": text}}:
                message["content"][-1]["signature"] = text
            case {"delta": {"type": "text_delta" | "thinking_delta" as kind} as delta}:
                key = kind.removesuffix("_delta")
                message["content"][-1][key] += delta[key]
    message |= change["delta"]
    return message | {"usage": change["usage"]}


TEXTS = st.text(max_size=9)
BLOCKS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
        st.builds(
            lambda text, name: {"type": "thinking", "thinking": text, "signature": name},
            TEXTS,
            TEXTS,
        ),
        st.builds(
            lambda name, fields: {"type": "tool_use", "id": name, "name": name, "input": fields},
            TEXTS,
            st.dictionaries(TEXTS, st.integers()),
        ),
        st.builds(lambda data: {"type": "redacted_thinking", "data": data}, TEXTS),
    )
)


@given(blocks=BLOCKS, stop=st.sampled_from(["end_turn", "tool_use", "stop_sequence"]))
def test_whole_message_becomes_events_that_make_the_same_message(
    blocks: list[dict[str, Any]], stop: str
) -> None:
    usage = {"input_tokens": 11, "output_tokens": 2}
    message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "usage": usage}
    message |= {"content": blocks, "stop_reason": stop, "stop_sequence": None}
    body = whole_as_events(MESSAGES, 200, json.dumps(message).encode())
    assert message_of(events_of(body)) == message
    reader = EventReader()
    assert reader.feed(body) == body
    assert (reader.ended, reader.usage) == (True, TokenUsage(11, 2))


def test_whole_chat_completion_becomes_a_chunk_and_done() -> None:
    call: dict[str, Any] = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    message = {"role": "assistant", "content": "ab", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    answer = {"id": "x", "object": "chat.completion", "choices": [choice], "error": None}
    body = whole_as_events(CHAT, 200, json.dumps(answer).encode())
    [(_, chunk), (_, last)] = events_of(body)
    assert (chunk["object"], chunk["id"], last) == ("chat.completion.chunk", "x", "[DONE]")
    delta = message | {"tool_calls": [call | {"index": 0}]}
    assert chunk["choices"] == [{"index": 0, "delta": delta, "finish_reason": "tool_calls"}]


@pytest.mark.parametrize("path", [COMPLETIONS, "/generate", "/inference/v1/generate"])
def test_whole_answer_of_generating_path_is_its_event_before_done(path: str) -> None:
    answer = {"choices": [{"index": 0, "text": "ab"}]}
    assert events_of(whole_as_events(path, 200, json.dumps(answer).encode())) == [
        ("", answer),
        ("", "[DONE]"),
    ]


@pytest.mark.parametrize("status", ["completed", "incomplete", "unknown"])
def test_whole_response_is_in_the_event_that_ends_it(status: str) -> None:
    answer = {"error": None, "status": status, "output": [{"type": "message"}]}
    events = events_of(whole_as_events("/v1/responses", 200, json.dumps(answer).encode()))
    end = "response.completed" if status == "unknown" else f"response.{status}"
    assert [name for name, _ in events] == ["response.created", end]
    assert [event["sequence_number"] for _, event in events] == [0, 1]
    assert (events[0][1]["response"]["output"], events[1][1]["response"]) == ([], answer)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["error", "type", "content", "choices", "message", "tool_calls", "usage"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    path=st.sampled_from([CHAT, COMPLETIONS, "/v1/responses", MESSAGES, "/generate"]),
    status=st.sampled_from([200, 400, 500]),
    content=JSON_VALUES,
)
def test_whole_answer_of_any_shape_is_an_end_or_an_error(
    path: str, status: int, content: object
) -> None:
    body = whole_as_events(path, status, json.dumps(content).encode())
    events = events_of(body)
    reader = EventReader()
    reader.feed(body)
    name, last = events[-1]
    if status >= 400 or not reader.ended:
        assert len(events) == 1
        assert last["error"]
        assert name == ("error" if path == MESSAGES else "")


def test_whole_message_ends_held_open_stream_by_named_events() -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "ab"}],
               "stop_reason": "end_turn", "stop_sequence": None,
               "usage": {"input_tokens": 11, "output_tokens": 2}}  # fmt: skip
    request = {**REQUESTS[MESSAGES][0], "stream": True}

    async def work() -> None:
        async with proxied(Fake("w0"), timeouts=Timeouts(heartbeat=0.05)) as setup:
            answer = await setup.post(
                request | {"fake": {"w0": {"whole": message, "delay": 0.3}}}, MESSAGES
            )
            assert answer.body.startswith(HEARTBEAT)
            assert message_of(events_of(answer.body)) == message
            assert await setup.metric("output_tokens_total") == 2
        # Where nothing was sent the answer stays as it is.
        async with proxied(Fake("w0"), timeouts=Timeouts(heartbeat=0.0)) as setup:
            answer = await setup.post(request | {"fake": {"w0": {"whole": message}}}, MESSAGES)
            assert json.loads(answer.body) == message

    run(work())


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_refusals_at_anthropics_paths_have_their_apis_shape(path: str) -> None:
    async def work() -> None:
        access, limits = AccessSettings(keys=("one",)), Limits(body=2000)
        async with proxied(Fake("w0"), access=access, limits=limits) as setup:
            key = {"Authorization": "Bearer one"}
            answers = [
                await setup.post({}, path),
                await setup.post(b"x" * 3000, path, **key),
                await setup.get(path, **key),
            ]
            contents = [json.loads(one.body) for one in answers]
            assert [(one["type"], one["error"]["type"]) for one in contents] == [
                ("error", "authentication_error"),
                ("error", "request_too_large"),
                ("error", "invalid_request_error"),
            ]
            assert [one.status for one in answers] == [401, 413, 405]
            assert "type" not in json.loads((await setup.post({}, "/other" + path)).body)

    run(work())


PAGE = "https://chat.example"


async def preflight(setup: ProxySetup, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with setup.client.options(setup.url + path, headers=names) as answer:
        own = {k: v for k, v in answer.headers.items() if k.startswith("Access-Control")}
        return answer.status, own


def test_preflight_is_answered_without_a_key() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0"), access=AccessSettings(keys=("one",))) as setup:
            asked_for = {
                "Origin": PAGE,
                "Access_Control_Request_Method": "POST",
                "Access_Control_Request_Headers": "authorization, content-type",
            }
            status, headers = await preflight(setup, "/v1/chat/completions", **asked_for)
            assert (status, headers) == (
                204,
                {
                    "Access-Control-Allow-Origin": "*",
                    "Access-Control-Allow-Methods": "POST",
                    "Access-Control-Allow-Headers": "authorization, content-type",
                    "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
                    "Access-Control-Max-Age": "600",
                },
            )
            for path in ("/workers", "/workers/w0/drain", "/metrics", "/flush_cache"):
                status, headers = await preflight(setup, path, **asked_for)
                assert (status in (404, 405), headers) == (True, {})
            assert (await preflight(setup, "/v1/models"))[0] == 405
            assert fake.served == []

    run(work())


@pytest.mark.parametrize(
    ("allowed", "expected"), [(("*",), "*"), ((PAGE,), PAGE), (("https://a",), None), ((), None)]
)
def test_answers_name_the_origin_that_may_read_them(
    allowed: tuple[str, ...], expected: str | None
) -> None:
    async def work() -> None:
        access = AccessSettings(keys=("one",), allowed_origins=allowed)
        async with proxied(Fake("w0"), access=access) as setup:
            key = {"Authorization": "Bearer one", "Origin": PAGE}
            answers = [
                await setup.post(chat_request(1, stream=True), **key),
                await setup.post(chat_request(1), **key),
                await setup.post(chat_request(1, n=0), **key),
                await setup.post(chat_request(1), Origin=PAGE),
                await setup.get("/v1/models", **key),
            ]
            assert [one.status for one in answers] == [200, 200, 400, 401, 200]
            for one in answers:
                assert one.headers.get("Access-Control-Allow-Origin") == expected
            without = await setup.post(chat_request(1), Authorization="Bearer one")
            assert "Access-Control-Allow-Origin" not in without.headers
            assert "Access-Control-Allow-Origin" not in (await setup.get("/metrics", **key)).headers

    run(work())
