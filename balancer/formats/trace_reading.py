"""Reads a routing trace of any known format; the format is found by suffix and content."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise.balancer.formats import (
    moe_trace_csv,
    sglang_records,
    trace_counts,
    trace_requests,
)
from equipoise.balancer.formats.encodings import read_npy_header
from equipoise.balancer.formats.files import is_folder, list_folder, open_file
from equipoise.balancer.formats.format_names import (
    COUNTS,
    MOE_TRACE,
    SGLANG_RECORDS,
    SGLANG_ROUTED,
    VLLM_ROUTED,
)
from equipoise.balancer.formats.numbers import MAX_LAYERS
from equipoise.balancer.formats.read_write import read_statistics
from equipoise.balancer.formats.registry import TORCH_SUFFIXES
from equipoise.balancer.formats.routing_trace import (
    MAX_EXPERTS,
    CountsTrace,
    RoutingTrace,
    TraceUnit,
)
from equipoise.balancer.formats.trace_parts import RawPart, TraceShape, open_trace
from equipoise.hal.arguments import whole_number
from equipoise.hal.errors import FormatError, PlacementError

FilePath = str | os.PathLike[str]
LINE_SUFFIXES = ".jsonl", ".ndjson"
MAX_ID_BYTES = 2
"""Integers of an .npy with three axes: up to two bytes are vLLM's expert ids, above are counts."""


@dataclass(frozen=True)
class TraceFormat:
    """A format of routing traces.

    Attributes:
        name: value of the argument `format=`.
        written_by: the system that writes it.
        open: opens a file or folder of it.
    """

    name: str
    written_by: str
    open: Callable[[Path, TraceShape], RoutingTrace | CountsTrace]


def read_trace(
    path: FilePath,
    *,
    format: str | None = None,
    layers: int | None = None,
    top_k: int | None = None,
    experts: int | None = None,
) -> RoutingTrace | CountsTrace:
    """Opens a routing trace: the experts of every token, or rows of every expert by step.

    Expert ids are read through once and checked; counts are checked as they are read.

    Args:
        path: in any of the formats of docs/formats.md: vLLM's and SGLang's routed experts, SGLang's
            recorder, CSV, statistics of every format, counts as .npy of any size.
        format: a name of docs/formats.md; None for the one that the file looks like.
        layers: layers of the model, dense ones too, where SGLang's responses do not tell.
        top_k: experts per token, where the file does not tell.
        experts: experts per layer, where the file does not tell: else the largest id + 1.

    Raises:
        FormatError: the file cannot be read; one line that names file, place and value.
        TraceShapeMissing: neither the file nor `layers` and `top_k` tell the shape.
        PlacementError: an argument is not a whole number, or too large.
    """
    for name, value, most in (
        ("layers", layers, MAX_LAYERS),
        ("top_k", top_k, MAX_EXPERTS),
        ("experts", experts, MAX_EXPERTS),
    ):
        if value is not None:
            whole_number(name, value, PlacementError, least=1, most=most)
    path = Path(path)
    if format is not None and format not in TRACE_FORMATS:
        raise FormatError(str(path), f"no format {format}: known are {', '.join(TRACE_FORMATS)}")
    opener = TRACE_FORMATS[format or _find_format(path)].open
    return opener(path, TraceShape(layers, top_k, experts))


def _find_format(path: Path) -> str:
    """Returns the name of the format. Raises `FormatError` where nothing can be read."""
    if is_folder(path):
        return _format_of_folder(path)
    suffix = path.suffix.lower()
    if suffix in LINE_SUFFIXES:
        # Nothing else has lines of JSON, so what is wrong with them is said of responses.
        return trace_requests.response_format(path) or VLLM_ROUTED
    if suffix == ".json":
        return trace_requests.response_format(path) or COUNTS
    if suffix == ".npy":
        return VLLM_ROUTED if holds_expert_ids(path) else COUNTS
    if suffix in TORCH_SUFFIXES and sglang_records.holds_records(path):
        return SGLANG_RECORDS
    return MOE_TRACE if suffix == ".csv" and moe_trace_csv.is_moe_trace(path) else COUNTS


