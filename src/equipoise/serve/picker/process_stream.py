"""One stream of the external processor, which is one request of a client.

head -> (body) -> queued -> picked -> answered -> ended

Envoy waits at `queued` for as long as no endpoint has a free slot: that is the late binding.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import EOF

from equipoise.balancer.requests.dispatcher import BoundToWorker, RequestClosed
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.openai_protocol import (
    CHAT,
    COMPLETIONS,
    EventReader,
    parse_request,
    read_usage,
)
from equipoise.serve.outcomes import (
    RETRY_AFTER,
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    bad_request,
    overloaded,
)
from equipoise.serve.picker.endpoint_pool import Endpoint, EndpointPool
from equipoise.serve.picker.messages import (
    CONTINUE,
    CONTINUE_WITHOUT_CHUNKS,
    FULL_DUPLEX,
    NO_BODY,
    WHOLE_BODY,
    RequestHead,
    destination_reply,
    refusal_reply,
    request_head,
    response_header,
    response_status,
    served_endpoint,
    streamed_reply,
)
from equipoise.serve.picker.settings import PickerSettings, TokenSource
from equipoise.serve.proxy_request import ProxyRequest
from equipoise.serve.relay import PromptTokenEstimator

LOG = logging.getLogger("equipoise.picker")
PARSED_BYTES = 1 << 20
"""A longer body is not parsed, because all streams would wait for that; its bytes are its size."""
ANSWER_BYTES = 1 << 20
"""Bytes of an answer that is no stream, of which the usage is read; a longer one is not kept."""
QUEUE_TIMEOUT = ErrorResponse(
    503, RequestOutcome.QUEUE_TIMEOUT, CancelReason.NO_FREE_SLOT.value, "queue_timeout", RETRY_AFTER
)
SHUTTING_DOWN = ErrorResponse(
    503, RequestOutcome.SHUTTING_DOWN, "the picker is shutting down", "shutting_down", RETRY_AFTER
)


class StreamContext(Protocol):
    """What is used of a `grpc.aio.ServicerContext`."""

    async def read(self) -> Any:
        """The next message, or `EOF`."""

    async def write(self, message: bytes) -> None:
        """Send an answer."""


class ClientLeft(Exception):
    """Raised where Envoy closes the stream before the request was answered."""


class AnswerTokens:
    """Counts the tokens of an answer in its chunks.

    Attributes:
        prompt: prompt tokens as the worker counted them; None: it does not say.
    """

    def __init__(self, streamed: bool) -> None:
        self._events = EventReader() if streamed else None
        self._body = b""
        self.prompt: int | None = None

    def feed(self, chunk: bytes) -> int:
        """Tokens so far; of what is no stream, 0 until its end."""
        if self._events is None:
            if len(self._body) + len(chunk) <= ANSWER_BYTES:
                self._body += chunk
            return 0
        self._events.feed(chunk)
        self.prompt = self._events.usage.prompt
        return self._events.tokens

    @property
    def ended(self) -> bool:
        """Whether the event that ends a stream has come."""
        return self._events is not None and self._events.ended

    def total(self) -> int:
        """Tokens at the end."""
        if self._events is not None:
            return self._events.tokens
        usage = read_usage(self._body)
        self.prompt = usage.prompt
        return usage.completion or 0


class ProcessStream:
    """Answers the messages of one stream.

    Args:
        pool: picks the endpoint.
        settings: limits, timeouts, and whether tokens are counted in chunks.
        estimator: of the tokens of a prompt.
        context: of gRPC.

    Attributes:
        outcome: what became of the request; None as long as it is under way, and for requests that
            bring no tokens.
        queue_seconds: in which it waited for an endpoint.
    """

    def __init__(
        self,
        pool: EndpointPool,
        settings: PickerSettings,
        estimator: PromptTokenEstimator,
        context: StreamContext,
    ) -> None:
        self._pool, self._settings, self._estimator = pool, settings, estimator
        self._read: Callable[[], Awaitable[Any]] = context.read
        self._write = context.write
        self._pending: asyncio.Task[Any] | None = None
        self._state: ProxyRequest | None = None
        self._addresses: tuple[str, ...] = ()
        self._prompt_bytes = 0
        self._request_mode = self._response_mode = 0
        self._answer: AnswerTokens | None = None
        self.outcome: RequestOutcome | None = None
        self.queue_seconds: float | None = None

    async def run(self) -> None:
        """Until the stream ends. However it ends, the policy learns of it."""
        try:
            await self._choose()
            while (message := await self._next()) is not EOF:
                await self._pass_on(message)
        except ClientLeft:
            self.outcome = RequestOutcome.CLIENT_DISCONNECTED
        except RequestRefused as refusal:
            self.outcome = refusal.error_response.outcome
            await self._write(refusal_reply(refusal.error_response))
        except asyncio.CancelledError:
            self.outcome = self.outcome or RequestOutcome.CLIENT_DISCONNECTED
            raise
        finally:
            if self._pending is not None:
                self._pending.cancel()
            self._end()

    def shut_down(self) -> bool:
        """Refuse it if it waits for an endpoint; returns whether it did."""
        state = self._state
        if state is None or state.scope is None:
            return False
        state.cancel(CancelReason.SHUTTING_DOWN)
        return True

    async def _choose(self) -> None:
        """From the head of a request to the answer that names its endpoint."""
        message = await self._expect()
        kind = message.WhichOneof("request")
        if kind != "request_headers":
            # Where Envoy does not send them there is nothing to answer with an endpoint.
            LOG.error("a stream begins with %s: set request_header_mode: SEND", kind)
            await self._write(CONTINUE[kind])
            return
        self._request_mode = message.protocol_config.request_body_mode
        self._response_mode = message.protocol_config.response_body_mode
        head = request_head(message)
        if head.complete:
            await self._answer_head(head, b"")
        elif self._request_mode in WHOLE_BODY:
            await self._write(CONTINUE["request_headers"])
            message = await self._expect()
            await self._answer_body(message, head)
        elif self._request_mode == FULL_DUPLEX:
            await self._answer_stream(head)
        else:
            await self._answer_head(head, b"")

    async def _answer_head(self, head: RequestHead, body: bytes) -> None:
        await self._write(await self._destination("request_headers", head, body))

    async def _answer_body(self, message: pb.ProcessingRequest, head: RequestHead) -> None:
        """Envoy has kept the body, and waits with the headers until its answer."""
        if message.WhichOneof("request") != "request_body":
            raise bad_request("the body of the request did not come", code="no_body")
        body = message.request_body.body
        await self._write(await self._destination("request_body", head, body))

    async def _answer_stream(self, head: RequestHead) -> None:
        """Envoy keeps nothing: the head waits for the body, which then goes on as it came."""
        chunks: list[pb.HttpBody] = []
        length, trailers = 0, False
        while not (trailers or (chunks and chunks[-1].end_of_stream)):
            message = await self._expect()
            trailers = message.WhichOneof("request") == "request_trailers"
            if trailers:
                continue
            chunks.append(message.request_body)
            length += len(message.request_body.body)
            if length > self._settings.limits.body:
                text = f"the body has more than {self._settings.limits.body} bytes"
                raise RequestRefused(
                    ErrorResponse(413, RequestOutcome.TOO_LARGE, text, "body_too_large")
                )
        body = b"".join(one.body for one in chunks)
        await self._write(await self._destination("request_headers", head, body))
        for one in chunks:
            await self._write(streamed_reply("request_body", one))
        if trailers:
            await self._write(CONTINUE["request_trailers"])

    async def _destination(self, kind: str, head: RequestHead, body: bytes) -> bytes:
        """Wait for an endpoint; returns the answer that names it."""
        if head.method in ("GET", "HEAD", "OPTIONS"):
            return self._named(kind, head, self._pool.any_endpoint(head.subset))
        size = self._size(head, body)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            endpoint = await self._bound(size, head)
        finally:
            self.queue_seconds = loop.time() - began
        return self._named(kind, head, endpoint)

    def _named(self, kind: str, head: RequestHead, endpoint: Endpoint) -> bytes:
        self._addresses = self._pool.addresses(endpoint, head.subset)
        return destination_reply(kind, self._addresses, endpoint.headers)

    async def _bound(self, size: int, head: RequestHead) -> Endpoint:
        """Raises RequestRefused; ClientLeft."""
        state = self._state = self._pool.submit(size, head.subset)
        while True:
            if isinstance(state.status, BoundToWorker):
                endpoint = self._pool.endpoint(state.status)
                if self._pool.allows(endpoint, head.subset):
                    return endpoint
                # It waited for any, and this one is not of its subset.
                self._pool.abort(state)
                state = self._state = self._pool.submit(size, head.subset)
                continue
            if head.objective in self._settings.sheddable:
                raise overloaded(f"requests of the objective {head.objective!r} do not wait")
            try:
                await self._wait(state)
            except ScopeCancelled as cancellation:
                if cancellation.reason is CancelReason.NO_FREE_SLOT:
                    raise RequestRefused(QUEUE_TIMEOUT) from None
                if cancellation.reason is CancelReason.SHUTTING_DOWN:
                    raise RequestRefused(SHUTTING_DOWN) from None
                # A worker was lost. Where the policy has this request still it waits again, or has
                # another worker already: a second request would take a slot that nobody frees.
                if isinstance(state.status, RequestClosed):
                    # The only endpoint that it could go to: another one of its subset.
                    state = self._state = self._pool.submit(size, head.subset)

    async def _wait(self, state: ProxyRequest) -> None:
        """Until it is bound. Envoy says nothing meanwhile, unless the client leaves."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
        binding = asyncio.ensure_future(state.wait_until_bound())
        try:
            async with CancelScope(None) as scope:
                state.scope = scope
                # What came before the answer is kept: only the end of the stream is news.
                waits = {binding} if self._pending.done() else {binding, self._pending}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            state.scope = None
            binding.cancel()
        if binding.done() and not binding.cancelled():
            binding.result()  # raises where it is gone
        if self._pending.done() and self._pending.result() is EOF:
            raise ClientLeft

    async def _pass_on(self, message: pb.ProcessingRequest) -> None:
        """Answer a message after the endpoint was named; nothing is changed."""
        kind = message.WhichOneof("request")
        match kind:
            case "response_headers":
                self._response_began(message)
                await self._write(self._response_reply())
            case "response_body":
                body = message.response_body
                full_duplex = self._response_mode == FULL_DUPLEX
                await self._write(streamed_reply(kind, body) if full_duplex else CONTINUE[kind])
                self._count(body.body)
            case "request_body":
                body, full_duplex = message.request_body, self._request_mode == FULL_DUPLEX
                await self._write(streamed_reply(kind, body) if full_duplex else CONTINUE[kind])
            case _:
                await self._write(CONTINUE[kind])

    def _response_began(self, message: pb.ProcessingRequest) -> None:
        if self._state is None:
            return
        status, served = response_status(message), served_endpoint(message)
        self._doubt_failed(status, served)
        if status >= 400:
            # The worker's own refusal, or Envoy's answer where no endpoint could be reached.
            failed = status >= 500
            self.outcome = (
                RequestOutcome.WORKERS_FAILED if failed else RequestOutcome.REJECTED_BY_WORKER
            )
            return
        self.outcome = RequestOutcome.COMPLETED
        self._state = self._pool.start_answer(self._state, served or self._addresses[0])
        if self._settings.tokens is TokenSource.CHUNKS:
            kind = response_header(message, "content-type")
            self._answer = AnswerTokens(kind.startswith("text/event-stream"))

    def _response_reply(self) -> bytes:
        counted = self._settings.tokens is TokenSource.CHUNKS
        if counted or self._response_mode in (NO_BODY, FULL_DUPLEX):
            return CONTINUE["response_headers"]
        return CONTINUE_WITHOUT_CHUNKS

    def _doubt_failed(self, status: int, served: str | None) -> None:
        """Those that Envoy tried in vain: before the one that served, or all."""
        tried = self._addresses
        if served in tried:
            tried = tried[: tried.index(served) + (status >= 500)]
        elif status < 500:
            return
        for address in tried:
            self._pool.doubt(address)

    def _count(self, chunk: bytes) -> None:
        if self._answer is None or self._state is None:
            return
        tokens = self._answer.feed(chunk)
        if tokens:
            self._pool.report_tokens(self._state, tokens)
        if self._answer.ended:
            # With the last token, and not with the end of the stream: the policy is to know of the
            # free slot when it decides after this step.
            self._end()

    def _end(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        if self.outcome is not RequestOutcome.COMPLETED:
            self._pool.abort(state)
            return
        tokens = 0 if self._answer is None else self._answer.total()
        self._pool.finish(state, tokens)
        if self._answer is not None and self._answer.prompt is not None and self._prompt_bytes:
            self._estimator.update(self._prompt_bytes, self._answer.prompt)

    def _size(self, head: RequestHead, body: bytes) -> int:
        """Prompt tokens: given, or estimated by the text, or else by the length of the body."""
        path = head.path.partition("?")[0]
        if body and len(body) <= PARSED_BYTES and path in (CHAT, COMPLETIONS):
            try:
                parsed = parse_request(path, body, {})
            except RequestRefused as refusal:
                # The worker refuses it, in its own words.
                LOG.debug("a body that is not understood: %s", refusal)
            else:
                if parsed.prompt_tokens:
                    return parsed.prompt_tokens
                self._prompt_bytes = parsed.prompt_bytes
                return self._estimator.estimate(parsed.prompt_bytes)
        return self._estimator.estimate(len(body) or head.content_length)

    async def _expect(self) -> pb.ProcessingRequest:
        message = await self._next()
        if message is EOF:
            raise ClientLeft
        return message

    async def _next(self) -> Any:
        if self._pending is None:
            return await self._read()
        pending, self._pending = self._pending, None
        return await pending
