"""What engines serve beside chat and completions: bound to a worker, or passed on, or refused."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import ProxySetup, chat_request, proxied, run

from equipoise.serve.client_connection import HEARTBEAT
from equipoise.serve.forwarded_paths import TOKENIZER_PATHS
from equipoise.serve.openai_protocol import (
    CHAT,
    MESSAGES,
    UNREAD_PATHS,
    EventReader,
    TokenUsage,
    parse_request,
    read_usage,
    whole_as_event,
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
        (418, OWN, ("own_error", "own")),
    ],
)
def test_whole_error_becomes_an_event_of_anthropics_api(
    status: int, content: dict[str, Any], error: tuple[str, str]
) -> None:
    event = whole_as_event(MESSAGES, status, json.dumps(content).encode())
    fields = error_event_of(event)
    assert (fields["type"], fields["message"]) == error


def test_whole_error_of_openai_api_stays_as_the_worker_sent_it() -> None:
    content = {"error": {"message": "m", "type": "x", "code": 7}}
    event = f"data: {json.dumps(content)}\n\n".encode()
    assert whole_as_event(CHAT, 400, json.dumps(content).encode()) == event
    assert whole_as_event(CHAT, 400, json.dumps(content["error"]).encode()) == event
    # An answer that is no error has no event of its own in either API.
    for path in (CHAT, MESSAGES):
        assert whole_as_event(path, 200, b'{"a": 1}') == b'data: {"a": 1}\n\n'


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
