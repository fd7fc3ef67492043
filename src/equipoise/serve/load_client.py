"""Sends the requests of a plan to a server of the OpenAI API, and notes when each token came."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from equipoise.serve.asked import CHAT, COMPLETIONS
from equipoise.serve.events import EventReader
from equipoise.serve.load_plan import ClosedLoop, LoadPlan, Planned
from equipoise.serve.load_result import Sent
from equipoise.serve.scope import Interrupted, Reason, Scope

MOST_SAID = 1 << 16
"""Bytes of a refusal that are read, to find out why."""
TIMED_OUT = "timed out"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go.

    Attributes:
        url: of the server, without a trailing slash.
        model: that is asked for.
        path: `CHAT` or `COMPLETIONS`.
        key: sent as a bearer token; None: none is.
        patience: seconds for a request.
        fields: of every body, besides those that belong to the request.
    """

    url: str
    model: str
    path: str = CHAT
    key: str | None = None
    patience: float = 600.0
    fields: tuple[tuple[str, Any], ...] = ()

    def body(self, planned: Planned) -> bytes:
        """Of one request."""
        message = {"role": "user", "content": planned.prompt}
        what = {"prompt": planned.prompt} if self.path == COMPLETIONS else {"messages": [message]}
        how = {"max_tokens": planned.output, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        return json.dumps({"model": self.model} | what | how | usage | dict(self.fields)).encode()


class LoadClient:
    """Sends each request of a plan once; none is tried again.

    Args:
        target: where to.
        told: called behind each request.
    """

    def __init__(self, target: Target, told: Callable[[Sent], None] = lambda sent: None) -> None:
        self._target, self._told = target, told
        self._loop = asyncio.get_running_loop()

    async def send(self, plan: LoadPlan) -> list[Sent]:
        """All of them, in the order in which they ended."""
        self._sent: list[Sent] = []
        headers = {"Content-Type": "application/json"}
        if self._target.key is not None:
            headers["Authorization"] = f"Bearer {self._target.key}"
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        ) as self._client:
            if isinstance(plan.pace, ClosedLoop):
                await self._closed(plan, plan.pace.concurrency)
            else:
                await self._open(plan)
        return self._sent

    async def _closed(self, plan: LoadPlan, concurrency: int) -> None:
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
                due = began + planned.at
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                group.create_task(self._one(planned, due))

    async def _one(self, planned: Planned, due: float) -> None:
        now = self._loop.time()
        sent = Sent(planned.number, late=max(0.0, now - due), begin=now)
        try:
            async with Scope() as scope:
                scope.within(self._target.patience, Reason.TOTAL)
                sent.failure = await self._streamed(planned, sent)
        except Interrupted:
            sent.failure = TIMED_OUT
        except aiohttp.ClientConnectorError:
            sent.failure = "no connection"
        except (aiohttp.ClientError, OSError) as error:
            sent.failure = f"broken off: {type(error).__name__}"
        sent.end = self._loop.time()
        self._sent.append(sent)
        self._told(sent)

    async def _streamed(self, planned: Planned, sent: Sent) -> str | None:
        """Why it failed; None: it did not."""
        url = self._target.url + self._target.path
        async with self._client.post(url, data=self._target.body(planned)) as answer:
            if answer.status != 200:
                said = await answer.content.read(MOST_SAID)
                return f"status {answer.status}{_code(said)}"
            reader = EventReader()
            while chunk := await answer.content.readany():
                whole = reader.feed(chunk)
                self._came(sent, reader.made)
                if b'"error"' in whole and (code := _error_event(whole)) is not None:
                    return f"error event{code}"
        sent.prompt = reader.usage.prompt or 0
        if not reader.ended:
            return "stream without an end"
        return None if reader.made else "no token"

    def _came(self, sent: Sent, made: int) -> None:
        if made <= sent.output:
            sent.output = made  # usage may say that it was fewer
            return
        now = self._loop.time()
        if sent.first is None:
            sent.first = now
        else:
            sent.gaps.append(now - self._last(sent))
        sent.output, sent.end = made, now

    def _last(self, sent: Sent) -> float:
        return sent.end or sent.begin


def _code(said: bytes) -> str:
    """Of an error in the API's shape."""
    try:
        error = json.loads(said)["error"]
        code = error.get("code") or error.get("type")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return f": {code}" if isinstance(code, str | int) else ""


def _error_event(whole: bytes) -> str | None:
    """What the first event says that is an error; None: none is one."""
    for line in whole.splitlines():
        if line.startswith(b"data:") and b'"error"' in line:
            said = line[5:].strip()
            if _is_error(said):
                return _code(said)
    return None


def _is_error(said: bytes) -> bool:
    try:
        loaded = json.loads(said)
    except (ValueError, RecursionError):
        return False
    return isinstance(loaded, dict) and "choices" not in loaded and "error" in loaded
