"""The format is told by what is in a file; what is none of them is one clear line."""

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from helpers.strategies.format_samples import fails
from hypothesis import given

from equipoise.balancer.requests.catalogue import FORMATS
from equipoise.balancer.requests.traces import read_trace, trace_file
from equipoise.balancer.requests.traces.reader import READERS
from equipoise.hal.errors import FormatError, UsageError

CHAT = [{"from": "human", "value": "eight  8"}, {"from": "gpt", "value": "four"}]
SAMPLES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,2,1\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,2,1\n",
    "mooncake": '{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [0]}\n',
    "sharegpt": json.dumps([{"conversations": CHAT}], indent=1),
}
BEGINS = (
    "expected columns 'TIMESTAMP,ContextTokens,GeneratedTokens' or "
    "'Timestamp,Request tokens,Response tokens', or JSON"
)
MARK = b"\xef\xbb\xbf"


def gzipped(data: bytes) -> bytes:
    """The same bytes whenever it is called: they are in names of tests, which workers compare."""
    return gzip.compress(data, mtime=0)


def plain(data: bytes) -> bytes:
    """As it is."""
    return data


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("pack", [plain, gzipped])
@pytest.mark.parametrize("head", [b"", MARK])
def test_read_trace_detects_format_by_content(
    name: str, pack: Callable[[bytes], bytes], head: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(pack(head + SAMPLES[name].encode()))
    for workload in (read_trace(path), read_trace(str(path), name)):
        assert (workload.name, workload.prompts.tolist(), workload.outputs.tolist()) == (
            "trace",
            [2],
            [1],
        )


def test_read_trace_names_workload_after_file(tmp_path: Path) -> None:
    path = tmp_path / "week.2.csv.gz"
    path.write_bytes(gzipped(SAMPLES["azure"].encode()))
    assert read_trace(path).name == "week.2"


def test_readers_cover_every_listed_format() -> None:
    assert list(READERS) == list(FORMATS)
    assert sorted(SAMPLES) == sorted(FORMATS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (MARK, "is empty"),
        (gzipped(b""), "is empty"),
        (b"\n\n", f"line 1: begins with '', {BEGINS}"),
        (b"a,b\n1,2\n", f"line 1: begins with 'a,b', {BEGINS}"),
        (b"timestamp,ContextTokens,GeneratedTokens\n", "line 1: begins with 'timestamp,Context"),
        (b"\x00\xff\x10" * 2000, "line 1: begins with "),
        (gzipped(bytes(range(128, 256))), "line 1: begins with "),
        (
            gzipped(SAMPLES["azure"].encode())[:-9],
            "is not a whole gzip file: Compressed file",
        ),
        (gzipped(SAMPLES["azure"].encode())[:-4] + b"aaaa", "is not a whole gzip file: Inco"),
        (b"\x1f\x8bsomething else", "is not a whole gzip file: Unknown compression method"),
        (gzipped(b"a" * 99)[:20] + b"\x99" * 20, "is not a whole gzip file: "),
    ],
)
def test_read_trace_refuses_unknown_content_in_one_line(
    data: bytes, words: str, tmp_path: Path
) -> None:
    assert fails(tmp_path / "a", data, read_trace).startswith(words)


def test_read_trace_uses_requested_format(tmp_path: Path) -> None:
    expected = {
        "azure": "line 1: begins with ",
        "burstgpt": "line 1: begins with ",
        "mooncake": "line 1: is not JSON: Expecting value",
        "sharegpt": "line 1: is not JSON: 'rubbish', expected '['",
    }
    for name, words in expected.items():

        def read(path: Path, name: str = name) -> object:
            return read_trace(path, name)

        assert fails(tmp_path / "a", "rubbish", read).startswith(words)


def test_read_trace_refuses_duplicate_columns(tmp_path: Path) -> None:
    text = SAMPLES["azure"].replace("\n", ",TIMESTAMP\n", 1)
    assert fails(tmp_path / "a", text, read_trace).startswith("line 1: begins with 'TIMESTAMP,")


def test_read_trace_refuses_unreadable_path_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "none", "cannot be read: No such file or directory"),
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path / "a\0b", "cannot be read: "),
    ):
        with pytest.raises(FormatError) as error:
            read_trace(path)
        assert error.value.what.startswith(words)


def test_read_trace_refuses_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no trace format is called 'x': there are azure, moonc"):
        read_trace(tmp_path / "none", "x")
    with pytest.raises(UsageError, match="at most 0 rows of a trace are none"):
        read_trace(tmp_path / "none", most=0)


@pytest.mark.parametrize("name", ["azure", "mooncake"])
def test_read_trace_bounds_memory_for_endless_line(name: str, tmp_path: Path) -> None:
    text = SAMPLES[name] + "9" * 1000
    with (
        patch.object(trace_file, "MAX_LINE_BYTES", 300),
        patch.object(trace_file, "READ_BYTES", 100),
    ):
        what = fails(tmp_path / "a", text, read_trace)
    assert what == f"line {len(SAMPLES[name].splitlines()) + 1}: is longer than 300 bytes"


def read_or_refused(path: Path, name: str | None) -> bool:
    """Whether there are requests, or an error of one line; anything else is raised."""
    try:
        return read_trace(path, name).count >= 1
    except FormatError as error:
        return str(error).isprintable()


@pytest.mark.parametrize("name", SAMPLES)
@given(st.data())
def test_read_trace_of_damaged_file_reads_or_raises_in_one_line(
    name: str, data: st.DataObject
) -> None:
    trace_bytes = (SAMPLES[name] * (1 if name == "sharegpt" else 3)).encode()
    begin = data.draw(st.integers(0, len(trace_bytes)))
    end = data.draw(st.integers(begin, min(begin + 20, len(trace_bytes))))
    damaged_bytes = trace_bytes[:begin] + data.draw(st.binary(max_size=20)) + trace_bytes[end:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(damaged_bytes)
        assert read_or_refused(path, data.draw(st.sampled_from([None, name])))


@given(st.sampled_from(sorted(SAMPLES)) | st.none(), st.binary(max_size=100))
def test_read_trace_refuses_junk_in_one_line(name: str | None, junk: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(junk)
        with pytest.raises(FormatError) as error:
            read_trace(path, name)
    assert str(error.value).isprintable()
