"""Estimates the prompt tokens of a request from the arguments of a call to a deployment."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from equipoise.hal.errors import UsageError

RequestSize: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], int]
"""Positional and keyword arguments of a call in, prompt tokens out."""

BYTES_PER_TOKEN = 4
"""Of UTF-8, about that of English: the router sees no answer that could teach it a better one."""
MOST_TOKENS = 1 << 28
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
MOST_DEPTH = 8
"""Levels of lists and mappings in which text is looked for: what is nested deeper is no prompt."""


def prompt_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Tokens of the first argument that has a prompt; 1 where none has one.

    A prompt is a field of `PROMPT_FIELDS`, of a mapping or of an object such as the requests of Ray
    Serve LLM: a text, messages, a list of tokens, or several of these. A keyword argument of such a
    name is a prompt, and so is an argument that is a text.
    """
    for value in (*args, kwargs, *kwargs.values()):
        size = _size(value) if isinstance(value, str) else _size_of_fields(value)
        if size:
            return min(size, MOST_TOKENS)
    return 1


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
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], int):
            return len(value)
        if isinstance(value[0], list | tuple) and value[0] and isinstance(value[0][0], int):
            return sum(len(one) for one in value if isinstance(one, list | tuple))
    return -(-_text_bytes(value, MOST_DEPTH) // BYTES_PER_TOKEN)


def _text_bytes(value: object, depth: int) -> int:
    """Bytes of all text of messages and their parts; pictures and the like are none."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
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
