"""One stream of one attempt, when its binding ends before its first bytes have gone out."""

import asyncio
from typing import Any

import pytest
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.proxy_setup import run

from equipoise.balancer.requests.dispatcher import BoundToWorker, RequestDispatcher
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.cancel_scope import CancelScope
from equipoise.serve.client_connection import ANSWERING, NOTHING_SENT
from equipoise.serve.openai_protocol import CHAT, ParsedRequest
from equipoise.serve.proxy_request import ProxyRequest, skip_failed_event
from equipoise.serve.relay import RequestContext, StreamRelay
from equipoise.serve.request_log import RequestStats
from equipoise.serve.upstream import AttemptFailed

TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


class Answer:
    """What a worker sends, as aiohttp hands it out."""

    headers = {"Transfer-Encoding": "chunked"}  # noqa: RUF012

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, b""]
        self.content = self

    async def readany(self) -> bytes:
        return self._pieces.pop(0)


class Client:
    """Records the response and the bytes that it receives."""

    def __init__(self) -> None:
        self.phase = NOTHING_SENT
        self.received = b""

    async def begin(self, answer: object) -> None:
        self.phase = ANSWERING

    async def write(self, data: bytes) -> None:
        self.received += data

    async def finish(self) -> str:
        return "ended"


def test_stream_drops_bytes_of_worker_lost_before_first_byte() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        dispatcher = RequestDispatcher(LateBinding([1, 1]), 2, loop, skip_failed_event)
        state = ProxyRequest(0, 5)
        dispatcher.submit(state)
        old = state.status
        assert isinstance(old, BoundToWorker)
        client: Any = Client()
        request: Any = None
        parsed_request = ParsedRequest(CHAT, "m", True, b"", 5, 0, None)
        context = RequestContext(
            request, parsed_request, RequestStats("a", CHAT, 0.0), state, client, 1e9
        )
        dispatcher.set_health(old.worker, WorkerState.LOST)
        assert isinstance(state.status, BoundToWorker)
        assert state.status is not old
        answer: Any = Answer(TOKEN)
        async with CancelScope() as scope:
            with pytest.raises(AttemptFailed):
                await StreamRelay(dispatcher, context, old, scope, 9.0).relay(answer, _never)
            assert client.received == b""
            again: Any = Answer(TOKEN, b"data: [DO", b"NE]\n\n")
            new = state.status
            outcome = await StreamRelay(dispatcher, context, new, scope, 9.0).relay(
                again, _on_complete
            )
        assert (str(outcome), client.received) == ("ended", TOKEN + b"data: [DONE]\n\n")
        await asyncio.sleep(0)

    run(work())


def _never(*_: object) -> None:
    raise AssertionError("it was not complete")


def _on_complete(*_: object) -> None:
    """The stream is complete."""
