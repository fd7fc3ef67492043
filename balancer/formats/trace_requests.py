"""Reads the routed experts that vLLM and SGLang return with each request.

vLLM (`--enable-return-routed-experts`) returns an array (tokens, layers, experts per token), uint8
for up to 256 experts and uint16 above: in the process as `RequestOutput.outputs[i].routed_experts`,
from the server as `choices[i].routed_experts`, base64 of an .npy file. Read in vLLM 0.33.0:
`vllm/outputs.py`, `vllm/entrypoints/openai/completion/serving.py`, `vllm/utils/serial_utils.py`,
`vllm/model_executor/layers/fused_moe/routed_experts_capturer.py`.

SGLang (`--enable-return-routed-experts`, and `return_routed_experts` of a request) returns base64
of bare int32 without a shape, as `meta_info.routed_experts`, or as `sglext.routed_experts` from its
OpenAI endpoints. Read in SGLang 0.5.23: `sglang/srt/state_capturer/routed_experts.py`,
`sglang/srt/managers/detokenizer_manager.py`, `sglang/srt/entrypoints/openai/protocol.py`.

Both have a row for every layer of the model, zeros for dense ones, and none for the last token of
the sequence, which no forward pass took.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats import numbers
from equipoise.balancer.formats.decoded_file import decode_file
from equipoise.balancer.formats.encodings import decode_npy, parse_json
from equipoise.balancer.formats.files import MAX_FILE_BYTES, list_folder, open_file, read_bytes
from equipoise.balancer.formats.format_names import SGLANG_ROUTED, VLLM_ROUTED
from equipoise.balancer.formats.numbers import short_repr
from equipoise.balancer.formats.routing_trace import ID_AXES, MAX_EXPERTS
from equipoise.balancer.formats.statistics import check_layers
from equipoise.balancer.formats.trace_parts import RawPart, TraceShape, TraceShapeMissing
from equipoise.hal.arguments import whole_number
from equipoise.hal.errors import FormatError, PlacementError

ROUTED_EXPERTS = "routed_experts"
SHAPE_FIELD = "routed_experts_shape"
"""Ours, beside SGLang's field: tokens, layers, experts per token."""
TRACE_FILE = "trace.json"
"""Ours, in a folder of arrays: what the arrays do not tell."""
TRACE_FORMAT = "equipoise-trace"
TRACE_VERSION = 1
NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class TraceFacts:
    """What `trace.json` tells of a folder of arrays.

    Attributes:
        experts: experts per layer; None if unknown.
        layers: the model's numbers of the layers; empty if unknown.
        prompt_tokens: tokens of the prompt by name of the array's file.
    """

    experts: int | None = None
    layers: tuple[int, ...] = ()
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)


def read_array(path: Path) -> Iterator[RawPart]:
    """Reads the .npy file of one request. Raises `FormatError`."""
    yield RawPart(path, "", decode_npy(path, read_bytes(path)), request=path.stem)


def array_names(folder: Path) -> list[str]:
    """Returns the names of the arrays in a folder, in order."""
    return [name for name in list_folder(folder) if name.lower().endswith(".npy")]


def read_arrays(folder: Path, prompt_tokens: Mapping[str, int]) -> Iterator[RawPart]:
    """Reads a folder with an .npy file for each request, by name. Raises `FormatError`."""
    for name in array_names(folder):
        array = decode_npy(folder / name, read_bytes(folder / name))
        yield RawPart(
            folder / name,
            "",
            array,
            request=name[: -len(".npy")],
            prompt_tokens=prompt_tokens.get(name),
        )


def read_facts(folder: Path) -> TraceFacts:
    """Reads `trace.json` of a folder, if there is one. Raises `FormatError`."""
    if TRACE_FILE not in list_folder(folder):
        return TraceFacts()
    file = decode_file(folder / TRACE_FILE)
    version = TRACE_FORMAT, TRACE_VERSION
    if (file.fields.get("format"), file.fields.get("version")) != version:
        got = short_repr((file.fields.get("format"), file.fields.get("version")))
        raise file.error(f"is of format and version {got}, expected {version}")
    prompts = file.fields.get("prompt_tokens", {})
    if not isinstance(prompts, dict):
        raise file.error(f"prompt_tokens is {short_repr(prompts)}, not an object")
    try:
        experts = file.optional_integer("experts")
        if experts is not None:
            whole_number("experts", experts, PlacementError, least=1, most=MAX_EXPERTS)
        layers = file.layer_numbers()
        return TraceFacts(
            experts,
            check_layers(layers, len(layers)),
            {name: numbers.parse_integer(name, count) for name, count in prompts.items()},
        )
    except PlacementError as error:
        raise file.error(str(error)) from None


