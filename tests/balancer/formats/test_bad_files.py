"""Every bad file is one FormatError that names file, layer and value."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.format_samples import (
    file_of_arrangement,
    file_of_statistics,
    small_arrangement,
    small_statistics,
)

from equipoise.balancer import formats
from equipoise.balancer.formats import document, files, npy
from equipoise.hal.errors import FormatError

GOOD_MAP: dict[str, Any] = {
    "moe_layer_count": 1,
    "layer_list": [
        {
            "layer_id": 7,
            "device_count": 2,
            "device_list": [
                {"device_id": 0, "device_expert": [0, 1]},
                {"device_id": 1, "device_expert": [2, 0]},
            ],
        }
    ],
}
YAML = "num_slots: 4\ninitial_global_assignments:\n  3: [0, 1, 2, 0]\n"


def fails(path: Path, data: bytes | str, read: Callable[[Path], object]) -> str:
    """What the error says after the name of the file."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(FormatError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    return caught.value.what


def two_ranks(path: Path) -> object:
    return formats.read_placement(path, ranks=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"logical_count": [[1, 2], [3, -4]]}', "layer 1, expert 1: count -4 is negative"),
        ('{"logical_count": [[1, 2], [3]]}', "logical_count: layer 1 has 1 entries, expected 2"),
        ('{"logical_count": [[1, 2.5]]}', "layer 0, expert 1 is 2.5, not a whole number"),
        ('{"logical_count": [[1, 1e999]]}', "layer 0, expert 1 is inf, not a whole number"),
        ('{"logical_count": [[1, NaN]]}', "is not JSON: NaN is not a number of JSON"),
        ('{"logical_count": [[1, true]]}', "layer 0, expert 1 is True, not a whole number"),
        ('{"logical_count": [[1, "2"]]}', "layer 0, expert 1 is '2', not a whole number"),
        ('{"logical_count": [[[1, null]]]}', "window 0, layer 0, expert 1 is None, not a whole"),
        ('{"logical_count": [[1, 99999999999999999999]]}', "beyond 64 bits"),
        ('{"logical_count": [[70368744177664]]}', "layer 0, expert 0: count 70368744177664 is"),
        ('{"logical_count": []}', "none of them 0"),
        ('{"logical_count": 5}', "logical_count is 5, not a list"),
        ('{"logical_count": [[1]], "logical_count": [[2]]}', "'logical_count' is given twice"),
        ('{"logical_count": [[1, 2', "is not JSON: Expecting ',' delimiter at line 1, column 25"),
        ('{"logical_count": ' + "[" * 100_000, "is not read: nested too deep"),
        ('{"counted": [[1]]}', "is not statistics: has none of the fields logical_count, counts"),
        ("[[1, 2]]", "holds [[1, 2]], not an object"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
    ],
)
def test_bad_counts_in_json(text: str, words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.json", text, formats.read_statistics)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    what = fails(tmp_path / "a.json", b'{"a": "\xff"}', formats.read_statistics)
    assert what == "is not UTF-8 at byte 7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer,expert,count\n0,0,1\n0,1,-2\n", "layer 0, expert 1: count -2 is negative"),
        ("layer,expert,count\n0,0,1\n0,1,x\n", "line 3: count is 'x', not a whole number"),
        ("layer,expert,count\n0,0,1\n0,1,1.5\n", "line 3: count is '1.5', not a whole number"),
        ("layer,expert,count\n0,0,nan\n", "line 2: count is 'nan', not a whole number"),
        ("layer,expert,count\n0,0,1e30\n", "line 2: count is '1e30', not a whole number"),
        ("layer,expert,count\n0,0\n", "line 2 has 2 columns of 3"),
        ("layer,expert,count\n0,0,1\n0,0,1\n", "layer 0, expert 0 of window 0 is given twice"),
        ("layer,expert,count\n3,0,1\n3,1,1\n4,1,1\n", "layer 4 of window 0 has no count of exp"),
        ("layer,expert,count\n0,999999999999,1\n", "layer 0 of window 0 has no count of expert 0"),
        ("layer,expert,count\n-1,0,1\n", "below 0"),
        ("layer,expert,count\n99999,0,1\n", "layer 99999 comes after layer -1"),
        ("layer,expert\n0,0\n", "begins with ['layer', 'expert'], not layer,expert,count"),
        ("layer,expert,count\n", "has no counts"),
        ('layer,expert,count\n"0,0,1\n', "is not CSV"),
        ("window,layer,expert,count\n0,0,0,1\n2,0,0,1\n", "has no rows of some window after 0"),
    ],
)
def test_bad_csv(text: str, words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.csv", text, formats.read_statistics)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[0, 5, -1]]), "layer 0, expert 2: count -1 is negative"),
        (np.array([[0, np.nan]]), "layer 0, expert 1 is nan, not a whole number"),
        (np.array([[0, -np.inf]]), "layer 0, expert 1 is -inf, not a whole number"),
        (np.array([[[0, 0.5]]]), "window 0, layer 0, expert 1 is 0.5, not a whole number"),
        (np.array([[2**63]], dtype=np.uint64), "is 9223372036854775808, beyond 64 bits"),
        (np.array([1, 2]), "is of shape (2,), expected axes layer, expert"),
        (np.array([["a"]]), "holds <U1, not numbers"),
        (np.array([[True]]), "holds bool, not numbers"),
        (np.zeros((0, 4)), "none of them 0"),
    ],
)
def test_bad_arrays(array: np.ndarray[Any, Any], words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.npy", npy.encode_npy(array), formats.read_statistics)


def test_an_array_that_says_it_is_vast_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    data = npy.encode_npy(np.zeros((1, 4), dtype=np.int64))
    vast = data.replace(b"(1, 4), }          ", b"(99999999, 4000), }")
    assert vast != data
    what = fails(tmp_path / "a.npy", vast, formats.read_statistics)
    assert what == "array: 32 bytes do not fill int64 (99999999, 4000)"


def test_a_torch_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    class Sly:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"logical_count": Sly()}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="could run code"):
        formats.read_statistics(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_a_small_torch_file_of_a_vast_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="has 1099511627776 entries"):
        formats.read_statistics(tmp_path / "a.pt")


