"""The APIs of engines as the proxy reads them: bodies of requests, and events of streamed answers.

The OpenAI API, Anthropic's messages, and what vLLM and SGLang serve besides.

Bodies are read and checked before any worker sees them; events are passed on as bytes and counted
as tokens. Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.balancer.requests.prefix_index import text_blocks, token_blocks
from equipoise.serve.outcomes import ErrorResponse, bad_request
from equipoise.serve.settings import RANK_HEADER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATE, TOKENS_IN_OUT = "/generate", "/inference/v1/generate"
"""SGLang's own, and vLLM's."""
UNREAD_PATHS = frozenset(
    {"/v1/embeddings", "/v2/embed", "/encode", "/pooling"}
    | {"/v1/classify", "/classify", "/v1/score", "/score", "/generative_scoring"}
    | {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/decisions", "/v1/chat/completions/batch"}
    | {"/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""Bound to a worker by the length of their bodies, which only the worker reads."""
ANTHROPIC_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; any other 4xx is `invalid_request_error`, and all else `api_error`."""
MODEL_PATHS = (CHAT, COMPLETIONS)
"""Where a model has to be named: elsewhere engines do without."""
TEXT_KEYS = frozenset({"text", "content", "input", "output", "arguments"})
"""Of a content part, or of an item of a conversation: what goes into the prompt as text."""
RANK_KEY = "data_parallel_rank"
MAX_RANK = 1 << 20
"""Bound of a data-parallel rank in a request: far more than there are, and no huge integer."""
MAX_MODEL_NAME_LENGTH = 512
"""Letters of a model's name, which is kept as long as the request, and goes into the log."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request for tokens.

    Attributes:
        path: one of `BOUND_PATHS`.
        model: its name; empty where none is named.
        streamed: whether the answer is to come event by event.
        body: bytes for the worker.
        prompt_tokens: prompt tokens, where the prompt is a list of them; 0 where it is text.
        prompt_bytes: bytes of UTF-8 of the prompt's text.
        data_parallel_rank: the data-parallel rank that the client wants; None: any.
        blocks: hashes of the prompt's blocks (`prefix_index`), by which its prefix is known again.
    """

    path: str
    model: str
    streamed: bool
    body: bytes
    prompt_tokens: int
    prompt_bytes: int
    data_parallel_rank: int | None
    blocks: Sequence[int] = ()


def parse_request(path: str, body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """Raises RequestRefused (400) for what no worker could answer."""
    if path in UNREAD_PATHS:
        return _unread_request(path, body, headers)
    try:
        fields = _mapping(body)
        model = fields.get("model", None if path in MODEL_PATHS else "")
        shortest = 1 if path in MODEL_PATHS else 0
        if not isinstance(model, str) or not shortest <= len(model) <= MAX_MODEL_NAME_LENGTH:
            raise bad_request(f"'model' has to be a name of 1 to {MAX_MODEL_NAME_LENGTH} letters")
        if not isinstance(fields.get("stream"), bool | None):
            raise bad_request("'stream' has to be true or false")
        _check_counts(fields)
        exact, text = PROMPT_SIZES[path](fields)
        blocks = _prompt_blocks(path, model, fields)
    except RecursionError:
        raise bad_request("the body is JSON that is nested too deeply") from None
    rank = _rank(fields, headers)
    if RANK_KEY in fields:
        # The worker has ranks of its own: those that the client means are the proxy's workers.
        body = json.dumps({k: v for k, v in fields.items() if k != RANK_KEY}).encode()
    streamed = fields.get("stream") is True
    return ParsedRequest(path, model, streamed, body, exact, text, rank, blocks)


def _unread_request(path: str, body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    # How many tokens a sound has, or another file, its bytes do not say.
    is_file = headers.get("Content-Type", "").startswith("multipart/")
    return ParsedRequest(path, "", False, body, 0, 0 if is_file else len(body), _rank({}, headers))


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        raise bad_request("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise bad_request("the body has to be a JSON object")
    return fields


def _check_counts(fields: Mapping[str, Any]) -> None:
    for key in ("n", "max_tokens", "max_completion_tokens"):
        value = fields.get(key)
        if value is not None and not _whole(value):
            raise bad_request(f"{key!r} has to be a whole number that is not negative")
    if fields.get("n") == 0:
        raise bad_request("'n' has to be at least 1")


def _chat(fields: Mapping[str, Any]) -> tuple[int, int]:
    messages = fields.get("messages")
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


def _messages(fields: Mapping[str, Any]) -> tuple[int, int]:
    exact, text = _chat(fields)
    return exact, text + _text_bytes(fields.get("system"))


def _response(fields: Mapping[str, Any]) -> tuple[int, int]:
    for key in ("background", "previous_response_id"):
        if fields.get(key):
            # Workers keep responses in their own memory, and the next request is another worker's.
            raise bad_request(f"{key!r} is not served here: no response is kept")
    if not isinstance(fields.get("input"), str | list) or not fields["input"]:
        raise bad_request("'input' has to be a text or a list of items")
    return 0, _text_bytes(fields["input"]) + _text_bytes(fields.get("instructions"))


def _text_bytes(value: object) -> int:
    """Bytes of all text in it, wherever it stands; pictures and the like are none."""
    if isinstance(value, str):
        return _bytes(value)
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    if isinstance(value, dict):
        return sum(_text_bytes(part) for key, part in value.items() if key in TEXT_KEYS)
    return 0


def _generate(fields: Mapping[str, Any]) -> tuple[int, int]:
    if fields.get("input_ids") is not None:
        return _prompt_size("input_ids", fields["input_ids"])
    if fields.get("input_embeds") is not None:
        return 0, 0
    return _prompt_size("text", fields.get("text"))


def _tokens_in_out(fields: Mapping[str, Any]) -> tuple[int, int]:
    return _prompt_size("token_ids", fields.get("token_ids"))


def _prompt(fields: Mapping[str, Any]) -> tuple[int, int]:
    return _prompt_size("prompt", fields.get("prompt"))


def _prompt_size(key: str, prompt: object) -> tuple[int, int]:
    """Tokens where they are given, and bytes of text where not."""
    if isinstance(prompt, str):
        return 0, _bytes(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(f"{key!r} has to be a text, a list of tokens, or a list of these")
    if all(isinstance(one, str) for one in prompt):
        return 0, sum(_bytes(one) for one in prompt)
    if _tokens(prompt):
        return len(prompt), 0
    if all(isinstance(one, list) and one and _tokens(one) for one in prompt):
        return sum(len(one) for one in prompt), 0
    raise bad_request(f"{key!r} mixes kinds, or has tokens that are not whole numbers")


PROMPT_SIZES: Mapping[str, Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    CHAT: _chat,
    COMPLETIONS: _prompt,
    RESPONSES: _response,
    MESSAGES: _messages,
    GENERATE: _generate,
    TOKENS_IN_OUT: _tokens_in_out,
}
"""Of what is read, tokens where they are given, and bytes of text where not."""
BOUND_PATHS = frozenset(PROMPT_SIZES) | UNREAD_PATHS
"""What is bound to a worker by the policy."""


PROMPT_KEYS: Mapping[str, tuple[str, ...]] = {
    CHAT: ("tools", "messages"),
    COMPLETIONS: ("prompt",),
    RESPONSES: ("tools", "instructions", "input"),
    MESSAGES: ("tools", "system", "messages"),
    GENERATE: ("input_ids", "text"),
    TOKENS_IN_OUT: ("token_ids",),
}
"""What a prompt is made of, in the order in which templates have it."""


def _prompt_blocks(path: str, model: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    parts = [fields[key] for key in PROMPT_KEYS[path] if fields.get(key) is not None]
    # vLLM keeps the caches of different salts apart.
    space = f"{model}\0{fields.get('cache_salt', '')}"
    match parts:
        case [str() as text]:
            return text_blocks(text.encode("utf-8", "surrogatepass"), space)
        case [list() as tokens] if tokens and _tokens(tokens):
            try:
                return token_blocks(tokens, space)
            except OverflowError:
                return ()  # the worker says what is wrong with such a token
        case _ if path in (COMPLETIONS, GENERATE):
            return ()  # several prompts in one request, which have nothing in common
    return text_blocks(json.dumps(parts).encode(), space)


def _tokens(values: Sequence[Any]) -> bool:
    # As `_whole` of each, without a call a token: prompts have a hundred thousand of them.
    return set(map(type, values)) == {int} and min(values) >= 0


def _whole(value: object) -> bool:
    # `true` is a bool, which Python counts as an int.
    return type(value) is int and value >= 0


def _bytes(text: str) -> int:
    # A lone surrogate, which JSON lets through, counts like any other letter.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _rank(fields: Mapping[str, Any], headers: Mapping[str, str]) -> int | None:
    rank = fields.get(RANK_KEY)
    if rank is None:
        text = headers.get(RANK_HEADER)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 7):
            raise bad_request(f"{RANK_HEADER} has to be a whole number")
        rank = int(text)
    if not _whole(rank) or rank > MAX_RANK:
        raise bad_request(f"{RANK_KEY!r} has to be a whole number that is not negative")
    return int(rank)


DONE = b"data: [DONE]\n\n"
"""The event that ends a stream of OpenAI's older APIs, vLLM's and SGLang's."""
DECODER = json.JSONDecoder()
MAX_EVENT_BYTES = 1 << 20
"""Bytes of an event that are kept until it is whole; a longer one is passed on as it comes."""
MAX_TOKENS = 1 << 28
"""A count or an estimate beyond it is not believed: policies take no larger ones."""


