"""Forwards what any worker can answer without a slot: its list of models, its tokenizer."""

import asyncio

import aiohttp
from aiohttp import web

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.client_connection import SERVER_NAME
from equipoise.serve.headers import client_response_headers, worker_request_headers
from equipoise.serve.openai_protocol import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from equipoise.serve.outcomes import ErrorResponse, RequestOutcome, RequestRefused, bad_request
from equipoise.serve.settings import RouteSettings
from equipoise.serve.upstream import (
    FAILURES,
    AttemptFailed,
    BufferedAnswer,
    describe_failure,
    read_answer,
    send_request,
)

MODELS_PATH = "/v1/models"
FORWARDED_PATHS = (MODELS_PATH, "/version")
"""What is passed on: servers also take commands by GET, such as SGLang's `/flush_cache` and
`/release_memory_occupation`, and the proxy's own key must not open those."""
TOKENIZER_PATHS = frozenset(
    {"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens"}
    | {f"{path}/render" for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
)
"""POST: what a server answers without its model."""
ANSWER_TIMEOUT = 60.0
"""Seconds for an answer."""
NO_WORKER = ErrorResponse(503, RequestOutcome.WORKERS_FAILED, "no worker serves", "no_worker")


def is_forwarded(path: str) -> bool:
    """Whether a worker may be asked for `path`, decoded and without its query.

    One model is asked for as `/v1/models/NAME`, and a name may have slashes; with a segment of dots
    it would become another path on its way.
    """
    if path in FORWARDED_PATHS:
        return True
    prefix, _, name = path.partition(MODELS_PATH + "/")
    return not prefix and bool(name) and not {"", ".", ".."} & set(name.split("/"))


class Forwarder:
    """Passes a request on to a worker that serves, in turns, and to another one if that fails."""

    def __init__(
        self, settings: RouteSettings, dispatcher: RequestDispatcher, client: aiohttp.ClientSession
    ) -> None:
        self._settings, self._dispatcher, self._client = settings, dispatcher, client
        self._turn = 0

    async def answer(
        self, request: web.BaseRequest, name: str, body: bytes | None = None
    ) -> web.Response:
        """Raises RequestRefused where no worker answers."""
        path = request.raw_path
        if not path.startswith("/"):
            # An absolute target names a server, and a worker's address is not to be made of it.
            raise bad_request("the target of a request has to begin with a slash")
        error_response, failed_worker = NO_WORKER, None
        for _ in range(self._settings.limits.attempts):
            worker = self._next_worker(failed_worker)
            if worker is None:
                break
            try:
                return _response(await self._ask(request, worker, body, name), name)
            except AttemptFailed as error:
                error_response, failed_worker = error.error_response, worker
        raise RequestRefused(error_response)

    def _next_worker(self, failed_worker: int | None) -> int | None:
        serving = [
            number
            for number, view in enumerate(self._dispatcher.workers)
            if view.state is WorkerState.SERVING and number != failed_worker
        ]
        self._turn += 1
        return serving[self._turn % len(serving)] if serving else None

    async def _ask(
        self, request: web.BaseRequest, number: int, body: bytes | None, name: str
    ) -> BufferedAnswer:
        worker = self._settings.workers[number]
        key = self._settings.access.worker_key
        headers = worker_request_headers(request.headers, worker, key, name)
        try:
            async with (
                asyncio.timeout(ANSWER_TIMEOUT),
                send_request(
                    self._client, request.method, worker.url + request.raw_path, headers, body
                ) as answer,
            ):
                return await read_answer(answer, self._settings.limits)
        except FAILURES as error:
            raise AttemptFailed(describe_failure(error)) from error


def _response(whole: BufferedAnswer, name: str) -> web.Response:
    headers = [*client_response_headers(whole.headers, name), ("Server", SERVER_NAME)]
    return web.Response(status=whole.status, headers=headers, body=whole.body)
