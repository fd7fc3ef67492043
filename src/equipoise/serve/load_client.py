"""A load client: sends the requests of a plan and notes when each token came.

Signal handlers that raise need care while an event loop runs: within a callback the loop logs the
exception and goes on, and within a task group it comes out wrapped. So a signal cancels
the work, and its own handler is called afterwards.
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NoReturn, TextIO, TypeVar

import aiohttp
from tqdm import tqdm

from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import EquipoiseError
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.load_result import LoadResult, SentRequest, load_result_of
from equipoise.serve.openai_protocol import CHAT, COMPLETIONS, EventReader

WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an"),
    *("had", "they", "you", "were", "their", "one", "all", "we", "can", "her", "has", "there"),
    *("been", "if", "more", "when", "will", "would", "who", "so", "no", "time", "what", "up"),
    *("out", "man", "day", "new", "now", "way", "may", "use", "see", "two", "how", "its", "our"),
)
"""Each of them, with the blank before it, is one token to most tokenizers."""


@dataclass(frozen=True)
class OpenLoop:
    """Requests are sent at the times of the workload, whatever becomes of those before."""


@dataclass(frozen=True)
class ClosedLoop:
    """So many are under way at any time: a further one is sent as soon as one ends."""

    concurrency: int


RequestPacing = OpenLoop | ClosedLoop


@dataclass(frozen=True)
class PlannedRequest:
    """One request.

    Attributes:
        number: its place, from 0.
        send_at: seconds from the first; 0.0 in a closed loop.
        prompt: text of about so many tokens as were wanted.
        output: tokens that it asks for.
    """

    number: int
    send_at: float
    prompt: str
    output: int


@dataclass(frozen=True)
class LoadPlan:
    """All requests, which are made as they are needed.

    Attributes:
        workload: prompts and outputs [n]; arrivals [n] for an open loop.
        pacing: when they are sent.
        seed: which words prompts are made of. No two prompts of a plan are alike, so that no server
            finds one in its cache.
    """

    workload: Workload
    pacing: RequestPacing
    seed: int

    def __iter__(self) -> Iterator[PlannedRequest]:
        load = self.workload
        times = load.arrivals if isinstance(self.pacing, OpenLoop) else None
        for number in range(load.count):
            at = 0.0 if times is None else float(times[number])
            text = make_prompt(self.seed, number, int(load.prompts[number]))
            yield PlannedRequest(number, at, text, int(load.outputs[number]))


def make_prompt(seed: int, number: int, tokens: int) -> str:
    """Words drawn for request `number`: the same for the same arguments, anywhere."""
    return " ".join(Random(f"{seed} {number}").choices(WORDS, k=tokens))


MAX_ERROR_BYTES = 1 << 16
"""Bytes of a refusal that are read, to find out why."""
TIMED_OUT = "timed out"


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """Where requests go.

    Attributes:
        url: of the server, without a trailing slash.
        model: that is asked for.
        path: `CHAT` or `COMPLETIONS`.
        key: sent as a bearer token; None: none is.
        timeout: seconds for a request.
        fields: of every body, besides those that belong to the request.
    """

    url: str
    model: str
    path: str = CHAT
    key: str | None = None
    timeout: float = 600.0
    fields: tuple[tuple[str, Any], ...] = ()

    def body(self, planned: PlannedRequest) -> bytes:
        """Of one request."""
        message = {"role": "user", "content": planned.prompt}
        prompt_field = (
            {"prompt": planned.prompt} if self.path == COMPLETIONS else {"messages": [message]}
        )
        how = {"max_tokens": planned.output, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        return json.dumps(
            {"model": self.model} | prompt_field | how | usage | dict(self.fields)
        ).encode()


class LoadClient:
    """Sends each request of a plan once; none is tried again.

    Args:
        target: where to.
        on_result: called after each request.
    """

    def __init__(
        self, target: LoadTarget, on_result: Callable[[SentRequest], None] = lambda sent: None
    ) -> None:
        self._target, self._on_result = target, on_result
        self._loop = asyncio.get_running_loop()

    async def send(self, plan: LoadPlan) -> list[SentRequest]:
        """All of them, in the order in which they ended."""
        self._sent: list[SentRequest] = []
        headers = {"Content-Type": "application/json"}
        if self._target.key is not None:
            headers["Authorization"] = f"Bearer {self._target.key}"
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        ) as self._client:
            if isinstance(plan.pacing, ClosedLoop):
                await self._send_closed_loop(plan, plan.pacing.concurrency)
            else:
                await self._open(plan)
        return self._sent

    async def _send_closed_loop(self, plan: LoadPlan, concurrency: int) -> None:
        waiting = iter(plan)

        async def work() -> None:
            for planned in waiting:
                await self._one(planned, self._loop.time())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def _open(self, plan: LoadPlan) -> None:
        began = self._loop.time()
        async with asyncio.TaskGroup() as group:
            for planned in plan:
                due = began + planned.send_at
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                group.create_task(self._one(planned, due))

    async def _one(self, planned: PlannedRequest, due: float) -> None:
        now = self._loop.time()
        request = SentRequest(planned.number, late=max(0.0, now - due), begin=now)
        try:
            async with CancelScope() as scope:
                scope.set_timeout(self._target.timeout, CancelReason.TOTAL)
                request.failure = await self._stream(planned, request)
        except ScopeCancelled:
            request.failure = TIMED_OUT
        except aiohttp.ClientConnectorError:
            request.failure = "no connection"
        except (aiohttp.ClientError, OSError) as error:
            request.failure = f"broken off: {type(error).__name__}"
        request.end = self._loop.time()
        self._sent.append(request)
        self._on_result(request)

    async def _stream(self, planned: PlannedRequest, request: SentRequest) -> str | None:
        """Why it failed; None: it did not."""
        url = self._target.url + self._target.path
        async with self._client.post(url, data=self._target.body(planned)) as answer:
            if answer.status != 200:
                text = await answer.content.read(MAX_ERROR_BYTES)
                return f"status {answer.status}{_code(text)}"
            reader = EventReader()
            while chunk := await answer.content.readany():
                whole = reader.feed(chunk)
                self._count_tokens(request, reader.tokens)
                if b'"error"' in whole and (code := _error_event(whole)) is not None:
                    return f"error event{code}"
        request.prompt = reader.usage.prompt or 0
        if not reader.ended:
            return "stream without an end"
        return None if reader.tokens else "no token"

    def _count_tokens(self, request: SentRequest, tokens: int) -> None:
        if tokens <= request.output:
            request.output = tokens  # usage may say that it was fewer
            return
        now = self._loop.time()
        if request.first is None:
            request.first = now
        else:
            request.gaps.append(now - self._last(request))
        request.output, request.end = tokens, now

    def _last(self, request: SentRequest) -> float:
        return request.end or request.begin


def _code(text: bytes) -> str:
    """Of an error in the API's shape."""
    try:
        error = json.loads(text)["error"]
        code = error.get("code") or error.get("type")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return f": {code}" if isinstance(code, str | int) else ""