@dataclass(frozen=True)
class TokenUsage:
    """What a worker says that a request took; None: it does not say."""

    prompt: int | None = None
    completion: int | None = None


NO_USAGE = TokenUsage()
LAST_EVENTS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "message_stop"}
)
"""Types of events that end a stream, where `[DONE]` does not."""
USAGE_HOLDERS = ("response", "message")
"""Of an event: the answer as it stands, with its usage."""


class EventReader:
    """Cuts a stream into whole events and counts what they bring.

    Attributes:
        tokens: tokens so far: one for each choice of an event that brings some, or what the worker
            itself reported as usage last.
        usage: as the worker reported it.
        ended: whether the event that ends a stream, `[DONE]`, has come.
        failed_before_token: whether an error came before any token, and was not the request's.
    """

    def __init__(self) -> None:
        self._tail = b""
        self.tokens = 0
        self.usage = NO_USAGE
        self.ended = False
        self.failed_before_token = False

    def feed(self, chunk: bytes) -> bytes:
        """The whole events among what has come, with all their bytes; the rest is kept."""
        data = self._tail + chunk if self._tail else chunk
        end = _last_end(data)
        if end == 0 and len(data) > MAX_EVENT_BYTES:
            self._tail = b""
            self.tokens += 1
            return data
        self._tail = data[end:]
        whole = data[:end]
        if whole:
            self._read(whole)
        return whole

    def flush(self) -> bytes:
        """Bytes after the last whole event, at the end of the stream."""
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
                self._count(_json_object(value))

    def _count(self, event: dict[str, Any]) -> None:
        choices, kind = event.get("choices"), event.get("type")
        if isinstance(choices, list):
            self.tokens += sum(_brings_token(choice) for choice in choices)
        elif isinstance(kind, str):
            # `response.output_text.delta` and its like, and Anthropic's one.
            self.tokens += kind.endswith(".delta") or kind == "content_block_delta"
            self.ended = self.ended or kind in LAST_EVENTS
        self.failed_before_token = self.failed_before_token or (
            not self.tokens and _is_fault(event.get("error"))
        )
        usage = usage_from(event)
        if usage is NO_USAGE:
            return
        # Anthropic's first event counts a token that has not come.
        if usage.completion is not None and kind != "message_start":
            self.tokens = usage.completion
        # Each may come in an event of its own.
        prompt = self.usage.prompt if usage.prompt is None else usage.prompt
        self.usage = TokenUsage(prompt, usage.completion)


