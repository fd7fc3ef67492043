"""Writes the experts of every token as vLLM's arrays or as SGLang's responses."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from equipoise.balancer.formats.encodings import encode_json, encode_npy
from equipoise.balancer.formats.files import write_bytes, write_folder
from equipoise.balancer.formats.format_names import ROUTED_FORMAT_NAMES, SGLANG_ROUTED, VLLM_ROUTED
from equipoise.balancer.formats.numbers import format_index
from equipoise.balancer.formats.routing_trace import (
    ID_AXES,
    NO_EXPERT,
    Ids,
    RoutedTokens,
    RoutingTrace,
    TraceUnit,
)
from equipoise.balancer.formats.trace_reading import LINE_SUFFIXES, FilePath
from equipoise.balancer.formats.trace_requests import (
    ROUTED_EXPERTS,
    SHAPE_FIELD,
    TRACE_FILE,
    TRACE_FORMAT,
    TRACE_VERSION,
)
from equipoise.hal.arguments import check_type
from equipoise.hal.errors import FormatError, PlacementError

MAX_UINT8_EXPERTS = 256
"""vLLM returns uint8 for up to so many experts, and uint16 above."""


def write_trace(path: FilePath, trace: RoutingTrace, format: str) -> None:
    """Writes the requests of a trace, whole or not at all; all of it is in memory meanwhile.

    `vllm-routed` is a new folder with an .npy file for each request, and `trace.json` with experts,
    layers and tokens of prompts. `sglang-routed` is a file with a response in each line. Both have
    a row for every layer of the model, zeros for layers without experts.

    Raises:
        FormatError: no such format, or the system did not take the file.
        PlacementError: the parts are not requests, or a token has too few experts in a layer.
    """
    check_type("trace", trace, RoutingTrace, PlacementError)
    path = Path(path)
    if format not in ROUTED_FORMAT_NAMES:
        known = ", ".join(ROUTED_FORMAT_NAMES)
        raise FormatError(str(path), f"a trace cannot be written as {format}: known are {known}")
    if format == SGLANG_ROUTED and path.suffix.lower() not in LINE_SUFFIXES:
        raise FormatError(str(path), f"is written as {format} with a suffix of {LINE_SUFFIXES[0]}")
    if trace.unit is not TraceUnit.REQUEST:
        raise PlacementError(f"parts are of a {trace.unit}, and {format} has requests")
    if format == VLLM_ROUTED:
        write_folder(path, _arrays(trace))
    else:
        write_bytes(path, b"".join(_responses(trace)))


def _arrays(trace: RoutingTrace) -> dict[str, bytes]:
    dtype = np.uint8 if trace.experts <= MAX_UINT8_EXPERTS else np.uint16
    width = len(str(trace.part_count - 1))
    files: dict[str, bytes] = {}
    prompt_tokens: dict[str, int] = {}
    for at, part in enumerate(trace.parts()):
        name = f"{at:0{width}d}.npy"  # in the order of the parts, which is that of the names
        files[name] = encode_npy(_every_layer(trace, part).astype(dtype))
        if part.prompt_tokens is not None:
            prompt_tokens[name] = part.prompt_tokens
    facts: dict[str, object] = {"format": TRACE_FORMAT, "version": TRACE_VERSION}
    if trace.experts_known:
        facts["experts"] = trace.experts
    files[TRACE_FILE] = encode_json({**facts, "prompt_tokens": prompt_tokens})
    return files


def _responses(trace: RoutingTrace) -> Iterator[bytes]:
    for at, part in enumerate(trace.parts()):
        ids = _every_layer(trace, part)
        meta: dict[str, object] = {"id": str(at) if part.request is None else part.request}
        if part.prompt_tokens is not None:
            # The last token of a sequence has no row: nothing ran it.
            answer = len(ids) + 1 - part.prompt_tokens
            meta |= {"prompt_tokens": part.prompt_tokens, "completion_tokens": answer}
        meta[ROUTED_EXPERTS] = base64.b64encode(ids.astype("<i4").tobytes()).decode()
        meta[SHAPE_FIELD] = list(ids.shape)
        yield json.dumps({"meta_info": meta}).encode() + b"\n"


def _every_layer(trace: RoutingTrace, part: RoutedTokens) -> Ids:
    """Returns ids with a row for every layer up to the last one with experts."""
    absent = part.ids == NO_EXPERT
    partial = absent if trace.top_k == 1 else absent & ~absent.all(axis=2, keepdims=True)
    if partial.any():
        place = format_index(ID_AXES, np.argwhere(partial)[0].tolist(), trace.layers)
        raise PlacementError(f"request {part.request}: {place}: has no expert, only others have")
    ids = np.zeros((len(part.ids), trace.layers[-1] + 1, trace.top_k), dtype=np.int32)
    ids[:, list(trace.layers)] = np.where(absent, 0, part.ids)
    return ids
