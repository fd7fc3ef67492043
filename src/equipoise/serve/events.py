"""The events of a stream, as bytes that are passed on and as tokens that are counted.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from dataclasses import dataclass
from typing import Any

MOST_EVENT = 1 << 20
"""Bytes of an event that are kept until it is whole; a longer one is passed on as it comes."""
MOST_TOKENS = 1 << 28
"""A count or an estimate beyond it is not believed: policies cannot be told of it."""


@dataclass(frozen=True)
class Usage:
    """What a worker says that a request took; None: it does not say."""

    prompt: int | None = None
    completion: int | None = None


NOTHING_SAID = Usage()


class EventReader:
    """Cuts a stream into whole events and counts what they bring.

    Attributes:
        made: tokens so far: one for each choice of an event that brings some, or what the worker
            itself has said of usage last.
        usage: what the worker has said.
        ended: whether the event that ends a stream, `[DONE]`, has come.
        failed: whether an error came before any token, and was not the request's.
    """

    def __init__(self) -> None:
        self._tail = b""
        self.made = 0
        self.usage = NOTHING_SAID
        self.ended = False
        self.failed = False

    def feed(self, chunk: bytes) -> bytes:
        """The whole events among what has come, with all their bytes; the rest is kept."""
        data = self._tail + chunk if self._tail else chunk
        cut = _last_end(data)
        if cut == 0 and len(data) > MOST_EVENT:
            self._tail = b""
            self.made += 1
            return data
        self._tail = data[cut:]
        whole = data[:cut]
        if whole:
            self._read(whole)
        return whole

    def rest(self) -> bytes:
        """What has come behind the last whole event, at the end of the stream."""
        rest, self._tail = self._tail, b""
        if rest:
            self._read(rest)
        return rest

    def _read(self, whole: bytes) -> None:
        for line in whole.splitlines():
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                self.ended = True
            else:
                self._count(_loaded(value))

    def _count(self, event: dict[str, Any]) -> None:
        choices = event.get("choices")
        if isinstance(choices, list):
            self.made += sum(_brings_token(choice) for choice in choices)
        self.failed = self.failed or (not self.made and _is_fault(event.get("error")))
        usage = usage_of(event)
        if usage.completion is not None:
            self.made = usage.completion
        if usage is not NOTHING_SAID:
            self.usage = usage


def usage_of(answer: dict[str, Any]) -> Usage:
    """What an answer, or an event, says of usage."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return NOTHING_SAID
    found = _count_of(usage.get("prompt_tokens")), _count_of(usage.get("completion_tokens"))
    return NOTHING_SAID if found == (None, None) else Usage(*found)


def read_usage(body: bytes) -> Usage:
    """What an answer that was not streamed says of usage; nothing where it is not JSON."""
    return usage_of(_loaded(body))


def _last_end(data: bytes) -> int:
    """Behind the last blank line; 0: there is none."""
    ends = (data.rfind(blank) + len(blank) for blank in (b"\n\n", b"\r\n\r\n", b"\r\r"))
    # `rfind` says -1 where it finds nothing, which comes out as less than a blank line is long.
    lengths = (2, 4, 2)
    return max((end for end, length in zip(ends, lengths, strict=True) if end >= length), default=0)


def _loaded(value: bytes) -> dict[str, Any]:
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _brings_token(choice: object) -> bool:
    """Not the event that only says who speaks, nor the one that only says why it ends."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else {"text": choice.get("text")}
    if any(value for key, value in said.items() if key != "role"):
        return True
    # A token that is part of a letter brings an empty text.
    return "role" not in said and choice.get("finish_reason") is None


def _is_fault(error: object) -> bool:
    """An error of the server's; what is wrong with a request is wrong everywhere."""
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    return not (type(code) is int and 400 <= code < 500)


def _count_of(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None