def usage_from(answer: dict[str, Any]) -> TokenUsage:
    """What an answer, or an event, says of usage."""
    usage = answer.get("usage")
    if not isinstance(usage, dict) and "choices" not in answer:
        holders = (answer.get(key) for key in USAGE_HOLDERS)
        nested = (one.get("usage") for one in holders if isinstance(one, dict))
        usage = next((one for one in nested if one), answer.get("meta_info"))
    if not isinstance(usage, dict):
        return NO_USAGE
    counts = (
        _count_of(usage.get("prompt_tokens", usage.get("input_tokens"))),
        _count_of(usage.get("completion_tokens", usage.get("output_tokens"))),
    )
    return NO_USAGE if counts == (None, None) else TokenUsage(*counts)


def read_usage(body: bytes) -> TokenUsage:
    """What an answer that was not streamed says of usage; nothing where it is not JSON."""
    return usage_from(_json_object(body))


def error_body(path: str, error_response: ErrorResponse) -> bytes:
    """An error as a whole answer, in the words of the path's API."""
    return json.dumps(_error_content(path, error_response.status, error_response.error)).encode()


def error_event(path: str, error_response: ErrorResponse) -> bytes:
    """An error as an event of a stream whose headers were sent, in the words of the path's API."""
    content = _error_content(path, error_response.status, error_response.error)
    return _event(content, _error_name(path))