def read_responses(path: Path, shape: TraceShape) -> Iterator[RawPart]:
    """Reads responses of vLLM's or SGLang's server: one or a list as JSON, or one in each line.

    Raises:
        FormatError: names the line, or the place in the list.
        TraceShapeMissing: SGLang's, and `shape` does not say layers and experts per token.
    """
    if path.suffix.lower() == ".json":
        loaded = parse_json(path, read_bytes(path))
        responses = loaded if isinstance(loaded, list) else [loaded]
        for at, response in enumerate(responses):
            where = f"response {at}" if isinstance(loaded, list) else ""
            yield from _parts_of_response(path, where, response, shape)
        return
    for line, data in _lines(path):
        yield from _parts_of_response(path, f"line {line}", parse_json(path, data, line), shape)


@dataclass(frozen=True)
class _Routing:
    """The routed experts of one request in a response, with what is said of it."""

    value: object
    request: str | None
    said: Mapping[str, object]


def response_format(path: Path) -> str | None:
    """Returns whose responses a file holds, by its first one; None if it holds none.

    Raises `FormatError` if it is not JSON.
    """
    if path.suffix.lower() == ".json":
        first = parse_json(path, read_bytes(path))
    else:
        line, data = next(_lines(path), (1, b"null"))
        first = parse_json(path, data, line)
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, dict) or not {"choices", "meta_info", "sglext"} & first.keys():
        return None
    choices = first.get("choices")
    by_vllm = isinstance(choices, list) and any(
        isinstance(choice, dict) and ROUTED_EXPERTS in choice for choice in choices
    )
    return VLLM_ROUTED if by_vllm else SGLANG_ROUTED


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Reads the lines that are not empty, with their numbers."""
    with open_file(path) as stream:
        # One byte more than allowed, to notice a line that is too long.
        for line, data in enumerate(iter(lambda: stream.readline(MAX_FILE_BYTES + 1), b""), 1):
            if len(data) > MAX_FILE_BYTES:
                raise FormatError(str(path), f"line {line} is larger than {MAX_FILE_BYTES} bytes")
            if data.strip():
                yield line, data


def _parts_of_response(
    path: Path, where: str, response: object, shape: TraceShape
) -> Iterator[RawPart]:
    empty = RawPart(path, where, np.zeros(0, dtype=np.int32))
    if isinstance(response, list):  # SGLang answers a batch with a list
        for at, inner in enumerate(response):
            yield from _parts_of_response(path, f"{where}: response {at}", inner, shape)
        return
    if not isinstance(response, dict):
        raise empty.error(f"holds {short_repr(response)}, not a response")
    routings = list(_routings(response))
    if not routings:
        raise empty.error(
            f"has no {ROUTED_EXPERTS}: the server needs --enable-return-routed-experts, "
            "and SGLang's request return_routed_experts"
        )
    for at, routing in enumerate(routings):
        inner = where if len(routings) == 1 else f"{where}: choice {at}".removeprefix(": ")
        problem = RawPart(path, inner, np.zeros(0, dtype=np.int32))
        ids = _decode(problem, routing, shape)
        with problem.naming_file():
            prompt = _prompt_tokens(routing.said, ids.shape[0] if ids.ndim else 0)
        yield RawPart(path, inner, ids, request=routing.request, prompt_tokens=prompt)


def _routings(response: Mapping[str, object]) -> Iterator[_Routing]:
    """Finds the fields of vLLM's and SGLang's responses."""
    meta, usage, choices = (response.get(key) for key in ("meta_info", "usage", "choices"))
    said: Mapping[str, object] = usage if isinstance(usage, dict) else {}
    name = _name(response.get("id"))
    if isinstance(meta, dict) and meta.get(ROUTED_EXPERTS) is not None:
        yield _Routing(meta[ROUTED_EXPERTS], _name(meta.get("id")), meta)
    extension = response.get("sglext")
    if isinstance(extension, dict) and extension.get(ROUTED_EXPERTS) is not None:
        yield _Routing(extension[ROUTED_EXPERTS], name, said)
    choices = choices if isinstance(choices, list) else []
    alone = len(choices) == 1
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        inner = choice.get("meta_info")
        if choice.get(ROUTED_EXPERTS) is not None:
            # Completion tokens are of all choices together.
            own = said if alone else {"prompt_tokens": said.get("prompt_tokens")}
            yield _Routing(choice[ROUTED_EXPERTS], name, own)
        elif isinstance(inner, dict) and inner.get(ROUTED_EXPERTS) is not None:
            yield _Routing(inner[ROUTED_EXPERTS], _name(inner.get("id")) or name, inner)


def _name(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _decode(problem: RawPart, routing: _Routing, shape: TraceShape) -> npt.NDArray[np.generic]:
    value = routing.value
    if isinstance(value, list):
        with problem.naming_file():
            return numbers.int64_array(ROUTED_EXPERTS, value, ID_AXES)
    if not isinstance(value, str):
        raise problem.error(f"{ROUTED_EXPERTS} is {short_repr(value)}, not base64")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise problem.error(f"{ROUTED_EXPERTS} is not base64: {error}") from None
    if data.startswith(NPY_MAGIC):
        try:
            return decode_npy(problem.path, data, ROUTED_EXPERTS)
        except FormatError as error:
            raise problem.error(error.what) from None
    return _shaped(problem, data, routing.said, shape)


def _shaped(
    problem: RawPart, data: bytes, said: Mapping[str, object], shape: TraceShape
) -> npt.NDArray[np.int32]:
    """Returns SGLang's bare int32 as (tokens, layers, experts per token)."""
    layers, top_k = shape.layers, shape.top_k
    if (layers is None or top_k is None) and SHAPE_FIELD in said:
        with problem.naming_file():
            stored = numbers.int64_array(SHAPE_FIELD, said[SHAPE_FIELD], ("axis",)).tolist()
        if len(stored) != len(ID_AXES):
            raise problem.error(f"{SHAPE_FIELD} is {short_repr(stored)}, not three numbers")
        layers, top_k = stored[1:]
    if layers is None or top_k is None:
        raise TraceShapeMissing(
            str(problem.path),
            f"{ROUTED_EXPERTS} of SGLang does not tell its shape: give the layers of the model, "
            "dense ones too, and the experts per token (layers= and top_k=; --layers and --top-k)",
        )
    row = 4 * layers * top_k
    if row <= 0 or len(data) % row:
        raise problem.error(
            f"{ROUTED_EXPERTS} has {len(data)} bytes, which are no rows of int32 for "
            f"{layers} layers and {top_k} experts per token"
        )
    ids = np.frombuffer(data, "<i4").reshape(-1, layers, top_k)
    total = _sequence_tokens(said)
    if total is not None and len(ids) > total:
        raise problem.error(
            f"{ROUTED_EXPERTS} has {len(ids)} tokens for {layers} layers and {top_k} experts per "
            f"token, and the request {total}"
        )
    return ids


def _sequence_tokens(said: Mapping[str, object]) -> int | None:
    counts = [said.get(key) for key in ("prompt_tokens", "completion_tokens")]
    return sum(c for c in counts if type(c) is int) if all(type(c) is int for c in counts) else None


def _prompt_tokens(said: Mapping[str, object], tokens: int) -> int | None:
    """Returns how many of the tokens are of the prompt; a request may leave out its first ones."""
    if said.get("prompt_tokens") is None:
        return None
    prompt = numbers.parse_integer("prompt_tokens", said["prompt_tokens"])
    if prompt < 0:
        raise PlacementError(f"prompt_tokens is {prompt}")
    total = _sequence_tokens(said)
    # The last token of the sequence was not run, so it has no row.
    left_out = 0 if total is None else max(0, total - 1 - tokens)
    return min(tokens, max(0, prompt - left_out))
