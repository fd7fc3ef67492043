"""One request on its way from its client to a worker and back.

How many tokens a prompt has, before anybody has counted them.

Passes one stream on from a worker to a client, event by event.

Takes a request for tokens from its client to a worker, and the answer back.

arrive -> held -> bound -> sent -> passed on -> finished
            ^               |
            +--- again -----+   only before anything is passed on, and so many times at most
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from equipoise.serve.cancel_scope import Interrupted, Reason, Scope
from equipoise.serve.client_connection import NAME, ClientLeft, Outgoing
from equipoise.serve.dispatcher import Desk
from equipoise.serve.headers import towards_client, towards_worker
from equipoise.serve.openai_protocol import MOST_TOKENS, Asked, EventReader, Usage, read_usage
from equipoise.serve.outcomes import Fault, Outcome, Refused, bad_request
from equipoise.serve.request_log import Call
from equipoise.serve.request_state import Bound, Ticket
from equipoise.serve.settings import RouteSettings
from equipoise.serve.upstream import (
    FAILURES,
    AttemptFailed,
    WholeAnswer,
    is_framed,
    is_stream,
    opened,
    read_whole,
    said,
)


@dataclass(frozen=True)
class Errand:
    """What belongs to one request.

    Attributes:
        request: the client's.
        asked: what it wants.
        call: what is noted of it.
        ticket: as the desk has it.
        end: loop's time by which it has to be over.
    """

    request: web.BaseRequest
    asked: Asked
    call: Call
    ticket: Ticket
    end: float


PRIOR_TOKENS, PRIOR_BYTES = 1 << 10, 1 << 12
"""Four bytes a token, until so much has been seen that this is no more than a beginning."""
MOST_BYTES = 1 << 32
"""Beyond it what was seen weighs half, so that traffic that changes is followed."""


class SizeEstimate:
    """Tokens of a text by its bytes in UTF-8, at the ratio of finished requests.

    Bytes and not letters: a letter of Chinese or Japanese is three of them, and most often about
    one token; one of English is one, and a quarter of a token. Whole numbers only, so that the same
    answers in the same order give the same estimates anywhere.
    """

    def __init__(self) -> None:
        self._tokens, self._bytes = PRIOR_TOKENS, PRIOR_BYTES

    def tokens(self, text: int) -> int:
        """Of a text of so many bytes; at least 1."""
        return min(max(1, -(-text * self._tokens // self._bytes)), MOST_TOKENS)

    def learn(self, text: int, tokens: int) -> None:
        """A text of so many bytes had so many tokens.

        What goes beyond a token a byte is not of the text: a picture's, a template's, or a mistake.
        """
        if text < 1 or tokens < 1:
            return
        self._tokens += min(tokens, text)
        self._bytes += text
        if self._bytes > MOST_BYTES:
            self._tokens = max(1, self._tokens // 2)
            self._bytes //= 2

    @property
    def ratio(self) -> float:
        """Bytes of UTF-8 a token."""
        return self._bytes / self._tokens


MOST_PRELUDE = 1 << 16
"""Bytes that are kept back until the first token, because until then all can be tried again."""

CLOSING = 1.0
"""Seconds that a worker may take to close behind `[DONE]`; its connection is used again then."""


class Stream:
    """Of one attempt.

    Args:
        desk: told of tokens.
        errand: the request.
        bound: the binding by which it was sent.
        scope: what runs here runs within it.
        outgoing: towards the client.
        patience: seconds from one token to the next, and for the client to take one.
    """

    def __init__(
        self,
        desk: Desk,
        errand: Errand,
        bound: Bound,
        scope: Scope,
        outgoing: Outgoing,
        patience: float,
    ) -> None:
        self._desk, self._errand, self._bound = desk, errand, bound
        self._scope, self._outgoing, self._patience = scope, outgoing, patience
        self._reader = EventReader()
        self._prelude = b""
        self._loop = asyncio.get_running_loop()

    async def pass_on(
        self,
        answer: aiohttp.ClientResponse,
        completed: Callable[[Errand, Bound, Usage], None],
    ) -> web.StreamResponse:
        """All of it; `completed` is called when it has come.

        Raises: AttemptFailed where it must not be passed on any more; aiohttp's errors where the
        worker breaks off; ClientLeft.
        """
        while chunk := await self._next(answer):
            await self._pass(answer, self._reader.feed(chunk), self._loop.time())
        if not is_framed(answer) and not self._reader.ended:
            raise aiohttp.ServerDisconnectedError("the stream has no end")
        rest = self._prelude + self._reader.rest()
        if self._outgoing.response is None:
            self._check_beginning()
            await self._begin(answer)
        self._errand.call.output = self._reader.made
        completed(self._errand, self._bound, self._reader.usage)
        self._scope.within(self._patience, Reason.STALLED)
        if rest:
            await self._outgoing.write(rest)
        return await self._outgoing.end()

    def _check_beginning(self) -> None:
        """An answer with nothing in it, or with an error of the worker's, is none."""
        if self._reader.failed:
            raise AttemptFailed("its stream began with an error")
        if not self._reader.made and not self._reader.ended:
            raise AttemptFailed("its stream is empty")

    async def _next(self, answer: aiohttp.ClientResponse) -> bytes:
        """What comes next; nothing behind `[DONE]`, however the worker closes then, or does not."""
        ended = self._reader.ended
        try:
            async with asyncio.timeout(CLOSING if ended else None):
                return await answer.content.readany()
        except (*FAILURES, TimeoutError):
            if ended:
                return b""
            raise

    async def _pass(self, answer: aiohttp.ClientResponse, whole: bytes, came: float) -> None:
        """Pass whole events on, once there is a token among those that have come."""
        if self._outgoing.response is None:
            self._prelude += whole
            if not self._reader.made and len(self._prelude) < MOST_PRELUDE:
                return
            whole, self._prelude = self._prelude, b""
            await self._begin(answer)
        call = self._errand.call
        call.output = self._reader.made
        self._desk.made(self._errand.ticket, self._reader.made)
        self._scope.within(self._patience, Reason.STALLED)
        if whole:
            await self._outgoing.write(whole)
        self._scope.within(self._patience, Reason.TOKEN)
        if call.first is None:
            call.first = self._loop.time()
            call.passing = call.first - came

    async def _begin(self, answer: aiohttp.ClientResponse) -> None:
        if not self._desk.begin(self._errand.ticket, self._bound):
            raise AttemptFailed(Reason.UNBOUND.value)
        await self._outgoing.begin(answer)