def whole_as_events(path: str, status: int, body: bytes) -> bytes:
    """A worker's answer that is no stream, for a client that was sent the head of one.

    What clients put together to the same answer; an error becomes one event.
    """
    content = _json_object(body)
    # Engines may write `"error": null` where there is none, as the Responses API has it.
    if not content.get("error"):
        to_events = WHOLE_ANSWERS.get(path, _generated_events)
        if status < 300 and (events := to_events(content)):
            return events
        content.pop("error", None)
        message = f"the worker answered {status}"
        kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": None}
        content = {"error": content or error}
    # An engine may answer in OpenAI's shape at Anthropic's paths, as where its middleware refuses.
    if _is_anthropic(path) and content.get("type") != "error":
        content = _error_content(path, status, content["error"])
    return _event(content, _error_name(path))


def _generated_events(answer: dict[str, Any]) -> bytes:
    """Of completions and of `/generate`, whose events have the shape of whole answers."""
    return _event(answer) + DONE if answer else b""


def _chat_events(answer: dict[str, Any]) -> bytes:
    """One chunk; empty where it is no chat completion."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return b""
    chunks = [_chat_chunk(one) for one in choices if isinstance(one, dict)]
    return _generated_events(answer | {"object": "chat.completion.chunk", "choices": chunks})


def _chat_chunk(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    delta = dict(message) if isinstance(message, dict) else {}
    if isinstance(calls := delta.get("tool_calls"), list):
        # Of a stream they are put together by their index.
        numbered = enumerate(one for one in calls if isinstance(one, dict))
        delta["tool_calls"] = [{"index": index, **call} for index, call in numbered]
    return {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}


def _response_events(answer: dict[str, Any]) -> bytes:
    """Its first event, without which clients take no other, and its last; the text is in that."""
    if not answer:
        return b""
    end = f"response.{answer.get('status')}"
    begun = answer | {"status": "in_progress", "output": []}
    events = (
        {"type": "response.created", "response": begun},
        {"type": end if end in LAST_EVENTS else "response.completed", "response": answer},
    )
    return b"".join(_named_event({**one, "sequence_number": n}) for n, one in enumerate(events))


def _message_events(answer: dict[str, Any]) -> bytes:
    """Empty where it is no message."""
    blocks = answer.get("content")
    if not isinstance(blocks, list) or not all(isinstance(one, dict) for one in blocks):
        return b""
    begun = answer | {"content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(blocks):
        empty, deltas = _block_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [
            {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
        ]
        events.append({"type": "content_block_stop", "index": index})
    end = {key: answer.get(key) for key in ("stop_reason", "stop_sequence")}
    usage = answer.get("usage") or {}
    events += [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]
    return b"".join(map(_named_event, events))


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as its stream begins it, and what follows: clients show deltas only."""
    match block:
        case {"type": "text", "text": str(text)}:
            return block | {"text": ""}, [{"type": "text_delta", "text": text}]
        case {"type": "thinking", "thinking": str(text)}:
            signature = {"type": "signature_delta", "signature": block.get("signature", "")}
            thought = {"type": "thinking_delta", "thinking": text}
            return block | {"thinking": "", "signature": ""}, [thought, signature]
        case {"type": "tool_use", "input": dict(arguments)}:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
            return block | {"input": {}}, [delta]
    return block, []