def test_records_by_pass_are_refused_with_the_mode_to_use(tmp_path: Path) -> None:
    torch.save({"records": [], "last_physical_to_logical_map": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="record in mode stat"):
        formats.read_statistics(tmp_path / "a.pt")


def test_a_folder_without_statistics_and_one_with_holes(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"meta_info.json: cannot be read: No such file"):
        formats.read_statistics(tmp_path)
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    (folder / "rank0.safetensors").unlink()
    with pytest.raises(FormatError, match=r"has no rank0.safetensors, but rank1"):
        formats.read_statistics(folder)
    with pytest.raises(FormatError, match="is a folder, and not a placement"):
        formats.read_placement(folder)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"1_0": 3, "1_1": 3, "2_0": 3}, "layer 1 has no counts of iteration 2"),
        ({"1_0": 3, "3_0": 3}, "has iterations 1 and 3, and none between"),
        ({"one_0": 3}, "field 'one_0' is not ITERATION_LAYER"),
        ({"9_9": 3}, "has other iterations or layers than rank0.safetensors"),
    ],
)
def test_a_bad_file_of_a_rank(rows: dict[str, int], words: str, tmp_path: Path) -> None:
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    tables = {name: np.ones(size, dtype=np.int64) for name, size in rows.items()}
    save_file(tables, folder / "rank1.safetensors")
    with pytest.raises(FormatError) as caught:
        formats.read_statistics(folder)
    assert caught.value.path == str(folder / "rank1.safetensors")
    assert words in caught.value.what


def test_counts_for_other_experts_than_the_folder_says(tmp_path: Path) -> None:
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    rows = {f"{at}_{layer}": np.array([9, 9, 9, 9]) for at in (100, 101) for layer in (1, 3)}
    save_file(rows, folder / "rank1.safetensors")
    words = "layer 1 has 4 counts in iteration 100, meta_info.json says 3 experts"
    with pytest.raises(FormatError, match=words):
        formats.read_statistics(folder)


def test_negative_counts_of_a_rank_name_rank_and_layer(tmp_path: Path) -> None:
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    rows = {f"{at}_{layer}": np.array([9, 9, 9]) for at in (100, 101) for layer in (1, 3)}
    rows["101_3"][2] = -5
    save_file(rows, folder / "rank1.safetensors")
    with pytest.raises(FormatError, match="rank 1, window 1, layer 3, expert 2: count -5"):
        formats.read_statistics(folder)


