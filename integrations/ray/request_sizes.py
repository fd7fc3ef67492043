"""Estimates the prompt tokens of a request from the arguments of a call to a deployment."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from numbers import Integral
from typing import Any, TypeAlias

from equipoise.hal.errors import UsageError

RequestSize: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], int]
"""Positional and keyword arguments of a call in, prompt tokens out."""

BYTES_PER_TOKEN = 4
"""Of UTF-8, about that of English: the router sees no answer that could teach it a better one."""
MAX_TOKENS = 1 << 28
"""An estimate beyond it is not believed: policies take no larger ones."""
PROMPT_FIELDS = (
    "prompt_token_ids",
    "token_ids",
    "input_ids",
    "prompt",
    "messages",
    "input",
    "text",
)
"""Fields with the prompt, in OpenAI's, vLLM's and SGLang's requests; tokens first."""
MAX_DEPTH = 8
"""Levels of lists and mappings in which text is looked for: what is nested deeper is no prompt."""

MAX_TOKEN_DEPTH = 2
"""Several prompts of token ids are a list of lists, or an array of two dimensions."""
TEXTS = str | bytes | bytearray


def prompt_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Tokens of the argument with the largest prompt; 1 where none has one.

    A prompt is a field of `PROMPT_FIELDS`, of a mapping or of an object such as the requests of Ray
    Serve LLM: a text, messages, a list or an array of tokens, or several of these. A keyword
    argument of such a name is a prompt, and so is an argument that is a text. The largest counts,
    because a text beside the prompt is an identifier or the like.
    """
    sizes = (
        _size(value) if isinstance(value, str) else _size_of_fields(value)
        for value in (*args, kwargs, *kwargs.values())
    )
    return min(max(1, *sizes), MAX_TOKENS)


def load_request_size(name: str | None) -> RequestSize:
    """The function PACKAGE:OBJECT; None: `prompt_tokens`. Raises UsageError where there is none."""
    if name is None:
        return prompt_tokens
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:
        # The import runs the user's code, which may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"request_size: {name!r} does not import: {reason}") from error
    if not callable(function):
        raise UsageError(f"request_size: {name!r} cannot be called")
    return function  # type: ignore[no-any-return]


def _size_of_fields(request: object) -> int:
    for name in PROMPT_FIELDS:
        mapping = request if isinstance(request, Mapping) else None
        size = _size(getattr(request, name, None) if mapping is None else mapping.get(name))
        if size:
            return size
    return 0


def _size(value: object) -> int:
    """Of a text, of tokens, of several of either, or of messages."""
    tokens = _token_count(value, MAX_TOKEN_DEPTH)
    return tokens or -(-_text_bytes(value, MAX_DEPTH) // BYTES_PER_TOKEN)


def _token_count(value: object, depth: int) -> int:
    """Of a list or an array of token ids, or of several such; 0: it is neither."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        # An array of any library. One of more dimensions has no token ids, but a picture.
        return math.prod(shape) if 0 < len(shape) <= depth else 0
    if not isinstance(value, Collection) or isinstance(value, TEXTS | Mapping) or depth == 0:
        return 0
    first = next(iter(value), None)
    if isinstance(first, Integral):
        return len(value)
    return (
        sum(_token_count(one, depth - 1) for one in value) if _token_count(first, depth - 1) else 0
    )


def _text_bytes(value: object, depth: int) -> int:
    """Bytes of all text of messages and their parts; pictures and the like are none."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if depth == 0:
        return 0
    if isinstance(value, list | tuple):
        return sum(_text_bytes(one, depth - 1) for one in value)
    if isinstance(value, Mapping):
        parts = (value.get("content"), value.get("text"))
    elif hasattr(value, "content") or hasattr(value, "text"):
        parts = (getattr(value, "content", None), getattr(value, "text", None))
    else:
        return 0
    return sum(_text_bytes(part, depth - 1) for part in parts)
