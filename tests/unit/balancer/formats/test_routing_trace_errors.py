"""Every bad routing trace is one FormatError of one line, with file, place and value."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers.strategies import trace_samples as samples
from hypothesis import given

from equipoise.balancer.formats import CountsTrace, read_trace, write_trace
from equipoise.balancer.formats.trace_requests import TRACE_FILE
from equipoise.hal.errors import FormatError, PlacementError

IDS = samples.random_ids(1, 5, 3, 2, 8)
Change = Callable[[dict[str, Any]], object]


def read_all(path: Path, **arguments: Any) -> None:
    trace = read_trace(path, **arguments)
    for _ in trace.blocks(1) if isinstance(trace, CountsTrace) else trace.parts():
        pass


def error_or_path(path: Path) -> str:
    """The text of the one error that is allowed, or the path where all can be read."""
    try:
        read_all(path)
    except FormatError as error:
        return str(error)
    return str(path)


def problem(path: Path, **arguments: Any) -> str:
    """What is wrong with a trace, read to its end; one line that begins with the path."""
    with pytest.raises(FormatError) as caught:
        read_all(path, **arguments)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    return caught.value.what


def changed(at: tuple[int, ...], value: int, dtype: str = "int16") -> Any:
    ids = IDS.astype(dtype)
    ids[at] = value
    return ids


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (changed((2, 1, 0), -2), "token 2, layer 1, place 0: expert -2"),
        (changed((2, 1, 0), IDS[2, 1, 1]), f"token 2, layer 1: expert {IDS[2, 1, 1]} is chosen"),
        (IDS[0].astype(np.int16), "array: token 0, layer 0: "),
        (IDS.astype(np.float32), "expert ids are float32, not integers"),
        (np.zeros((0, 3, 2), np.uint8), "has no tokens"),
        (np.zeros((4, 3, 2), np.uint8), "has no token with an expert"),
        (np.zeros((4, 0, 2), np.uint8), "no layers or experts"),
        (changed((0, 0, 0), 1 << 16, "int32"), "token 0, layer 0, place 0: expert 65536"),
    ],
)
def test_read_trace_refuses_bad_array_of_ids(array: Any, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    if array.ndim == 2:
        words = "expert ids are of shape (3, 2), expected axes token, layer, place"
    assert words in problem(tmp_path / "a.npy", format="vllm-routed")


def test_read_trace_refuses_expert_beyond_given_number(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS.astype(np.uint8))
    assert "layer 0, place 1: expert 7 of 7" in problem(tmp_path / "a.npy", experts=7)


def test_read_trace_refuses_folder_whose_arrays_differ(tmp_path: Path) -> None:
    folder = samples.write_arrays(tmp_path / "f", [IDS, IDS[:, :2]])
    what = problem(folder)
    assert what == "has 2 layers and 2 experts per token, the first part 3 and 2"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"format": "x", "version": 1}, "is of format and version ('x', 1)"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"experts": 7}, "expert 7 of 7"),
        ({"layers": [0, 1]}, "has 3 layers, expected 2"),
        ({"layers": [0, 2, 1]}, "layer 1 comes after layer 2"),
        ({"prompt_tokens": [5]}, "prompt_tokens is [5], not an object"),
        ({"prompt_tokens": {"0.npy": "5"}}, "0.npy is '5', not a whole number"),
        ({"prompt_tokens": {"0.npy": 6}}, "has 5 tokens, 6 of them of the prompt"),
    ],
)
def test_read_trace_refuses_bad_trace_file(
    facts: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = samples.write_arrays(tmp_path / "f", [IDS])
    text = json.dumps({"format": "equipoise-trace", "version": 1} | facts)
    (folder / TRACE_FILE).write_text(text, encoding="utf-8")
    assert words in problem(folder)


def set_value(value: object) -> Change:
    return lambda response: response["choices"][0].update(routed_experts=value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_value("%%%"), "line 2: routed_experts is not base64"),
        (set_value(5), "line 2: routed_experts is 5, not base64"),
        (set_value(None), "line 2: has no routed_experts: the server needs --enable-return"),
        (lambda r: r.clear(), "line 2: has no routed_experts"),
        (set_value([[[1, 2]], [[3]]]), "line 2: routed_experts: token 1, layer 0 has 1 entries"),
        (set_value([[[1, 2.5]]]), "token 0, layer 0, place 1 is 2.5, not a whole number"),
        (
            set_value(base64.b64encode(b"\x93NUMPY").decode()),
            "line 2: routed_experts: not an npy header",
        ),
        (
            lambda r: set_value(r["choices"][0]["routed_experts"][:-8])(r),
            "line 2: routed_experts: ",
        ),
        (lambda r: r.update(usage={"prompt_tokens": -1}), "line 2: prompt_tokens is -1"),
        (lambda r: r.update(usage={"prompt_tokens": "x"}), "line 2: prompt_tokens is 'x'"),
    ],
)
def test_read_trace_names_line_of_bad_response(change: Change, words: str, tmp_path: Path) -> None:
    response = samples.vllm_response(IDS, 2)
    change(response)
    path = samples.write_lines(tmp_path / "a.jsonl", [samples.vllm_response(IDS, 2), response])
    assert words in problem(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"a": NaN}', "is not JSON: NaN is not a number"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ("{", "line 2, column 2"),
        ("[" * 100_000, "nested too deep"),
        ("7", "line 2: holds 7, not a response"),
    ],
)
def test_read_trace_names_line_that_is_no_json(line: str, words: str, tmp_path: Path) -> None:
    path = samples.write_lines(tmp_path / "a.jsonl", [samples.vllm_response(IDS, 2)])
    path.write_text(path.read_text(encoding="utf-8") + line, encoding="utf-8")
    assert words in problem(path)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"layers": 4, "top_k": 2}, "has 120 bytes, which are no rows of int32 for 4 layers and 2"),
        ({"layers": 3, "top_k": 1}, "has 10 tokens for 3 layers and 1 experts per token, and the"),
        ({"layers": 2, "top_k": 3}, "is chosen twice"),
    ],
)
def test_sglang_response_refuses_wrong_shape(
    shape: dict[str, int], words: str, tmp_path: Path
) -> None:
    path = samples.write_lines(tmp_path / "a.jsonl", [samples.sglang_response(IDS, 2)])
    assert words in problem(path, **shape)


def change_record(name: str, value: object) -> Change:
    return lambda loaded: loaded["records"][1].update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_record("rank", -1), "record 1: rank is -1"),
        (change_record("forward_pass_id", "x"), "record 1: forward_pass_id is 'x'"),
        (change_record("forward_pass_id", 0), "record 1: rank 0 has forward pass 0 twice"),
        (change_record("topk_ids_of_layer", 5), "record 1: topk_ids_of_layer is 5, not a tensor"),
        (
            change_record("topk_ids_of_layer", torch.full((3, 1, 8), 16)),
            "record 1: layer 0, token 0, place 0: slot 16 of 16",
        ),
        (change_record("topk_ids_of_layer", torch.zeros(2, 1, 8)), "has 2 layers of 3"),
        (
            change_record("topk_ids_of_layer", torch.zeros(3, 1)),
            "expected axes layer, token, place",
        ),
        (lambda loaded: loaded.update(records=5), "has no list records"),
        (lambda loaded: loaded.update(records=[5]), "record 0 is 5, not a dictionary"),
        (lambda loaded: loaded.update(records=[]), "has no records"),
        (lambda loaded: loaded.pop("last_physical_to_logical_map"), "is None, not a tensor"),
        (
            lambda loaded: loaded.update(last_physical_to_logical_map=torch.zeros(3)),
            "expected axes layer, slot",
        ),
        (
            lambda loaded: loaded.update(last_physical_to_logical_map=-torch.ones(3, 16)),
            "last_physical_to_logical_map is empty, or has what is no expert",
        ),
    ],
)
def test_read_trace_refuses_bad_records(change: Change, words: str, tmp_path: Path) -> None:
    path = samples.write_records(tmp_path / "a.pt", [IDS, IDS[:1]], tokens=True)
    loaded = torch.load(path, weights_only=True)
    change(loaded)
    torch.save(loaded, path)
    assert words in problem(path, format="sglang-records")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (torch.zeros(3, 15), "record 1: global_physical_count is (3, 15), expected (3, 16)"),
        (-torch.ones(3, 16), "none negative"),
        (torch.full((3, 16), 1.5), "layer 0, slot 0 is 1.5, not a whole number"),
    ],
)
def test_read_trace_refuses_bad_counts_of_pass(counts: Any, words: str, tmp_path: Path) -> None:
    path = samples.write_records(tmp_path / "a.pt", [IDS, IDS[:1]], tokens=False)
    loaded = torch.load(path, weights_only=True)
    change_record("global_physical_count", counts)(loaded)
    torch.save(loaded, path)
    assert words in problem(path)


def test_read_trace_refuses_records_that_could_run_code(tmp_path: Path) -> None:
    torch.save({"records": [print], "last_physical_to_logical_map": None}, tmp_path / "a.pt")
    assert "could run code" in problem(tmp_path / "a.pt")


def test_read_trace_refuses_files_of_other_placements(tmp_path: Path) -> None:
    for name, ids in (("0", IDS), ("1", samples.random_ids(1, 5, 3, 2, 9))):
        samples.write_records(tmp_path / f"{name}.pt", [ids], tokens=True)
    with pytest.raises(FormatError, match=r"1\.pt: last_physical_to_logical_map is not that of 0"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer,expert\n1,2\n", "has no column token, rank: only layer,expert"),
        ("token,layer,rank,expert,weight\n", "has the column 'weight', which is not known"),
        ("token,layer,rank,expert,token\n", "has a column twice"),
        ("token,layer,rank,expert\n", "has no rows"),
        ("token,layer,rank,expert\n0,0,0\n", "line 2 has 3 columns of 4"),
        ("token,layer,rank,expert\n0,0,0,nan\n", "line 2: expert is 'nan', not a whole number"),
        ("token,layer,rank,expert\n0,0,0,-1\n", "line 2: expert is '-1', not a whole number"),
        ("token,layer,rank,expert\n0,0,0,65536\n", "line 2: expert is '65536', not a whole"),
        ("token,layer,rank,expert\n0,0,0,1\n0,0,0,2\n", "token 0, layer 0, rank 0 is given twice"),
        ("token,layer,rank,expert\n0,0,0,1\n0,0,999,2\n", "has 2 rows for 1 tokens, 1 layers and"),
        ("token,layer,rank,expert\n0,0,0,1\n0,0,1,1\n", "token 0, layer 0: expert 1 is chosen"),
        ("phase,token,layer,rank,expert\nx,0,0,0,1\n", "line 2: phase is 'x', not prefill or"),
        (
            "phase,token,layer,rank,expert\ndecode,0,0,0,1\nprefill,1,0,0,1\n",
            "token 1 of prefill does not come before decode",
        ),
        (
            "request,token,layer,rank,expert\na,0,0,0,1\nb,0,0,0,1\na,1,0,0,1\n",
            "line 4: request 'a' goes on after others",
        ),
        ('token,layer,rank,expert\n0,0,0,"1\n', "is not CSV"),
    ],
)
def test_read_trace_refuses_bad_csv(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert words in problem(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[[1, 2]], [[3, -4]]]), "step 1, layer 0, expert 1: count -4 is negative"),
        (np.array([[[1, 1 << 31]]]), "step 0, layer 0, expert 1: count 2147483648 is more than"),
        (np.array([[[1, 1]], [[1, np.nan]]]), "step 1, layer 0, expert 1: count nan is not a"),
        (np.array([[[1, np.inf]]]), "step 0, layer 0, expert 1: count inf is not a whole number"),
        (np.zeros((2, 0, 3), np.int64), "no counts by layer and expert"),
        (np.zeros((2, 1, 1, 3), np.int64), "expected axes step, layer, expert"),
        (np.asfortranarray(np.zeros((2, 3, 4), np.int64)), "save it in C order"),
        (np.array([[["a"]]]), "holds <U1, not numbers"),
    ],
)
def test_read_trace_refuses_bad_counts(array: Any, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    assert words in problem(tmp_path / "a.npy")


def test_read_trace_refuses_arguments_that_do_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 3, 4), np.int64))
    assert problem(tmp_path / "a.npy", experts=5) == "has 4 experts, not 5"
    assert problem(tmp_path / "a.npy", format="x").startswith("no format x: known are vllm-routed,")
    with pytest.raises(PlacementError, match="layers must be at least 1, got 0"):
        read_trace(tmp_path / "a.npy", layers=0)
    assert "cannot be read" in problem(tmp_path / "b.npy")
    (tmp_path / "empty").mkdir()
    assert "a folder has to be TensorRT-LLM's" in problem(tmp_path / "empty")


def test_write_trace_refuses_steps_and_partly_routed_tokens(tmp_path: Path) -> None:
    steps = read_trace(samples.write_records(tmp_path / "a.pt", [IDS], tokens=True))
    assert not isinstance(steps, CountsTrace)
    with pytest.raises(PlacementError, match="parts are of a step, and vllm-routed has requests"):
        write_trace(tmp_path / "b", steps, "vllm-routed")
    np.save(tmp_path / "a.npy", changed((1, 2, 1), -1))
    partial = read_trace(tmp_path / "a.npy")
    assert not isinstance(partial, CountsTrace)
    with pytest.raises(PlacementError, match="token 1, layer 2, place 1: has no expert"):
        write_trace(tmp_path / "b", partial, "vllm-routed")
    with pytest.raises(FormatError, match="known are vllm-routed, sglang-routed"):
        write_trace(tmp_path / "b", partial, "csv")


FILES: dict[str, Callable[[Path], Path]] = {
    "array": lambda folder: samples.write_arrays(folder / "f", [IDS]) / "0.npy",
    "vllm": lambda folder: samples.write_lines(
        folder / "a.jsonl", [samples.vllm_response(IDS, 2)] * 2
    ),
    "csv": lambda folder: samples.write_csv(folder / "a.csv", [IDS]),
    "tokens": lambda folder: samples.write_records(folder / "a.pt", [IDS], tokens=True),
    "passes": lambda folder: samples.write_records(folder / "a.pt", [IDS], tokens=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@given(
    kind=st.sampled_from(["cut", "flip", "insert"]),
    at=st.integers(0, 10**6),
    value=st.binary(min_size=1, max_size=4),
)
def test_damaged_trace_raises_format_error_or_reads(
    name: str, kind: str, at: int, value: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = FILES[name](tmp_path_factory.mktemp(name))
    data = path.read_bytes()
    place = at % len(data)
    rest = {"cut": b"", "flip": value + data[place + len(value) :], "insert": value + data[place:]}
    path.write_bytes(data[:place] + rest[kind])
    outcome = error_or_path(path)
    assert str(path) in outcome
    assert "\n" not in outcome
