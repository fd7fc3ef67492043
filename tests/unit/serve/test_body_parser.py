"""Large bodies are read in another process: the same result, and a loop that goes on meanwhile."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import chat_request, proxied, run
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.serve import body_parser
from equipoise.serve.body_parser import LARGE_BODY, BodyParser
from equipoise.serve.openai_protocol import CHAT, COMPLETIONS, ParsedRequest, parse_request
from equipoise.serve.outcomes import ErrorResponse, RequestRefused
from equipoise.serve.settings import RANK_HEADER, ClientRank


@pytest.fixture(autouse=True)
def set_long_parse_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsing process yields to all others: on a busy machine it may be late by any factor."""
    monkeypatch.setattr(body_parser, "PARSE_TIMEOUT", WATCHDOG)


LARGE = {"model": "m", "prompt": [7] * LARGE_BODY}


@asynccontextmanager
async def parser() -> AsyncIterator[BodyParser]:
    it = BodyParser()
    try:
        yield it
    finally:
        await it.close()


async def result_of(
    it: BodyParser, path: str, body: bytes, headers: Mapping[str, str]
) -> ParsedRequest | ErrorResponse:
    try:
        return await it.parse(path, body, headers)
    except RequestRefused as refusal:
        return refusal.error_response


def test_large_body_is_parsed_while_loop_goes_on() -> None:
    async def work() -> int:
        turns = 0
        async with parser() as it:
            task = asyncio.create_task(it.parse(COMPLETIONS, json.dumps(LARGE).encode(), {}))
            while not task.done():
                turns += 1
                await asyncio.sleep(0)
            assert task.result().prompt_tokens == LARGE_BODY
        return turns

    # Read on the loop, it takes one turn to begin, and all is done in that.
    assert run(work()) > 5


TEXT = st.text(max_size=20)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.one_of(TEXT, st.integers()),
        "stream": st.one_of(st.booleans(), st.none(), st.integers()),
        "messages": st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3),
        "prompt": st.one_of(TEXT, st.lists(st.integers(-1, 9), max_size=4), st.lists(TEXT)),
        "data_parallel_rank": st.one_of(st.integers(-1, 3), TEXT),
        "n": st.integers(-1, 2),
    },
)
BODIES = st.one_of(FIELDS.map(lambda fields: json.dumps(fields).encode()), st.binary(max_size=30))


@settings(max_examples=10)
@given(
    cases=st.lists(
        st.tuples(st.sampled_from([CHAT, COMPLETIONS]), BODIES, st.sampled_from([None, "2", "x"])),
        max_size=20,
    )
)
def test_parser_process_gives_same_result_as_parser(
    cases: list[tuple[str, bytes, str | None]],
) -> None:
    async def work() -> None:
        async with parser() as it:
            for path, body, rank in cases:
                headers = {} if rank is None else {RANK_HEADER: rank}
                try:
                    expected: Any = parse_request(path, body, headers)
                except RequestRefused as refusal:
                    expected = refusal.error_response
                assert await result_of(it, path, body, headers) == expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_parser, "LARGE_BODY", 0)
        run(work())


def test_parser_process_that_died_is_replaced() -> None:
    async def work() -> None:
        body = json.dumps(LARGE).encode()
        async with parser() as it:
            await it.parse(COMPLETIONS, body, {})
            process = it._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            assert (await it.parse(COMPLETIONS, body, {})).prompt_tokens == LARGE_BODY

    run(work())


def test_parser_refuses_body_that_kills_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with parser() as it:
            result = await result_of(it, COMPLETIONS, json.dumps(LARGE).encode(), {})
            assert isinstance(result, ErrorResponse)
            assert (result.status, result.code) == (500, "internal_error")

    monkeypatch.setattr(body_parser, "__name__", "equipoise.serve.no_such_module")
    run(work())


def test_parser_refuses_large_body_that_waits_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with parser() as it, it._lock:
            result = await result_of(it, COMPLETIONS, json.dumps(LARGE).encode(), {})
            assert isinstance(result, ErrorResponse)
            assert result.status == 429

    monkeypatch.setattr(body_parser, "PARSE_TIMEOUT", 0.01)
    run(work())


def test_parser_survives_client_that_leaves_amid_its_body() -> None:
    async def work() -> None:
        body = json.dumps(LARGE).encode()
        async with parser() as it:
            task = asyncio.create_task(it.parse(COMPLETIONS, body, {}))
            while not it._lock.locked():
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await it.parse(COMPLETIONS, body, {})).prompt_tokens == LARGE_BODY

    run(work())


def test_proxy_passes_large_body_on_without_rank() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0"), client_rank=ClientRank.HONOUR) as setup:
            large = chat_request(2, padding="x" * LARGE_BODY)
            assert (await setup.post(large)).text == "w0:0 w0:1 "
            assert (await setup.post(large | {"data_parallel_rank": 0})).status == 200
            assert (await setup.post(large | {"n": 0})).status == 400
            first, second = (one["body"] for one in fake.events("begin"))
            assert first == second == len(json.dumps(large))

    run(work())