@pytest.mark.parametrize(
    ("rows", "ranks", "words"),
    [
        ([[0, 1, 2, 9]], 2, "layer 0, slot 3: expert 9 is unknown: 4 slots hold experts 0 to 3"),
        ([[0, 1, 2, -1]], 2, "layer 0, slot 3: expert -1 is unknown"),
        ([[0, 1, 2, 0], [0, 1, 1, 0]], 2, "layer 1 has no slot for expert 2"),
        ([[0, 1, 2, 0]], 3, "4 slots do not divide among 3 ranks"),
        ([[0, 1, 2, 0]], None, "does not say how many ranks there are"),
        ([[0, 1, 2, 0]], 0, "must be positive"),
        ([[0, 1], [0]], 2, "layer 1 has 1 entries, expected 2"),
        ([[0, 5000000000]], 2, "layer 0, slot 1: 5000000000 is out of range"),
    ],
)
def test_bad_placements(rows: object, ranks: int | None, words: str, tmp_path: Path) -> None:
    text = json.dumps({"physical_to_logical_map": rows})
    what = fails(tmp_path / "a.json", text, lambda path: formats.read_placement(path, ranks=ranks))
    assert words in what


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logical_replica_count": [[2, 2, 1]]}, "layer 0, expert 1: logical_replica_count has 2"),
        ({"logical_to_physical_map": [[[0, 3], [2, -1], [1, -1]]]}, "layer 0, expert 1: logical_"),
        ({"logical_to_physical_map": [[[0, 3], [1, -1]]]}, "is (1, 2, 2), of physical_to_logical_"),
        ({"ranks": 4}, "is for 4 ranks, not 2"),
        ({"layers": [1, 2]}, "2 numbers of layers for 1 layers"),
        ({"layers": [-1]}, "layer -1 comes after layer -1"),
    ],
)
def test_maps_that_disagree(fields: dict[str, object], words: str, tmp_path: Path) -> None:
    text = json.dumps({"physical_to_logical_map": [[0, 1, 2, 0]], **fields})
    assert words in fails(tmp_path / "a.json", text, two_ranks)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[2, 0, 3], [1, 1, 0], [1, 3, 0]], "expert 2 has slot 3, as has expert 0"),
        ([[2, 0, 4], [1, 1, 0], [1, 2, 0]], "layer 0: expert 0 has slot 4 of 4"),
        ([[3, 0, 3], [1, 1, 0], [1, 2, 0]], "layer 0, expert 0 has 3 copies in 2 columns"),
        ([[2, 0, 3], [0, 1, 0], [1, 2, 0]], "layer 0, expert 1 has 0 copies in 2 columns"),
        ([[1], [1]], "an expert needs two columns"),
    ],
)
def test_bad_tables(rows: list[list[int]], words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.json", json.dumps({"eplb_table": [rows]}), two_ranks)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("moe_layer_count",), 2, "moe_layer_count is 2, and layer_list has 1"),
        (("layer_list",), [], "layer_list is [], not a list of objects"),
        (("layer_list", 0, "layer_id"), "x", "entry 0 of layer_list: layer_id is 'x', not a whole"),
        (("layer_list", 0, "device_count"), 3, "layer 7: device_count is 3, and there are 2"),
        (("layer_list", 0, "device_list", 1), 5, "layer 7: device_list holds 5, not objects"),
        (("layer_list", 0, "device_list", 1, "device_id"), 0, "layer 7: device_id is not 0 to 1"),
        (("layer_list", 0, "device_list", 1, "device_expert"), [2], "layer 7: device 1 has 1 entr"),
        (("layer_list", 0, "device_list", 1, "device_expert", 0), 1, "has no slot"),
        (("layer_list", 0, "device_list", 1, "device_expert", 0), 8, "layer 7, slot 2: expert 8"),
    ],
)
def test_bad_expert_maps(
    path: tuple[str | int, ...], value: object, words: str, tmp_path: Path
) -> None:
    broken = json.loads(json.dumps(GOOD_MAP))
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if words == "has no slot":
        broken["layer_list"][0]["device_list"][0]["device_expert"] = [0, 3]
    assert words in fails(tmp_path / "a.json", json.dumps(broken), formats.read_placement)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (YAML.replace("2, 0]", "2]"), "layer 3 has 3 slots, num_slots is 4"),
        (YAML.replace("2, 0]", "2, x]"), "layer 3: slot 3 is 'x', not a whole number"),
        (YAML.replace("2, 0]", "2, 1.0]"), "layer 3: slot 3 is '1.0', not a whole number"),
        (YAML.replace("2, 0]", "2, -1]"), "layer 3, slot 3: expert -1 is unknown"),
        (YAML.replace("2, 0]", "1, 0]").replace("1, 1", "3, 1"), "layer 3 has no slot for exper"),
        (YAML.replace("3:", "three:"), "'three' is not the number of a layer"),
        (YAML + "  3: [0, 1, 2, 0]\n", "key '3' is given twice"),
        (YAML + "  03: [0, 1, 2, 0]\n", "layer 3 is given twice"),
        (YAML.replace("num_slots: 4", "a: 1"), "has no field num_slots"),
        (YAML + "layer_updates_per_iter: -1\n", "layer_updates_per_iter is -1, below 0"),
        ("num_slots: 4\ninitial_global_assignments:\n", "is None, not a mapping of layers"),
        ("num_slots: 4\n", "is not a placement: has none of the fields initial_global"),
        ("a: &x [1]\nb: *x\n", "refers to the anchor 'x'"),
        ("a: " + "[" * 5000, "nested deeper than 8 levels"),
        ("a: [1, 2", "is not YAML: "),
        ("- 1\n", "holds [1], not a mapping"),
        ("\t\n", "is not YAML: "),
    ],
)
def test_bad_yaml(text: str, words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.yaml", text, two_ranks)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("digest", "0" * 32, "digest is '000"),
        ("ranks", 2, "seal is "),
        ("layers", [1, 4], "seal is "),
        ("version", 2, "is of version 2, not 1"),
        ("format", "other", "format is 'other', not 'equipoise-placement'"),
        ("slots", 7, "says 7 slots, and has 6"),
        ("shares", [[1] * 6] * 2, "layer 1: shares of expert 0 sum to 2, not 65536"),
        ("shares", [[-1] * 6] * 2, "layer 1, slot 0: share -1 is not 0 to 65536"),
        ("shares", [[1] * 5] * 2, "shares are int32 (2, 6), got int32 (2, 5)"),
    ],
)
def test_bad_placements_of_our_own(key: str, value: object, words: str, tmp_path: Path) -> None:
    path = file_of_arrangement(tmp_path, "equipoise", ".json")
    fields = {**json.loads(path.read_bytes()), key: value}
    assert words in fails(path, document.encode_json(fields), formats.read_placement)


