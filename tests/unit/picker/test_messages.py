"""What is read of Envoy's messages, whatever a client or a data plane puts there."""

import asyncio
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Struct
from grpc.aio import EOF
from helpers.harnesses.picker_setup import run
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.messages import (
    CONTINUE,
    LB,
    SERVED,
    SUBSET,
    SUBSET_HINT,
    endpoint_subset,
    request_head,
    response_status,
    served_endpoint,
)
from equipoise.serve.picker.process_stream import ProcessStream
from equipoise.serve.picker.request_bodies import RequestBodies
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints

HEADERS = st.lists(
    st.tuples(
        st.sampled_from([":method", ":path", ":status", "content-length", "x-other"]),
        st.binary(max_size=20) | st.sampled_from([b"-1", b"1e9", b"007", b"\xb2", b"12"]),
    ),
    max_size=8,
)


def header_map(headers: list[tuple[str, bytes]]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=raw) for key, raw in headers])


@given(headers=HEADERS)
def test_any_header_is_read(headers: list[tuple[str, bytes]]) -> None:
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=header_map(headers)))
    head = request_head(message)
    assert 0 <= head.content_length < 10**15
    answer = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=header_map(headers)))
    assert 0 <= response_status(answer) <= 999


@pytest.mark.parametrize(
    ("text", "length"), [(b"12", 12), (b"-1", 0), (b"1e9", 0), (b"\xb2", 0), (b"9" * 16, 0)]
)
def test_content_length_is_a_plain_number_or_none(text: bytes, length: int) -> None:
    headers = header_map([("content-length", text)])
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=headers))
    assert request_head(message).content_length == length


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        ({SUBSET: ["10.0.0.1:1", "10.0.0.2:2"]}, {"10.0.0.1:1", "10.0.0.2:2"}),
        ({SUBSET: "10.0.0.1:1, 10.0.0.2:2"}, {"10.0.0.1:1", "10.0.0.2:2"}),
        ({SUBSET: []}, set()),
        ({SUBSET: ""}, set()),
        ({SUBSET: 7}, set()),  # what cannot be read allows nothing
        ({"other": ["10.0.0.1:1"]}, None),
        ({}, None),
    ],
)
def test_subset_is_a_list_or_a_text(hint: dict[str, Any], subset: set[str] | None) -> None:
    metadata = Metadata()
    metadata.filter_metadata[SUBSET_HINT].update(hint)
    assert endpoint_subset(metadata) == subset
    assert endpoint_subset(Metadata()) is None


@pytest.mark.parametrize("value", [{}, {SERVED: ""}, {SERVED: ["10.0.0.1:1"]}, {SERVED: 7}])
def test_served_endpoint_that_is_no_text_is_none(value: dict[str, Any]) -> None:
    struct = Struct()
    struct.update(value)
    metadata = Metadata(filter_metadata={LB: struct})
    assert served_endpoint(pb.ProcessingRequest(metadata_context=metadata)) is None


class Script:
    """A stream with these messages."""

    def __init__(self, *messages: pb.ProcessingRequest) -> None:
        self._messages = [*messages, EOF]
        self.replies: list[bytes] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._messages.pop(0)

    async def write(self, message: bytes) -> None:
        self.replies.append(message)


@pytest.mark.parametrize("kind", ["request_body", "response_headers", "response_trailers"])
def test_stream_without_request_headers_is_passed_on(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        settings = PickerSettings(endpoints=StaticEndpoints(workers=()))
        pool = EndpointPool(routing_policy_factory("fit", {}), settings)
        message = pb.ProcessingRequest()
        getattr(message, kind).SetInParent()
        script = Script(message, message)
        await ProcessStream(pool, settings, RequestBodies(settings.limits), script).run()
        assert script.replies == [CONTINUE[kind]] * 2
        assert "request_header_mode: SEND" in caplog.text

    run(work())
