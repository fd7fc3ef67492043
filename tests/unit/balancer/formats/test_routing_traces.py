"""Routing traces of every format give the ids, or the counts, that were put into the files."""

import json
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from helpers.paths import ROOT
from helpers.strategies import trace_samples as samples
from hypothesis import given

from equipoise.balancer import formats
from equipoise.balancer.formats import (
    CountsTrace,
    ExpertStatistics,
    RoutingTrace,
    TraceUnit,
    read_trace,
    write_statistics,
    write_trace,
)
from equipoise.balancer.formats.trace_parts import TraceShapeMissing

TRACES = ROOT / "tests" / "data" / "traces"
Ids = npt.NDArray[np.int32]
Write = Callable[[Path, Sequence[Ids]], Path]


def routing(path: Path, **shape: Any) -> RoutingTrace:
    trace = read_trace(path, **shape)
    assert isinstance(trace, RoutingTrace)
    return trace


def counts(path: Path, **shape: Any) -> CountsTrace:
    trace = read_trace(path, **shape)
    assert isinstance(trace, CountsTrace)
    return trace


def all_counts(trace: CountsTrace, most_bytes: int = 1 << 20) -> Ids:
    return np.concatenate(list(trace.blocks(most_bytes)))


WRITERS: dict[str, Write] = {
    "arrays": lambda folder, parts: samples.write_arrays(folder / "f", parts),
    "vllm": lambda folder, parts: samples.write_lines(
        folder / "f.jsonl", [samples.vllm_response(ids, len(ids)) for ids in parts]
    ),
    "sglang": lambda folder, parts: samples.write_lines(
        folder / "f.jsonl", [samples.sglang_response(ids, len(ids)) for ids in parts]
    ),
    "csv": lambda folder, parts: samples.write_csv(folder / "f.csv", parts),
    "records": lambda folder, parts: samples.write_records(folder / "f.pt", parts, tokens=True),
}


@pytest.mark.parametrize("writer", WRITERS)
@given(parts=samples.requests())
def test_routing_trace_reads_back_ids_of_every_format(writer: str, parts: list[Ids]) -> None:
    layers, top_k = parts[0].shape[1:]
    shape = {"layers": layers, "top_k": top_k} if writer == "sglang" else {}
    with tempfile.TemporaryDirectory() as folder:
        trace = routing(WRITERS[writer](Path(folder), parts), **shape)
        assert (trace.layers, trace.top_k) == (tuple(range(layers)), top_k)
        assert trace.experts == max(int(ids.max()) for ids in parts) + 1
        assert (trace.tokens, trace.part_count) == (sum(map(len, parts)), len(parts))
        for _ in range(2):  # every pass begins anew
            found = [part.ids for part in trace.parts()]
            assert all(ids.dtype == np.int32 for ids in found)
            assert len(found) == len(parts)
            assert all(map(np.array_equal, found, parts))


def test_arrays_of_a_folder_are_requests_in_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 0, 2):
        np.save(tmp_path / f"{number}.npy", np.full((1, 2, 1), number, np.uint8))
    parts = [int(part.ids[0, 0, 0]) for part in routing(tmp_path).parts()]
    assert parts == [0, 2, 9, 10]


