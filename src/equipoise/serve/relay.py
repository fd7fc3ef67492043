"""Relays one request from its client to a worker and the answer back, with retries.

queued -> bound -> sent -> passed on -> finished
            ^               |
            +--- retry -----+   only before anything is passed on, and a bounded number of times
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count

import aiohttp
from aiohttp import web

from equipoise.balancer.requests.dispatcher import BoundToWorker, RequestDispatcher
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.client_connection import (
    ANSWERING,
    NOTHING_SENT,
    PROXY_FAILED,
    SERVER_NAME,
    ClientDisconnected,
    ClientStream,
)
from equipoise.serve.cors import cors_headers
from equipoise.serve.headers import client_response_headers, worker_request_headers
from equipoise.serve.openai_protocol import (
    MAX_TOKENS,
    UNREAD_PATHS,
    EventReader,
    ParsedRequest,
    TokenUsage,
    error_event,
    read_usage,
    whole_as_events,
)
from equipoise.serve.outcomes import ErrorResponse, RequestOutcome, RequestRefused, bad_request
from equipoise.serve.proxy_request import ProxyRequest
from equipoise.serve.request_log import RequestStats
from equipoise.serve.settings import RouteSettings
from equipoise.serve.upstream import (
    FAILURES,
    AttemptFailed,
    BufferedAnswer,
    body_reader,
    describe_failure,
    is_framed,
    is_stream,
    read_answer,
    send_request,
)

LOG = logging.getLogger("equipoise.route")


@dataclass(frozen=True)
class RequestContext:
    """What belongs to one request.

    Attributes:
        http_request: the client's.
        parsed: what it wants.
        stats: what is noted of it.
        state: what the dispatcher knows of it.
        client: what its client gets.
        deadline: loop's time by which it has to be over.
    """

    http_request: web.BaseRequest
    parsed: ParsedRequest
    stats: RequestStats
    state: ProxyRequest
    client: ClientStream
    deadline: float


PRIOR_TOKENS, PRIOR_BYTES = 1 << 10, 1 << 12
"""Four bytes a token, until so much has been seen that this is no more than a beginning."""
MAX_BYTES = 1 << 32
"""Beyond it what was seen weighs half, so that traffic that changes is followed."""


class PromptTokenEstimator:
    """Tokens of a text by its bytes in UTF-8, at the ratio of finished requests.

    Bytes and not letters: a letter of Chinese or Japanese is three of them, and most often about
    one token; one of English is one, and a quarter of a token. Whole numbers only, so that the same
    answers in the same order give the same estimates anywhere.
    """

    def __init__(self) -> None:
        self._tokens, self._bytes = PRIOR_TOKENS, PRIOR_BYTES

    def estimate(self, text: int) -> int:
        """Of a text of so many bytes; at least 1."""
        return min(max(1, -(-text * self._tokens // self._bytes)), MAX_TOKENS)

    def update(self, text: int, tokens: int) -> None:
        """A text of so many bytes had so many tokens.

        What goes beyond a token a byte is not of the text: a picture's, a template's, or a mistake.
        """
        if text < 1 or tokens < 1:
            return
        self._tokens += min(tokens, text)
        self._bytes += text
        if self._bytes > MAX_BYTES:
            self._tokens = max(1, self._tokens // 2)
            self._bytes //= 2

    @property
    def bytes_per_token(self) -> float:
        """Bytes of UTF-8 a token."""
        return self._bytes / self._tokens


MAX_PRELUDE_BYTES = 1 << 16
"""Bytes that are kept back until the first token, because until then all can be tried again."""

CLOSING = 1.0
"""Seconds for a worker to end its stream after `[DONE]`, so that its connection can be reused."""


class StreamRelay:
    """Of one attempt.

    Args:
        dispatcher: tokens are reported to it.
        context: the request.
        bound: the binding by which it was sent.
        scope: what runs here runs within it.
        token_timeout: seconds from one token to the next, and for the client to take one.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        context: RequestContext,
        bound: BoundToWorker,
        scope: CancelScope,
        token_timeout: float,
    ) -> None:
        self._dispatcher, self._context, self._binding = dispatcher, context, bound
        self._scope, self._client, self._token_timeout = scope, context.client, token_timeout
        self._reader = EventReader()
        self._prelude = b""
        self._loop = asyncio.get_running_loop()

    async def relay(
        self,
        answer: aiohttp.ClientResponse,
        completed: Callable[[RequestContext, BoundToWorker, TokenUsage], None],
    ) -> web.StreamResponse:
        """All of it; `completed` is called when it has come.

        Raises: AttemptFailed where it must not be passed on any more; aiohttp's errors where the
        worker breaks off; ClientDisconnected.
        """
        read = body_reader(answer)
        while chunk := await self._next(read):
            await self._pass(answer, self._reader.feed(chunk), self._loop.time())
        if not is_framed(answer) and not self._reader.ended:
            raise aiohttp.ServerDisconnectedError("the stream has no end")
        rest = self._prelude + self._reader.flush()
        if self._client.phase is not ANSWERING:
            self._check_beginning()
            await self._begin(answer)
        self._context.stats.output = self._reader.tokens
        # Before the rest is written: the worker is done, and a client that takes the rest slowly
        # must not keep its slot.
        completed(self._context, self._binding, self._reader.usage)
        self._scope.set_timeout(self._token_timeout, CancelReason.CLIENT_STALLED)
        if rest:
            await self._client.write(rest)
        return await self._client.finish()

    def _check_beginning(self) -> None:
        """An answer with nothing in it, or with an error of the worker's, is none."""
        if self._reader.failed_before_token:
            raise AttemptFailed("its stream began with an error")
        if not self._reader.tokens and not self._reader.ended:
            raise AttemptFailed("its stream is empty")

    async def _next(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """The next bytes; none after `[DONE]`, whether the worker then closes its stream or not."""
        if not self._reader.ended:
            return await read()
        try:
            async with asyncio.timeout(CLOSING):
                return await read()
        except (*FAILURES, TimeoutError):
            return b""

    async def _pass(self, answer: aiohttp.ClientResponse, whole: bytes, came: float) -> None:
        """Pass whole events on, once there is a token among those that have come."""
        if self._client.phase is not ANSWERING:
            self._prelude += whole
            if not self._reader.tokens and len(self._prelude) < MAX_PRELUDE_BYTES:
                return
            whole, self._prelude = self._prelude, b""
            await self._begin(answer)
        stats = self._context.stats
        stats.output = self._reader.tokens
        self._dispatcher.report_tokens(self._context.state, self._reader.tokens)
        self._scope.set_timeout(self._token_timeout, CancelReason.CLIENT_STALLED)
        if whole:
            await self._client.write(whole)
        self._scope.set_timeout(self._token_timeout, CancelReason.TOKEN)
        if stats.first_answer_at is None:
            stats.first_answer_at = self._loop.time()
            stats.pass_on_seconds = stats.first_answer_at - came

    async def _begin(self, answer: aiohttp.ClientResponse) -> None:
        if not self._dispatcher.start(self._context.state, self._binding):
            raise AttemptFailed(CancelReason.LOST_BEFORE_FIRST_TOKEN.value)
        await self._client.begin(answer)


ERROR_RESPONSES = {
    CancelReason.NO_FREE_SLOT: ErrorResponse(
        503, RequestOutcome.QUEUE_TIMEOUT, CancelReason.NO_FREE_SLOT.value, "no_worker", {}
    ),
    CancelReason.FIRST_TOKEN: ErrorResponse(
        504, RequestOutcome.TIMED_OUT, CancelReason.FIRST_TOKEN.value, "timeout"
    ),
    CancelReason.TOKEN: ErrorResponse(
        504, RequestOutcome.TIMED_OUT, CancelReason.TOKEN.value, "timeout"
    ),
    CancelReason.TOTAL: ErrorResponse(
        504, RequestOutcome.TIMED_OUT, CancelReason.TOTAL.value, "timeout"
    ),
    CancelReason.LOST_BEFORE_FIRST_TOKEN: ErrorResponse(
        502,
        RequestOutcome.WORKERS_FAILED,
        CancelReason.LOST_BEFORE_FIRST_TOKEN.value,
        "worker_lost",
    ),
    CancelReason.WORKER_LOST: ErrorResponse(
        502, RequestOutcome.WORKER_LOST, CancelReason.WORKER_LOST.value, "worker_lost"
    ),
    CancelReason.SHUTTING_DOWN: ErrorResponse(
        503, RequestOutcome.SHUTTING_DOWN, CancelReason.SHUTTING_DOWN.value, "shutting_down"
    ),
}

NO_WORKER_SERVES = ErrorResponse(
    503, RequestOutcome.QUEUE_TIMEOUT, "no worker serves: all are lost or draining", "no_worker"
)
"""Instead of the response of `NO_FREE_SLOT`: more slots would not help."""


class Relay:
    """For all requests of a proxy.

    Args:
        settings: the proxy's.
        dispatcher: where requests are bound.
        client: to the workers.
        doubt: called with the number of a worker that failed a request.
    """

    def __init__(
        self,
        settings: RouteSettings,
        dispatcher: RequestDispatcher,
        client: aiohttp.ClientSession,
        doubt: Callable[[int], None],
    ) -> None:
        self._settings, self._dispatcher, self._client = settings, dispatcher, client
        self._doubt = doubt
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self.token_estimator = PromptTokenEstimator()

    async def answer(
        self,
        request: web.BaseRequest,
        parsed: ParsedRequest,
        stats: RequestStats,
        wanted: int | None,
    ) -> web.StreamResponse:
        """The answer, passed on already where it is a stream; `wanted` is the only worker for it.

        Raises: RequestRefused; ClientDisconnected.
        """
        stats.prompt = parsed.prompt_tokens or self.token_estimator.estimate(parsed.prompt_bytes)
        size = self._size(parsed, stats.prompt, wanted)
        state = ProxyRequest(next(self._numbers), size, wanted, parsed.blocks)
        end = stats.arrival + self._settings.timeouts.total
        origins = self._settings.access.allowed_origins
        client = ClientStream(request, stats.id, cors_headers(origins, request.headers))
        context = RequestContext(request, parsed, stats, state, client, end)
        try:
            self._dispatcher.submit(state)
            state.check_open()
            if parsed.streamed and self._settings.timeouts.heartbeat:
                client.hold_open(self._settings.timeouts.heartbeat)
            return await self._attempts(context)
        except ScopeCancelled as cancellation:
            return await self._refuse(context, self._error_response(cancellation.reason))
        except RequestRefused as refusal:
            return await self._refuse(context, refusal.error_response)
        except (ClientDisconnected, ConnectionError):
            raise
        except Exception:
            if client.phase is NOTHING_SENT:
                raise
            LOG.exception("request %s failed", stats.id)
            return await self._refuse(context, PROXY_FAILED)
        finally:
            client.close()
            # However it ends, the policy has to learn of it; after `finish` this does nothing.
            self._dispatcher.abort(state)

    async def _refuse(
        self, context: RequestContext, error_response: ErrorResponse
    ) -> web.StreamResponse:
        """By its status, or by an event where a status has gone out already.

        Raises: RequestRefused: the caller makes an answer of it.
        """
        if context.client.phase is NOTHING_SENT:
            raise RequestRefused(error_response)
        context.stats.outcome = error_response.outcome
        # Given up before the event is sent: a client that takes it slowly must not keep a slot.
        self._dispatcher.abort(context.state)
        return await context.client.end_with(error_event(context.parsed.path, error_response))

    def _error_response(self, reason: CancelReason) -> ErrorResponse:
        serving = any(one.state is WorkerState.SERVING for one in self._dispatcher.workers)
        if reason is CancelReason.NO_FREE_SLOT and not serving:
            return NO_WORKER_SERVES
        return ERROR_RESPONSES[reason]

    def _size(self, parsed: ParsedRequest, prompt: int, required_worker: int | None) -> int:
        """Prompt size that the policy gets.

        A size that is known stays as it is: it may wait for the only worker that has room. An
        estimate may be wrong, and the worker knows: it is at most what the largest that serves
        holds, which gets what seems too long once it is empty.

        Raises: RequestRefused (400) for a prompt that is known to be too long for any worker.
        """
        numbers = range(len(self._settings.workers))
        allowed = numbers if required_worker is None else [required_worker]
        if parsed.prompt_tokens:
            most = self._most_tokens(allowed, prompt)
            if prompt <= most:
                return prompt
            message = f"the prompt has {prompt} tokens, and no worker has room for more than {most}"
            raise bad_request(message, code="context_length_exceeded")
        views = self._dispatcher.workers
        serving = [one for one in allowed if views[one].state is WorkerState.SERVING]
        return min(prompt, self._most_tokens(serving or allowed, prompt))

    def _most_tokens(self, numbers: Sequence[int], otherwise: int) -> int:
        """Tokens in the largest KV cache of these workers; `otherwise` where one is not known."""
        limits = [self._settings.workers[number].kv_tokens for number in numbers]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else otherwise

    async def _attempts(self, context: RequestContext) -> web.StreamResponse:
        for _ in range(self._settings.limits.attempts - 1):
            binding = await self._binding(context)
            try:
                return await self._attempt(context, binding)
            except AttemptFailed:
                self._dispatcher.retry(context.state, binding)
        # The last attempt is apart: no retry follows it, so its failure is what the client gets.
        try:
            return await self._attempt(context, await self._binding(context))
        except AttemptFailed as failure:
            if failure.answer is None:
                raise RequestRefused(failure.error_response) from failure
            context.stats.outcome = RequestOutcome.WORKERS_FAILED
            return await _send_whole(context, failure.answer)

    async def _binding(self, context: RequestContext) -> BoundToWorker:
        """Wait for a worker, as long as the dispatcher lets it."""
        stats, state, began = context.stats, context.state, self._loop.time()
        try:
            while True:
                binding = await self._wait_for_binding(context)
                if binding is not None and state.status is binding:
                    break  # else its worker was lost before this task ran
        finally:
            state.scope = None
            stats.queue_seconds += self._loop.time() - began
        stats.worker, stats.bound_at = self._settings.workers[binding.worker].name, binding.at
        return binding

    async def _wait_for_binding(self, context: RequestContext) -> BoundToWorker | None:
        """None: it was bound, and its worker was lost."""
        try:
            async with CancelScope(context.deadline) as scope:
                context.state.scope = scope
                return await context.state.wait_until_bound()
        except ScopeCancelled as cancellation:
            if cancellation.reason is not CancelReason.LOST_BEFORE_FIRST_TOKEN:
                raise
            return None

    async def _attempt(self, context: RequestContext, binding: BoundToWorker) -> web.StreamResponse:
        """Raises AttemptFailed where it may be tried again."""
        try:
            async with CancelScope(context.deadline) as scope:
                context.state.scope = scope
                return await self._exchange(context, binding, scope)
        except ScopeCancelled as cancellation:
            return await self._answer_interruption(context, cancellation.reason)
        except FAILURES as error:
            self._doubt(binding.worker)
            if context.client.phase is not ANSWERING:
                raise AttemptFailed(describe_failure(error)) from error
            message = f"the worker failed: {describe_failure(error)}"
            error_response = ErrorResponse(502, RequestOutcome.WORKER_LOST, message, "worker_lost")
            return await self._refuse(context, error_response)
        finally:
            context.state.scope = None

    async def _answer_interruption(
        self, context: RequestContext, reason: CancelReason
    ) -> web.StreamResponse:
        if reason is CancelReason.CLIENT_STALLED:
            context.stats.outcome = RequestOutcome.CLIENT_STALLED
            context.client.abort()
            raise ClientDisconnected
        if reason is CancelReason.LOST_BEFORE_FIRST_TOKEN and context.client.phase is not ANSWERING:
            raise AttemptFailed(reason.value)
        return await self._refuse(context, self._error_response(reason))

    async def _exchange(
        self, context: RequestContext, binding: BoundToWorker, scope: CancelScope
    ) -> web.StreamResponse:
        worker = self._settings.workers[binding.worker]
        stats, timeouts = context.stats, self._settings.timeouts
        stats.attempts += 1
        stats.sent_at = stats.sent_at or self._loop.time()
        headers = worker_request_headers(
            context.http_request.headers, worker, self._settings.access.worker_key, stats.id
        )
        url = worker.url + context.parsed.path
        if context.parsed.streamed:
            scope.set_timeout(timeouts.first_token, CancelReason.FIRST_TOKEN)
        async with send_request(self._client, "POST", url, headers, context.parsed.body) as answer:
            if answer.status < 300 and is_stream(answer):
                scope.set_timeout(timeouts.first_token, CancelReason.FIRST_TOKEN)
                stream = StreamRelay(self._dispatcher, context, binding, scope, timeouts.token)
                return await stream.relay(answer, self._complete)
            whole = await read_answer(answer, self._settings.limits)
        if whole.status >= 500:
            raise AttemptFailed(f"it answered {whole.status}", whole)
        return await self._whole(context, binding, whole)

    async def _whole(
        self, context: RequestContext, binding: BoundToWorker, whole: BufferedAnswer
    ) -> web.StreamResponse:
        stats = context.stats
        stats.first_answer_at = self._loop.time()
        if whole.status >= 300:
            stats.outcome = RequestOutcome.REJECTED_BY_WORKER
            return await _send_whole(context, whole)
        self._complete(context, binding, read_usage(whole.body))
        return await _send_whole(context, whole)

    def _complete(self, context: RequestContext, binding: BoundToWorker, usage: TokenUsage) -> None:
        stats, parsed = context.stats, context.parsed
        stats.set_usage(usage)
        stats.outcome = RequestOutcome.COMPLETED
        if stats.output:
            self._dispatcher.start(context.state, binding)
            self._dispatcher.report_tokens(context.state, stats.output)
        self._dispatcher.finish(context.state)
        text_known = not parsed.prompt_tokens and parsed.path not in UNREAD_PATHS
        if usage.prompt is not None and text_known:
            self.token_estimator.update(parsed.prompt_bytes, usage.prompt)


async def _send_whole(context: RequestContext, whole: BufferedAnswer) -> web.StreamResponse:
    if context.client.phase is not NOTHING_SENT:
        events = whole_as_events(context.parsed.path, whole.status, whole.body)
        return await context.client.end_with(events)
    headers = [*client_response_headers(whole.headers, context.stats.id), ("Server", SERVER_NAME)]
    return web.Response(status=whole.status, headers=headers, body=whole.body)