def _format_of_folder(folder: Path) -> str:
    names = list_folder(folder)
    if any(name.lower().endswith(".npy") for name in names):
        return VLLM_ROUTED
    return SGLANG_RECORDS if sglang_records.record_files(folder) else COUNTS


def holds_expert_ids(path: Path) -> bool:
    """Whether an .npy file is routed experts of vLLM, and not counts. Raises `FormatError`."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        shape, _, dtype = read_npy_header(path, stream, size)
    return len(shape) == 3 and dtype.kind in "iu" and dtype.itemsize <= MAX_ID_BYTES


def _open_routed(name: str) -> Callable[[Path, TraceShape], RoutingTrace]:
    def open_routed(path: Path, shape: TraceShape) -> RoutingTrace:
        source = f"{name}: {path}"
        if is_folder(path):
            facts = trace_requests.read_facts(path)
            if not trace_requests.array_names(path):
                raise FormatError(str(path), "is a folder without .npy files of requests")
            return open_trace(
                source,
                TraceUnit.REQUEST,
                lambda: trace_requests.read_arrays(path, facts.prompt_tokens),
                _agreed_experts(path, facts.experts, shape.experts),
                facts.layers,
            )
        read: Callable[[], Iterator[RawPart]]
        if path.suffix.lower() == ".npy":
            read = lambda: trace_requests.read_array(path)  # noqa: E731
        else:
            read = lambda: trace_requests.read_responses(path, shape)  # noqa: E731
        return open_trace(source, TraceUnit.REQUEST, read, shape.experts)

    return open_routed


def _agreed_experts(path: Path, stored: int | None, given: int | None) -> int | None:
    if stored is not None and given not in (None, stored):
        raise FormatError(str(path), f"has {stored} experts, not {given}")
    return stored if stored is not None else given


def _open_records(path: Path, shape: TraceShape) -> RoutingTrace | CountsTrace:
    names = sglang_records.record_files(path) if is_folder(path) else []
    files = [path / name for name in names] if is_folder(path) else [path]
    if not files:
        raise FormatError(str(path), "is a folder without .pt files of SGLang's recorder")
    trace = sglang_records.open_records(path, files)
    _agreed_experts(path, trace.experts, shape.experts)
    return _with_top_k(path, trace, shape) if isinstance(trace, CountsTrace) else trace


def _open_counts(path: Path, shape: TraceShape) -> CountsTrace:
    if path.suffix.lower() == ".npy" and not is_folder(path):
        trace = trace_counts.open_count_array(path)
    else:
        trace = trace_counts.trace_of_statistics(path, read_statistics(path))
    _agreed_experts(path, trace.experts, shape.experts)
    return _with_top_k(path, trace, shape)


def _with_top_k(path: Path, trace: CountsTrace, shape: TraceShape) -> CountsTrace:
    if shape.top_k is None:
        return trace
    if trace.experts_per_token not in (None, shape.top_k):
        stored = trace.experts_per_token
        raise FormatError(str(path), f"has {stored} experts per token, not {shape.top_k}")
    return replace(trace, experts_per_token=shape.top_k)


TRACE_FORMATS: Mapping[str, TraceFormat] = {
    trace_format.name: trace_format
    for trace_format in (
        TraceFormat(VLLM_ROUTED, "vLLM, --enable-return-routed-experts", _open_routed(VLLM_ROUTED)),
        TraceFormat(
            SGLANG_ROUTED, "SGLang, --enable-return-routed-experts", _open_routed(SGLANG_ROUTED)
        ),
        TraceFormat(
            SGLANG_RECORDS, "SGLang's recorder in the modes per_pass and per_token", _open_records
        ),
        TraceFormat(
            MOE_TRACE,
            "llama.cpp's moe-trace in a fork, or anyone",
            lambda path, shape: open_trace(
                f"{MOE_TRACE}: {path}",
                TraceUnit.REQUEST,
                *moe_trace_csv.open_parts(path, shape.experts),
            ),
        ),
        TraceFormat(COUNTS, "every format of statistics", _open_counts),
    )
}