def _error_event(whole: bytes) -> str | None:
    """What the first event says that is an error; None: none is one."""
    for line in whole.splitlines():
        if line.startswith(b"data:") and b'"error"' in line:
            text = line[5:].strip()
            if _is_error(text):
                return _code(text)
    return None


def _is_error(text: bytes) -> bool:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "choices" not in content and "error" in content


T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


async def cancel_on_signal(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`; a signal cancels it, and its own handler is called afterwards.

    Signals that are ignored, or have no handler, are left as they are.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    main = threading.current_thread() is threading.main_thread()
    old_handlers = {number: signal.getsignal(number) for number in SIGNALS if main}
    handlers = {number: handler for number, handler in old_handlers.items() if callable(handler)}
    signals: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        assert task is not None
        signals.append(number)
        task.cancel()

    for number in handlers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not signals:
            raise
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    handlers[signals[0]](signals[0], None)
    raise asyncio.CancelledError  # its handler did not raise


MODELS_TIMEOUT = 30.0
"""Seconds for the list of models."""


def run_load(target: LoadTarget, plan: LoadPlan, progress: str, stream: TextIO) -> LoadResult:
    """Send all of it; a bar on `stream` where progress is `shown`.

    Raises: EquipoiseError where a model has to be asked for, and the server names none.
    """
    return asyncio.run(cancel_on_signal(_run(target, plan, progress, stream)))


async def _run(target: LoadTarget, plan: LoadPlan, progress: str, stream: TextIO) -> LoadResult:
    if not target.model:
        # Before the bar: where no server answers, the only output is one error line.
        target = replace(target, model=await first_model(target))
    bar: tqdm[NoReturn] = tqdm(
        desc="requests", total=plan.workload.count, file=stream, disable=progress != "shown"
    )

    def on_result(sent: SentRequest) -> None:
        bar.update()

    try:
        return load_result_of(await LoadClient(target, on_result).send(plan))
    finally:
        bar.close()


def _reason(error: Exception) -> str:
    """Of a connection that does not come about, what the system says."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number) if number else str(error.os_error)
    return str(error) or f"nothing came within {MODELS_TIMEOUT:g} s"


async def first_model(target: LoadTarget) -> str:
    """The first that a server has. Raises EquipoiseError where it says none."""
    headers = {} if target.key is None else {"Authorization": f"Bearer {target.key}"}
    url = f"{target.url}/v1/models"
    try:
        async with (
            asyncio.timeout(MODELS_TIMEOUT),
            aiohttp.ClientSession(headers=headers) as client,
            client.get(url) as answer,
        ):
            text = await answer.read()
            if answer.status != 200:
                raise EquipoiseError(f"{url} answers {answer.status}: give --model")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EquipoiseError(f"{url} does not answer: {_reason(error)}") from error
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise EquipoiseError(f"{url} names no model: give --model") from None
