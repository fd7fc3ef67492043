"""What a client asks for: its body, read and checked before anything else sees it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.serve.outcomes import bad_request
from equipoise.serve.settings import RANK_HEADER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RANK_KEY = "data_parallel_rank"
MOST_RANK = 1 << 20
LONGEST_MODEL = 512
"""Letters of a model's name, which is kept as long as the request, and goes into the log."""


@dataclass(frozen=True)
class Asked:
    """A request for tokens.

    Attributes:
        path: one of `CHAT` and `COMPLETIONS`.
        model: its name.
        streamed: whether the answer is to come event by event.
        body: bytes for the worker.
        exact: prompt tokens, where the prompt is a list of them; 0 where it is text.
        text: bytes of UTF-8 of the prompt's text.
        rank: the data-parallel rank that the client wants; None: any.
    """

    path: str
    model: str
    streamed: bool
    body: bytes
    exact: int
    text: int
    rank: int | None


def read_asked(path: str, body: bytes, headers: Mapping[str, str]) -> Asked:
    """Raises Refused (400) for what no worker could answer."""
    asked = _mapping(body)
    model = asked.get("model")
    if not isinstance(model, str) or not 1 <= len(model) <= LONGEST_MODEL:
        raise bad_request(f"'model' has to be a name of 1 to {LONGEST_MODEL} letters")
    if not isinstance(asked.get("stream"), bool | None):
        raise bad_request("'stream' has to be true or false")
    _check_counts(asked)
    exact, text = _chat(asked) if path == CHAT else _prompt(asked)
    rank = _rank(asked, headers)
    if RANK_KEY in asked:
        # The worker has ranks of its own: those that the client means are the proxy's workers.
        body = json.dumps({k: v for k, v in asked.items() if k != RANK_KEY}).encode()
    return Asked(path, model, asked.get("stream") is True, body, exact, text, rank)


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None
    if not isinstance(asked, dict):
        raise bad_request("the body has to be a JSON object")
    return asked


def _check_counts(asked: Mapping[str, Any]) -> None:
    for key in ("n", "max_tokens", "max_completion_tokens"):
        value = asked.get(key)
        if value is not None and not _whole(value):
            raise bad_request(f"{key!r} has to be a whole number that is not negative")
    if asked.get("n") == 0:
        raise bad_request("'n' has to be at least 1")


def _chat(asked: Mapping[str, Any]) -> tuple[int, int]:
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' has to be a list with at least one message")
    return 0, sum(_message(number, message) for number, message in enumerate(messages))


def _message(number: int, message: object) -> int:
    """Bytes of its text."""
    where = f"'messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"{where}' has to be an object with a role")
    content = message.get("content")
    if content is None:
        return 0
    if isinstance(content, str):
        return _bytes(content)
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(f"{where}.content' has to be a text or a list of objects")
    texts = (part.get("text") for part in content)
    return sum(_bytes(text) for text in texts if isinstance(text, str))


def _prompt(asked: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens where they are given, and bytes of text where not."""
    prompt = asked.get("prompt")
    if isinstance(prompt, str):
        return 0, _bytes(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise bad_request("'prompt' has to be a text, a list of tokens, or a list of these")
    if all(isinstance(one, str) for one in prompt):
        return 0, sum(_bytes(one) for one in prompt)
    if _tokens(prompt):
        return len(prompt), 0
    if all(isinstance(one, list) and one and _tokens(one) for one in prompt):
        return sum(len(one) for one in prompt), 0
    raise bad_request("'prompt' mixes kinds, or has tokens that are not whole numbers")


def _tokens(values: Sequence[object]) -> bool:
    return all(_whole(value) for value in values)


def _whole(value: object) -> bool:
    # `true` is a bool, which Python counts as an int.
    return type(value) is int and value >= 0


def _bytes(text: str) -> int:
    # A lone surrogate, which JSON lets through, counts like any other letter.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _rank(asked: Mapping[str, Any], headers: Mapping[str, str]) -> int | None:
    rank = asked.get(RANK_KEY)
    if rank is None:
        said = headers.get(RANK_HEADER)
        if said is None:
            return None
        if not (said.isascii() and said.isdigit() and len(said) <= 7):
            raise bad_request(f"{RANK_HEADER} has to be a whole number")
        rank = int(said)
    if not _whole(rank) or rank > MOST_RANK:
        raise bad_request(f"{RANK_KEY!r} has to be a whole number that is not negative")
    return int(rank)