@pytest.mark.parametrize("form", ["vllm-routed", "sglang-routed"])
@given(parts=samples.requests(fewest_layers=2), dense=st.integers(0, 1))
def test_written_trace_reads_back_equal(form: str, parts: list[Ids], dense: int) -> None:
    """Without shape arguments; with the number of a dense layer, which both formats keep."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ids in parts:
            ids[:, dense] = 0
        trace = routing(
            samples.write_lines(
                folder / "in.jsonl", [samples.vllm_response(ids, 1) for ids in parts]
            ),
            experts=9,
        )
        path = folder / ("out" if form == "vllm-routed" else "out.jsonl")
        write_trace(path, trace, form)
        again = routing(path)
        assert dense not in again.layers
        assert (again.layers, again.top_k) == (trace.layers, trace.top_k)
        if form == "vllm-routed":
            assert (again.experts, again.experts_known) == (9, True)
        for part, other in zip(trace.parts(), again.parts(), strict=True):
            assert np.array_equal(part.ids, other.ids)
            assert part.prompt_tokens == other.prompt_tokens == 1


def test_dense_layers_and_unused_places_are_left_out(tmp_path: Path) -> None:
    ids = samples.random_ids(1, 5, 3, 2, 8).astype(np.int16)
    ids[:, 1] = 0
    ids[2, 0] = 0  # a token that was not routed in this layer
    padded = np.concatenate([ids, np.full((5, 3, 2), -1, dtype=np.int16)], axis=2)
    np.save(tmp_path / "a.npy", padded)
    trace = routing(tmp_path / "a.npy")
    (part,) = trace.parts()
    assert (trace.layers, trace.top_k) == ((0, 2), 2)
    assert np.array_equal(part.ids[2, 0], [-1, -1])
    assert np.array_equal(part.ids[:, 1], ids[:, 2])


def test_dense_layer_is_left_out_with_one_expert_per_token(tmp_path: Path) -> None:
    ids = np.array([[[0], [1]], [[0], [0]]], dtype=np.uint8)
    np.save(tmp_path / "a.npy", ids)
    assert routing(tmp_path / "a.npy").layers == (1,)


def test_prompt_tokens_count_only_tokens_that_are_there(tmp_path: Path) -> None:
    ids = samples.random_ids(1, 5, 2, 2, 8)
    response = samples.vllm_response(ids, 3)
    # The request asked for what follows its first four tokens of seven in the prompt.
    response["usage"] = {"prompt_tokens": 7, "completion_tokens": 3}
    (part,) = routing(samples.write_lines(tmp_path / "a.jsonl", [response])).parts()
    assert (part.prompt_tokens, part.request) == (3, "cmpl-1")


def test_json_of_sglang_reads_lists_and_openai_extension(tmp_path: Path) -> None:
    ids = samples.random_ids(1, 5, 2, 2, 8)
    native = samples.sglang_response(ids, 3)
    meta = native["meta_info"]
    extended = {"choices": [{"text": ""}], "sglext": {"routed_experts": meta["routed_experts"]}}
    inner = {"choices": [{"meta_info": meta}]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps([native, extended, inner]), encoding="utf-8")
    trace = routing(path, layers=2, top_k=2)
    assert trace.source.startswith("sglang-routed: ")
    assert [part.prompt_tokens for part in trace.parts()] == [3, None, 3]
    assert all(np.array_equal(part.ids, ids) for part in trace.parts())


def test_nested_lists_of_ids_are_read(tmp_path: Path) -> None:
    ids = samples.random_ids(1, 3, 2, 2, 8)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"choices": [{"routed_experts": ids.tolist()}]}), encoding="utf-8")
    (part,) = routing(path).parts()
    assert np.array_equal(part.ids, ids)


def test_sglang_response_without_shape_names_the_options(tmp_path: Path) -> None:
    path = samples.write_lines(
        tmp_path / "a.jsonl", [samples.sglang_response(samples.random_ids(1, 5, 2, 2, 8), 3)]
    )
    for layers, top_k in ((None, None), (2, None), (None, 2)):
        with pytest.raises(TraceShapeMissing, match=r"--layers and --top-k"):
            read_trace(path, layers=layers, top_k=top_k)


def test_moe_trace_keeps_layers_that_ran_fewer_tokens(tmp_path: Path) -> None:
    rows = ["phase,token,layer,rank,expert", "prefill,0,1,0,5", "prefill,0,1,1,4"]
    rows += ["prefill,1,1,0,2", "prefill,1,1,1,3", "prefill,1,3,0,6", "prefill,1,3,1,0"]
    rows += ["decode,2,1,0,0", "decode,2,1,1,1", "decode,2,3,0,7", "decode,2,3,1,1"]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows), encoding="utf-8")
    trace = routing(path)
    (part,) = trace.parts()
    assert (trace.layers, trace.experts, part.prompt_tokens) == ((1, 3), 8, 2)
    assert part.ids.tolist() == [[[5, 4], [-1, -1]], [[2, 3], [6, 0]], [[0, 1], [7, 1]]]


@given(parts=samples.requests())
def test_records_by_pass_become_counts_of_experts(parts: list[Ids]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = counts(samples.write_records(Path(folder) / "a.pt", parts, tokens=False))
        found = all_counts(trace, 1)
    assert (trace.steps, trace.experts_per_token) == (len(parts), None)
    for step, ids in enumerate(parts):
        for layer in range(ids.shape[1]):
            expected = np.bincount(ids[:, layer].ravel(), minlength=trace.experts)
            assert np.array_equal(found[step, layer], expected)


def test_records_of_ranks_are_ordered_by_pass_or_summed(tmp_path: Path) -> None:
    import torch

    parts = [samples.random_ids(seed, 4, 2, 2, 8) for seed in range(3)]
    for tokens in (True, False):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        for rank in range(2):
            file = samples.write_records(folder / f"{1 - rank}.pt", parts, tokens)
            loaded = torch.load(file, weights_only=True)
            for record in loaded["records"]:
                record["rank"] = rank
            torch.save(loaded, file)
    trace = routing(tmp_path / "True")
    places = [(part.step, part.rank, part.prompt_tokens) for part in trace.parts()]
    assert places == [(step, rank, 0) for step in range(3) for rank in range(2)]
    assert trace.unit is TraceUnit.STEP
    single = counts(tmp_path / "False" / "0.pt")
    assert np.array_equal(all_counts(counts(tmp_path / "False")), 2 * all_counts(single))


@given(
    st.sampled_from(["int8", "uint16", "int32", "uint64", "int64", "float64"]),
    st.integers(1, 7),
    st.integers(1, 200),
)
def test_count_array_is_read_in_blocks(dtype: str, steps: int, most_bytes: int) -> None:
    array = np.random.default_rng(1).integers(0, 99, (steps, 2, 5)).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "a.npy", array)
        trace = counts(Path(folder) / "a.npy", format="counts", top_k=2)
        blocks = list(trace.blocks(most_bytes))
    assert all(block.dtype == np.int32 for block in blocks)
    assert all(len(block) <= max(1, most_bytes // 40) for block in blocks)
    assert np.array_equal(np.concatenate(blocks), array)
    assert (trace.layers, trace.experts_per_token) == ((0, 1), 2)


def test_counts_trace_of_statistics_keeps_layers_and_top_k(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 99, (6, 2, 5))
    statistics = ExpertStatistics(array, (3, 7), top_k=2)
    for suffix in (".npz", ".csv", ".json"):
        path = tmp_path / f"a{suffix}"
        write_statistics(path, statistics)
        trace = counts(path)
        assert (trace.layers, trace.experts, trace.steps) == ((3, 7), 5, 6)
        assert np.array_equal(all_counts(trace, 80), array)
    assert counts(tmp_path / "a.npz").experts_per_token == 2


def test_large_count_array_takes_memory_of_one_block(tmp_path: Path) -> None:
    shape = 4000, 8, 128  # 32 MB, sparse on disk
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.int64, shape).flush()
    tracemalloc.start()
    try:
        rows = sum(len(block) for block in counts(tmp_path / "a.npy").blocks(1 << 18))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 4000
    assert peak < 4 << 20


def test_array_of_small_integers_is_ids_and_of_large_ones_counts(tmp_path: Path) -> None:
    ids = samples.random_ids(1, 5, 2, 2, 8)
    np.save(tmp_path / "a.npy", ids.astype(np.uint16))
    np.save(tmp_path / "b.npy", ids)
    assert isinstance(read_trace(tmp_path / "a.npy"), RoutingTrace)
    assert isinstance(read_trace(tmp_path / "b.npy"), CountsTrace)
    assert isinstance(read_trace(tmp_path / "b.npy", format="vllm-routed"), RoutingTrace)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k", "requests", "tokens"),
    [
        ("shipped-model-vllm-routed", range(6), 32, 4, 24, 3096),
        ("shipped-model-sglang-routed.jsonl", range(6), 32, 4, 8, 1024),
        ("tiny-vllm-routed", range(1, 4), 8, 2, 6, 358),
        ("tiny-vllm-responses.jsonl", range(4), 8, 2, 6, 358),
    ],
)
def test_shipped_trace_of_tokens_is_read(
    name: str, layers: range, experts: int, top_k: int, requests: int, tokens: int
) -> None:
    trace = routing(TRACES / name)
    assert (trace.layers, trace.experts, trace.top_k) == (tuple(layers), experts, top_k)
    assert (trace.part_count, trace.tokens) == (requests, tokens)
    assert all(part.ids.shape[1:] == (len(layers), top_k) for part in trace.parts())
    assert f"`{name}" in (TRACES / "README.md").read_text(encoding="utf-8")


def test_shipped_traces_agree_with_each_other() -> None:
    """The first step's requests, of which only the prompts ran in it."""
    all_steps = list(routing(TRACES / "shipped-model-vllm-routed").parts())
    first_step = routing(TRACES / "shipped-model-sglang-routed.jsonl").parts()
    for part, of_step in zip(all_steps, first_step, strict=False):
        assert np.array_equal(part.ids[: len(of_step.ids)], of_step.ids)
        assert part.prompt_tokens == of_step.prompt_tokens == len(of_step.ids) == 128
    trace = counts(TRACES / "shipped-model-counts.npz")
    assert (trace.steps, trace.experts_per_token) == (30, 4)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_counts_trace_leaves_out_layers_without_rows(suffix: str, tmp_path: Path) -> None:
    """A dense layer had its experts in memory, and a place in the mean."""
    counts = np.arange(5 * 3 * 4, dtype=np.int64).reshape(5, 3, 4) + 1
    counts[:, 1] = 0
    counts[:4, 2] = 0  # seen in the last step only
    path = tmp_path / f"counts{suffix}"
    formats.write_statistics(path, formats.ExpertStatistics(counts))
    trace = formats.read_trace(path)
    assert isinstance(trace, formats.CountsTrace)
    assert trace.layers == (0, 2)
    assert np.concatenate(list(trace.open_blocks(2))).tolist() == counts[:, [0, 2]].tolist()
