"""Envoy's messages: what is read of a request, and the answers, as bytes where they never differ.

The protocol, with sources: `docs/design/picker.md`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from equipoise.serve.forwarded_paths import TOKENIZER_PATHS
from equipoise.serve.openai_protocol import error_body
from equipoise.serve.outcomes import ErrorResponse

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
OBJECTIVES = frozenset({"x-gateway-inference-objective", "x-llm-d-inference-objective"})
"""The header that names the objective of a request: the extension's, and llm-d's name of it."""
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"

NO_BODY = ProcessingMode.BodySendMode.Value("NONE")
WHOLE_BODY = frozenset(map(ProcessingMode.BodySendMode.Value, ("BUFFERED", "BUFFERED_PARTIAL")))
"""Modes in which Envoy keeps the body until it is whole, and then waits for one answer."""
FULL_DUPLEX = ProcessingMode.BodySendMode.Value("FULL_DUPLEX_STREAMED")
"""The mode in which Envoy keeps nothing: the body goes on as the answers have it."""
SEEN_TO_THE_END = frozenset(
    map(ProcessingMode.BodySendMode.Value, ("STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"))
)
"""Modes in which the end of a body is sent; of a `BUFFERED_PARTIAL` one the rest is not."""


def _bytes(**response: object) -> bytes:
    return bytes(pb.ProcessingResponse(**response).SerializeToString())


CONTINUE = {
    "request_headers": _bytes(request_headers=pb.HeadersResponse()),
    "request_body": _bytes(request_body=pb.BodyResponse()),
    "request_trailers": _bytes(request_trailers=pb.TrailersResponse()),
    "response_headers": _bytes(response_headers=pb.HeadersResponse()),
    "response_body": _bytes(response_body=pb.BodyResponse()),
    "response_trailers": _bytes(response_trailers=pb.TrailersResponse()),
}
"""By kind of message, the answer that changes nothing."""

CONTINUE_WITHOUT_CHUNKS = _bytes(
    response_headers=pb.HeadersResponse(),
    mode_override=ProcessingMode(response_body_mode=NO_BODY, response_trailer_mode="SEND"),
)
"""The answer to response headers after which Envoy sends the end only, if it lets itself be told
(`allow_mode_override`; it does not in a full-duplex mode)."""


@dataclass(frozen=True)
class RequestHead:
    """The head of a client's request.

    Attributes:
        method: of HTTP.
        path: with the query.
        content_length: bytes of the body as the client says; 0 where it does not.
        complete: whether no body follows.
        subset: the only endpoints that may be picked; None: any.
        objective: name of the request's `InferenceObjective`; empty: it names none.
    """

    method: str
    path: str
    content_length: int
    complete: bool
    subset: frozenset[str] | None
    objective: str

    @property
    def needs_slot(self) -> bool:
        """Whether it may bring tokens: of what is not known it is believed."""
        return self.method == "POST" and self.path.partition("?")[0] not in TOKENIZER_PATHS


def request_head(message: pb.ProcessingRequest) -> RequestHead:
    """Of a message with request headers."""
    headers = message.request_headers
    method = path = length = objective = ""
    for one in headers.headers.headers:
        match one.key:
            case ":method":
                method = _text(one)
            case ":path":
                path = _text(one)
            case "content-length":
                length = _text(one)
            case name if name in OBJECTIVES:
                objective = _text(one)
    # A client may claim any length: what is no plain number is none.
    plain = length.isascii() and length.isdigit() and len(length) < 16
    return RequestHead(
        method,
        path,
        int(length) if plain else 0,
        headers.end_of_stream,
        endpoint_subset(message.metadata_context),
        objective,
    )


def response_status(message: pb.ProcessingRequest) -> int:
    """Of a message with response headers; 0 where there is none."""
    text = response_header(message, ":status")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0


def response_header(message: pb.ProcessingRequest, name: str) -> str:
    """One of its headers; empty where it is not there."""
    for one in message.response_headers.headers.headers:
        if one.key == name:
            return _text(one)
    return ""


def endpoint_subset(metadata: Metadata) -> frozenset[str] | None:
    """The only endpoints that may be picked; None: any."""
    if SUBSET_HINT not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_HINT].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return frozenset(one.string_value.strip() for one in value.list_value.values)
    return frozenset(one.strip() for one in value.string_value.split(",") if one.strip())


def served_endpoint(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that answers, as the data plane says; None: it does not."""
    if LB not in message.metadata_context.filter_metadata:
        return None
    fields = message.metadata_context.filter_metadata[LB].fields
    return fields[SERVED].string_value or None if SERVED in fields else None


@lru_cache(maxsize=4096)
def destination_reply(
    kind: str, endpoints: tuple[str, ...], headers: tuple[tuple[str, str], ...]
) -> bytes:
    """The answer that says where a request goes.

    Args:
        kind: `request_headers` or `request_body`: of the message that it answers.
        endpoints: IP:PORT, in the order in which they are to be tried.
        headers: to be sent to the worker, such as its data-parallel rank.
    """
    value = ",".join(endpoints)
    common = pb.CommonResponse(
        header_mutation=pb.HeaderMutation(
            set_headers=[_overwrite(name, text) for name, text in ((DESTINATION, value), *headers)]
        )
    )
    metadata = Struct()
    metadata.update({LB: {DESTINATION: value}})
    if kind == "request_headers":
        return _bytes(
            request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata
        )
    return _bytes(request_body=pb.BodyResponse(response=common), dynamic_metadata=metadata)


def streamed_reply(kind: str, body: pb.HttpBody) -> bytes:
    """A chunk goes on as it is; `kind` is `request_body` or `response_body`."""
    chunk = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=chunk))
    return _bytes(**{kind: pb.BodyResponse(response=common)})


def refusal_reply(error: ErrorResponse, path: str) -> bytes:
    """The request to `path` ends here, with this error in the words of its API."""
    headers = {"content-type": "application/json", **error.headers}
    return _bytes(
        immediate_response=pb.ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=pb.HeaderMutation(set_headers=_overwritten(headers.items())),
            body=error_body(path, error),
            details=error.code,
        )
    )


def _overwritten(headers: Iterable[tuple[str, str]]) -> list[HeaderValueOption]:
    return [_overwrite(name.lower(), text) for name, text in headers]


def _overwrite(name: str, text: str) -> HeaderValueOption:
    # By default a value is appended: the client's own would come first, and it would choose.
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=text.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _text(header: HeaderValue) -> str:
    return header.raw_value.decode("latin-1") or str(header.value)