def test_statistics_are_no_placement_and_the_error_says_what_they_are(tmp_path: Path) -> None:
    path = file_of_statistics(tmp_path, "sglang", ".json")
    with pytest.raises(FormatError, match="is not a placement but of the format sglang"):
        formats.read_placement(path)
    path = file_of_arrangement(tmp_path, "vllm-ascend", ".json")
    with pytest.raises(FormatError, match="is not statistics but of the format vllm-ascend"):
        formats.read_statistics(path)


def test_names_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    cases = {
        "none.json": "cannot be read: No such file or directory",
        "pipe.json": "is not a regular file",
        "a\0b": "cannot be read: embedded null byte",
        "x" * 300: "cannot be read: File name too long",
    }
    for name, words in cases.items():
        with pytest.raises(FormatError, match=words) as caught:
            formats.read_statistics(tmp_path / name)
        assert str(caught.value).isprintable()


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of_arrangement(tmp_path, "equipoise", ".json")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # the tests may run as root, who may read all
    with pytest.raises(FormatError, match="cannot be read: Permission denied"):
        formats.read_placement(path)


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 10)
    path = file_of_arrangement(tmp_path, "equipoise", ".json")
    with pytest.raises(FormatError, match="is larger than 10 bytes"):
        formats.read_placement(path)


def test_an_archive_that_unpacks_to_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of_arrangement(tmp_path, "vllm", ".npz")
    monkeypatch.setattr(npy, "LARGEST", 100)
    with pytest.raises(FormatError, match="unpacks to more than 100 bytes"):
        formats.read_placement(path)


def test_what_cannot_be_written_leaves_nothing_behind_and_what_was_there_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of_arrangement(tmp_path, "equipoise", ".json")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FormatError, match="cannot be written: No space left on device"):
        formats.write_placement(path, small_arrangement(), "vllm-ascend")
    with pytest.raises(FormatError, match="cannot be written: No space left on device"):
        formats.write_statistics(tmp_path / "folder", small_statistics(), "tensorrt-llm")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_places_that_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(FormatError, match="is there already, and is not a regular file"):
        formats.write_placement(tmp_path / "a.json", small_arrangement())
    with pytest.raises(FormatError, match="cannot be written: No such file or directory"):
        formats.write_placement(tmp_path / "none" / "a.json", small_arrangement())
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    with pytest.raises(FormatError, match="is there already, and is not an empty folder"):
        formats.write_statistics(folder, small_statistics(), "tensorrt-llm")


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("a.xyz", None, "has a suffix that is not known to write: .json, .yaml"),
        ("a.json", "other", "cannot be written as other: known are equipoise"),
        ("a.json", "tensorrt-llm", "is written as tensorrt-llm with a suffix of .yaml, .yml"),
    ],
)
def test_formats_that_are_not_known(
    name: str, form: str | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=words):
        formats.write_placement(tmp_path / name, small_arrangement(), form)
