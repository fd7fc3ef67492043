"""Prompts that begin alike go to the worker that was sent the first of them, if a policy asks."""

import json
from typing import Any

import aiohttp
import pytest
from helpers.fakes.fake_openai_server import Fake, start
from helpers.harnesses.proxy_setup import chat_request, run, settings_of

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.prefix_index import BLOCK_BYTES, BLOCK_TOKENS
from equipoise.serve.body_parser import LARGE_BODY, BodyParser
from equipoise.serve.openai_protocol import PROMPT_KEYS, parse_request
from equipoise.serve.proxy import Proxy

LONG = "x" * (3 * BLOCK_BYTES)


def conversation(topic: str, turns: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{topic} {LONG} {turn}"} for turn in range(turns)]
    return chat_request(1, messages=messages)


def test_proxy_sends_turns_of_a_conversation_to_one_worker() -> None:
    async def work() -> None:
        fakes = [Fake("w0"), Fake("w1"), Fake("w2")]
        runners = [await start(fake) for fake in fakes]
        slots = [fake.slots for fake in fakes]
        policy = routing_policy_factory("sglang_cache", {})(slots, [None] * 3)
        proxy = Proxy(settings_of(fakes), policy)
        await proxy.start()
        topics, workers = ("red", "green", "blue"), []
        try:
            async with aiohttp.ClientSession() as client:
                for turns in (1, 2, 3):
                    for topic in topics:
                        url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
                        async with client.post(url, json=conversation(topic, turns)) as answer:
                            text = (await answer.json())["choices"][0]["message"]["content"]
                        workers.append((topic, text.partition(":")[0]))
        finally:
            await proxy.stop()
            for runner in runners:
                await runner.cleanup()
        assert len(set(workers)) == 3
        assert len({worker for _, worker in workers}) == 3

    run(work())


BODIES = {
    "/v1/chat/completions": conversation("a", 1),
    "/v1/completions": {"model": "m", "prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": LONG}]},
    "/generate": {"text": LONG},
    "/inference/v1/generate": {"token_ids": [7] * (3 * BLOCK_TOKENS)},
}


def blocks(path: str, body: dict[str, Any]) -> tuple[int, ...]:
    return tuple(parse_request(path, json.dumps(body).encode(), {}).blocks)


@pytest.mark.parametrize("path", PROMPT_KEYS)
def test_prompt_has_blocks_by_its_text_and_model(path: str) -> None:
    body = BODIES[path]
    assert len(blocks(path, body)) >= 3
    assert blocks(path, body) == blocks(path, {**body, "max_tokens": 9, "temperature": 0.5})
    assert not {*blocks(path, body)} & {*blocks(path, {**body, "cache_salt": "mine"})}


def test_several_prompts_and_impossible_tokens_have_no_blocks() -> None:
    for prompt in ([LONG, LONG], [[7] * 300, [7] * 300], [1 << 70] * 300):
        assert blocks("/v1/completions", {"model": "m", "prompt": prompt}) == ()


def test_large_body_has_the_same_blocks_from_the_parser_process() -> None:
    async def work() -> None:
        body = json.dumps({"model": "m", "prompt": [7] * LARGE_BODY}).encode()
        parser = BodyParser()
        try:
            parsed = await parser.parse("/v1/completions", body, {})
        finally:
            await parser.close()
        here = parse_request("/v1/completions", body, {})
        assert len(here.blocks) == LARGE_BODY // BLOCK_TOKENS
        assert tuple(parsed.blocks) == here.blocks

    run(work())
