"""Every bad file of statistics is one FormatError, and so is what cannot be opened or written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.strategies.format_samples import (
    fails,
    file_of_arrangement,
    file_of_statistics,
    small_arrangement,
    small_statistics,
)
from safetensors.numpy import save_file

from equipoise.balancer import formats
from equipoise.balancer.formats import encodings, files
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.hal.errors import FormatError, PlacementError


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
def test_read_statistics_refuses_bad_json(text: str, words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.json", text, formats.read_statistics)


def test_read_statistics_refuses_text_that_is_not_utf_8(tmp_path: Path) -> None:
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
        ("layer,expert,count\n99999,0,1\n", "line 2: layer 99999 is above 65535"),
        ("layer,expert,count\n0,0,1\n65536,0,1\n", "line 3: layer 65536 is above 65535"),
        ("layer,expert\n0,0\n", "begins with ['layer', 'expert'], not layer,expert,count"),
        ("layer,expert,count\n", "has no counts"),
        ('layer,expert,count\n"0,0,1\n', "is not CSV"),
        ("window,layer,expert,count\n0,0,0,1\n2,0,0,1\n", "has no rows of some window after 0"),
    ],
)
def test_read_statistics_refuses_bad_csv(text: str, words: str, tmp_path: Path) -> None:
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
def test_read_statistics_refuses_bad_npy_array(
    array: np.ndarray[Any, Any], words: str, tmp_path: Path
) -> None:
    assert words in fails(tmp_path / "a.npy", encodings.encode_npy(array), formats.read_statistics)


def test_read_statistics_refuses_object_array(tmp_path: Path) -> None:
    data = encodings.encode_npy(np.zeros((1, 4), dtype=np.int64)).replace(b"'<i8'", b"'|O' ")
    what = fails(tmp_path / "a.npy", data, formats.read_statistics)
    assert what == "array holds object, not numbers"


def test_read_statistics_refuses_oversized_npy_before_allocating(tmp_path: Path) -> None:
    data = encodings.encode_npy(np.zeros((1, 4), dtype=np.int64))
    oversized_data = data.replace(b"(1, 4), }          ", b"(99999999, 4000), }")
    assert oversized_data != data
    what = fails(tmp_path / "a.npy", oversized_data, formats.read_statistics)
    assert what == "array: 32 bytes do not fill int64 (99999999, 4000)"


def test_read_statistics_refuses_torch_file_with_code(tmp_path: Path) -> None:
    class CodeOnLoad:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"logical_count": CodeOnLoad()}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="could run code"):
        formats.read_statistics(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_read_statistics_refuses_expanded_torch_tensor(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="has 1099511627776 entries"):
        formats.read_statistics(tmp_path / "a.pt")


def test_read_statistics_refuses_per_pass_records_and_names_mode(tmp_path: Path) -> None:
    torch.save({"records": [], "last_physical_to_logical_map": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="record in mode stat"):
        formats.read_statistics(tmp_path / "a.pt")


def test_read_statistics_refuses_incomplete_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"is a folder without meta_info.json"):
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
def test_read_statistics_refuses_bad_rank_file(
    rows: dict[str, int], words: str, tmp_path: Path
) -> None:
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    tables = {name: np.ones(size, dtype=np.int64) for name, size in rows.items()}
    save_file(tables, folder / "rank1.safetensors")
    with pytest.raises(FormatError) as error:
        formats.read_statistics(folder)
    assert error.value.path == str(folder / "rank1.safetensors")
    assert words in error.value.what


def test_read_statistics_refuses_wrong_number_of_experts_in_folder(tmp_path: Path) -> None:
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    rows = {f"{at}_{layer}": np.array([9, 9, 9, 9]) for at in (100, 101) for layer in (1, 3)}
    save_file(rows, folder / "rank1.safetensors")
    words = "layer 1 has 4 counts in iteration 100, meta_info.json says 3 experts"
    with pytest.raises(FormatError, match=words):
        formats.read_statistics(folder)


def test_read_statistics_names_rank_and_layer_of_negative_count(tmp_path: Path) -> None:
    folder = file_of_statistics(tmp_path, "tensorrt-llm", "")
    rows = {f"{at}_{layer}": np.array([9, 9, 9]) for at in (100, 101) for layer in (1, 3)}
    rows["101_3"][2] = -5
    save_file(rows, folder / "rank1.safetensors")
    with pytest.raises(FormatError, match="rank 1, window 1, layer 3, expert 2: count -5"):
        formats.read_statistics(folder)


def test_statistics_refuse_layers_that_do_not_ascend() -> None:
    with pytest.raises(PlacementError, match=r"layer 1 comes after layer 3: they must ascend$"):
        ExpertStatistics(np.ones((1, 2, 4), dtype=np.int64), (3, 1))


def test_read_refuses_other_kind_of_file_and_names_its_format(tmp_path: Path) -> None:
    path = file_of_statistics(tmp_path, "sglang", ".json")
    with pytest.raises(FormatError, match=r"is statistics \(format sglang\), not a placement"):
        formats.read_placement(path)
    path = file_of_arrangement(tmp_path, "vllm-ascend", ".json")
    with pytest.raises(FormatError, match=r"is a placement \(format vllm-ascend\), not statistics"):
        formats.read_statistics(path)


def test_read_statistics_refuses_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    cases = {
        "none.json": "cannot be read: No such file or directory",
        "pipe.json": "is not a regular file",
        "a\0b": "cannot be read: embedded null byte",
        "x" * 300: "cannot be read: File name too long",
    }
    for name, words in cases.items():
        with pytest.raises(FormatError, match=words) as error:
            formats.read_statistics(tmp_path / name)
        assert str(error.value).isprintable()


def test_read_placement_refuses_unreadable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of_arrangement(tmp_path, "equipoise", ".json")

    def raise_permission_error(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        Path, "open", raise_permission_error
    )  # the tests may run as root, who may read all
    with pytest.raises(FormatError, match="cannot be read: Permission denied"):
        formats.read_placement(path)


def test_read_placement_refuses_too_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    path = file_of_arrangement(tmp_path, "equipoise", ".json")
    with pytest.raises(FormatError, match="is larger than 10 bytes"):
        formats.read_placement(path)


def test_read_placement_refuses_archive_that_unpacks_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of_arrangement(tmp_path, "vllm", ".npz")
    monkeypatch.setattr(encodings, "MAX_FILE_BYTES", 100)
    with pytest.raises(FormatError, match="unpacks to more than 100 bytes"):
        formats.read_placement(path)


def test_failed_write_leaves_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of_arrangement(tmp_path, "equipoise", ".json")
    before = path.read_bytes()

    def raise_no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_no_space)
    with pytest.raises(FormatError, match="cannot be written: No space left on device"):
        formats.write_placement(path, small_arrangement(), "vllm-ascend")
    with pytest.raises(FormatError, match="cannot be written: No space left on device"):
        formats.write_statistics(tmp_path / "folder", small_statistics(), "tensorrt-llm")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_write_refuses_bad_destination(tmp_path: Path) -> None:
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
def test_write_placement_refuses_unknown_format(
    name: str, form: str | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=words):
        formats.write_placement(tmp_path / name, small_arrangement(), form)