WHOLE_ANSWERS: Mapping[str, Callable[[dict[str, Any]], bytes]] = {
    CHAT: _chat_events,
    RESPONSES: _response_events,
    MESSAGES: _message_events,
}
"""Events of a whole answer, where they have another shape: empty for what is none of the API's.

https://platform.openai.com/docs/api-reference/chat-streaming,
https://platform.openai.com/docs/api-reference/responses-streaming,
https://platform.claude.com/docs/en/build-with-claude/streaming
"""


def _is_anthropic(path: str) -> bool:
    """Whether it is a path of Anthropic's API, whose errors have a shape of their own."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def _error_content(path: str, status: int, error: object) -> dict[str, Any]:
    """`error` is as the OpenAI API has it, or what a worker sent in its place."""
    if not _is_anthropic(path):
        return {"error": error}
    fields = error if isinstance(error, dict) else {"message": str(error)}
    family = "invalid_request_error" if 400 <= status < 500 else "api_error"
    kind = ANTHROPIC_ERROR_TYPES.get(status, family)
    message = f"the worker answered {status}"
    return {"type": "error", "error": {"message": message, **fields, "type": kind}}


def _error_name(path: str) -> bytes:
    # Anthropic's clients skip events without a name; OpenAI's read the data only.
    return b"event: error\n" if _is_anthropic(path) else b""


def _event(content: dict[str, Any], name: bytes = b"") -> bytes:
    return name + b"data: " + json.dumps(content).encode() + b"\n\n"


def _named_event(content: dict[str, Any]) -> bytes:
    """Anthropic's clients skip events whose name is not that of their type."""
    return _event(content, f"event: {content['type']}\n".encode())


def _last_end(data: bytes) -> int:
    """Behind the last blank line; 0: there is none."""
    if data.endswith(b"\n\n"):
        return len(data)  # nearly always: a piece is one event
    ends = (data.rfind(blank) + len(blank) for blank in (b"\n\n", b"\r\n\r\n", b"\r\r"))
    # `rfind` says -1 where it finds nothing, which comes out as less than a blank line is long.
    lengths = (2, 4, 2)
    return max((end for end, length in zip(ends, lengths, strict=True) if end >= length), default=0)


def _json_object(value: bytes) -> dict[str, Any]:
    try:
        # Events are UTF-8, so that nothing has to be found out about them, as `json.loads` does.
        content = DECODER.decode(value.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _brings_token(choice: object) -> bool:
    """Whether a choice brings text: not the event with only a role or only a finish reason."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    text = delta if isinstance(delta, dict) else {"text": choice.get("text")}
    if any(value for key, value in text.items() if key != "role"):
        return True
    # A token that is part of a letter brings an empty text.
    return "role" not in text and choice.get("finish_reason") is None


def _is_fault(error: object) -> bool:
    """An error of the server's; what is wrong with a request is wrong everywhere."""
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    return not (type(code) is int and 400 <= code < 500)


def _count_of(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