FAULTS = {
    Reason.HELD: Fault(503, Outcome.HELD_TOO_LONG, Reason.HELD.value, "no_worker", {}),
    Reason.FIRST_TOKEN: Fault(504, Outcome.TIMED_OUT, Reason.FIRST_TOKEN.value, "timeout"),
    Reason.TOKEN: Fault(504, Outcome.TIMED_OUT, Reason.TOKEN.value, "timeout"),
    Reason.TOTAL: Fault(504, Outcome.TIMED_OUT, Reason.TOTAL.value, "timeout"),
    Reason.UNBOUND: Fault(502, Outcome.WORKERS_FAILED, Reason.UNBOUND.value, "worker_lost"),
    Reason.LOST: Fault(502, Outcome.WORKER_LOST, Reason.LOST.value, "worker_lost"),
    Reason.SHUT_DOWN: Fault(503, Outcome.SHUT_DOWN, Reason.SHUT_DOWN.value, "shutting_down"),
}


class Relay:
    """For all requests of a proxy.

    Args:
        settings: the proxy's.
        desk: where requests are bound.
        client: to the workers.
        doubt: told the number of a worker that a request failed at.
    """

    def __init__(
        self,
        settings: RouteSettings,
        desk: Desk,
        client: aiohttp.ClientSession,
        doubt: Callable[[int], None],
    ) -> None:
        self._settings, self._desk, self._client = settings, desk, client
        self._doubt = doubt
        self._loop = asyncio.get_running_loop()
        self.sizes = SizeEstimate()

    async def answer(
        self, request: web.BaseRequest, asked: Asked, call: Call, wanted: int | None
    ) -> web.StreamResponse:
        """The answer, passed on already where it is a stream; `wanted` is the only worker for it.

        Raises: Refused; ClientLeft.
        """
        call.prompt = asked.exact or self.sizes.tokens(asked.text)
        ticket = self._desk.arrive(self._size(asked, call.prompt, wanted), wanted)
        end = call.arrival + self._settings.patience.total
        errand = Errand(request, asked, call, ticket, end)
        try:
            return await self._attempts(errand)
        except Interrupted as ended:
            raise Refused(FAULTS[ended.reason]) from None
        finally:
            self._desk.leave(ticket)

    def _size(self, asked: Asked, prompt: int, wanted: int | None) -> int:
        """What the policy is told of a prompt: no more than there is a worker for.

        An estimate may be wrong, and the worker knows: once it is empty it gets
        what seems too long.

        Raises: Refused (400) for a prompt that is known to be longer.
        """
        workers = self._settings.workers
        rooms = [one.room for one in (workers if wanted is None else workers[wanted : wanted + 1])]
        most = max((room for room in rooms if room is not None), default=prompt)
        if None in rooms or prompt <= most:
            return prompt
        if asked.exact:
            message = f"the prompt has {prompt} tokens, and no worker has room for more than {most}"
            raise bad_request(message, code="context_length_exceeded")
        return most

    async def _attempts(self, errand: Errand) -> web.StreamResponse:
        for _ in range(self._settings.limits.attempts - 1):
            bound = await self._binding(errand)
            try:
                return await self._attempt(errand, bound)
            except AttemptFailed:
                self._desk.again(errand.ticket, bound)
        try:
            return await self._attempt(errand, await self._binding(errand))
        except AttemptFailed as failed:
            if failed.answer is None:
                raise Refused(failed.fault) from failed
            errand.call.outcome = Outcome.WORKERS_FAILED
            return _whole_response(errand, failed.answer)

    async def _binding(self, errand: Errand) -> Bound:
        """Wait for a worker."""
        call, ticket, began = errand.call, errand.ticket, self._loop.time()
        late = began + self._settings.patience.hold
        try:
            while True:
                bound = await self._bound(errand, late)
                if bound is not None and ticket.state is bound:
                    break  # and its worker was not lost before this task was told
        finally:
            ticket.scope = None
            call.waited += self._loop.time() - began
        call.worker, call.bound = self._settings.workers[bound.worker].name, ticket.bound_at
        return bound

    async def _bound(self, errand: Errand, late: float) -> Bound | None:
        """None: it was bound, and its worker was lost."""
        try:
            async with Scope(errand.end) as scope:
                errand.ticket.scope = scope
                scope.within(late - self._loop.time(), Reason.HELD)
                return await errand.ticket.binding()
        except Interrupted as ended:
            if ended.reason is not Reason.UNBOUND:
                raise
            return None

    async def _attempt(self, errand: Errand, bound: Bound) -> web.StreamResponse:
        """Raises AttemptFailed where it may be tried again."""
        outgoing = Outgoing(errand.request, errand.call.id)
        try:
            async with Scope(errand.end) as scope:
                errand.ticket.scope = scope
                return await self._exchange(errand, bound, scope, outgoing)
        except Interrupted as ended:
            return await self._interrupted(errand, outgoing, ended.reason)
        except FAILURES as error:
            self._doubt(bound.worker)
            if outgoing.response is None:
                raise AttemptFailed(said(error)) from error
            message = f"the worker failed: {said(error)}"
            fault = Fault(502, Outcome.WORKER_LOST, message, "worker_lost")
            return await self._broken_off(errand, outgoing, fault)
        finally:
            errand.ticket.scope = None

    async def _interrupted(
        self, errand: Errand, outgoing: Outgoing, reason: Reason
    ) -> web.StreamResponse:
        if reason is Reason.STALLED:
            errand.call.outcome = Outcome.CLIENT_STALLED
            outgoing.abandon()
            raise ClientLeft
        if outgoing.response is not None:
            return await self._broken_off(errand, outgoing, FAULTS[reason])
        if reason is Reason.UNBOUND:
            raise AttemptFailed(reason.value)
        raise Interrupted(reason)

    async def _broken_off(
        self, errand: Errand, outgoing: Outgoing, fault: Fault
    ) -> web.StreamResponse:
        errand.call.outcome = fault.outcome
        self._desk.leave(errand.ticket)
        return await outgoing.break_off(fault)

    async def _exchange(
        self, errand: Errand, bound: Bound, scope: Scope, outgoing: Outgoing
    ) -> web.StreamResponse:
        worker = self._settings.workers[bound.worker]
        call, patience = errand.call, self._settings.patience
        call.attempts += 1
        call.sent = call.sent or self._loop.time()
        headers = towards_worker(
            errand.request.headers, worker, self._settings.access.worker_key, call.id
        )
        url = worker.url + errand.asked.path
        if errand.asked.streamed:
            scope.within(patience.first_token, Reason.FIRST_TOKEN)
        async with opened(self._client, "POST", url, headers, errand.asked.body) as answer:
            if answer.status < 300 and is_stream(answer):
                scope.within(patience.first_token, Reason.FIRST_TOKEN)
                stream = Stream(self._desk, errand, bound, scope, outgoing, patience.token)
                return await stream.pass_on(answer, self._completed)
            whole = await read_whole(answer, self._settings.limits)
        if whole.status >= 500:
            raise AttemptFailed(f"it answered {whole.status}", whole)
        return self._whole(errand, bound, whole)

    def _whole(self, errand: Errand, bound: Bound, whole: WholeAnswer) -> web.Response:
        call = errand.call
        call.first = self._loop.time()
        if whole.status >= 300:
            call.outcome = Outcome.REFUSED_BY_WORKER
            return _whole_response(errand, whole)
        self._completed(errand, bound, read_usage(whole.body))
        return _whole_response(errand, whole)

    def _completed(self, errand: Errand, bound: Bound, usage: Usage) -> None:
        call, asked = errand.call, errand.asked
        call.heed(usage)
        call.outcome = Outcome.COMPLETED
        self._desk.finish(errand.ticket, bound, call.output)
        if usage.prompt is not None and not asked.exact:
            self.sizes.learn(asked.text, usage.prompt)


def _whole_response(errand: Errand, whole: WholeAnswer) -> web.Response:
    headers = [*towards_client(whole.headers, errand.call.id), ("Server", NAME)]
    return web.Response(status=whole.status, headers=headers, body=whole.body)
