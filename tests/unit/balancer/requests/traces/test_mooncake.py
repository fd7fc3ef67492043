"""Mooncake's JSON lines, with the hashes of their blocks."""

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers.strategies.format_samples import fails
from hypothesis import given

from equipoise.balancer.requests.traces import read_trace, trace_file


@st.composite
def rows(draw: st.DrawFn) -> dict[str, object]:
    """One request, that may have failed."""
    prompt = draw(st.integers(1, 3000))
    hashes = draw(st.lists(st.integers(0, 2**63 - 1), max_size=-(-prompt // 512)))
    time = draw(st.integers(0, 10**9) | st.integers(0, 10**12).map(lambda micros: micros / 1000))
    return row(time, prompt, draw(st.integers(0, 3000)), hashes)


def row(time: float, prompt: int, output: int, hashes: list[int]) -> dict[str, object]:
    """As it is in the file."""
    return {
        "timestamp": time,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": hashes,
    }


@given(
    st.lists(rows(), min_size=1, max_size=12), st.integers(20, 300), st.none() | st.integers(1, 9)
)
def test_mooncake_trace_round_trips(
    records: list[dict[str, object]], piece: int, most: int | None
) -> None:
    records.append(row(10**9, 1, 1, []))
    records.insert(0, row(0, 1, 1, [3]))
    with tempfile.TemporaryDirectory() as folder, patch.object(trace_file, "READ_BYTES", piece):
        path = Path(folder) / "a.jsonl"
        path.write_text("\n\n".join(map(json.dumps, records)))
        workload = read_trace(path, most=most)
    records_with_output = [record for record in records[:most] if record["output_length"]]
    records_with_output.sort(key=lambda record: float(str(record["timestamp"])))
    assert workload.prompts.tolist() == [record["input_length"] for record in records_with_output]
    assert workload.outputs.tolist() == [record["output_length"] for record in records_with_output]
    hashes = [workload.block_hashes_of(at).tolist() for at in range(workload.count)]
    assert sorted(hashes) == sorted(list(record["hash_ids"]) for record in records_with_output)  # type: ignore[call-overload]
    expected = [float(str(record["timestamp"])) / 1000 for record in records_with_output]
    assert np.asarray(workload.arrivals) == pytest.approx(expected, rel=1e-9, abs=2e-9)


def test_mooncake_trace_keeps_hashes_with_sorted_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [row(9, 600, 1, [1, 2]), row(3, 10, 0, [8]), row(3, 10, 1, [5]), row(6, 1, 1, [])]
    path.write_text("\r\n".join(map(json.dumps, records)))
    workload = read_trace(path)
    assert [workload.block_hashes_of(at).tolist() for at in range(3)] == [[5], [], [1, 2]]
    assert (workload.prompts.tolist(), workload.block) == ([10, 1, 600], 512)
    assert np.asarray(workload.arrivals).tolist() == [0.0, 0.003, 0.006]
    assert workload.notes == (
        "1 of 4 requests had no output: dropped",
        "1 requests were earlier than the one before them: sorted by time",
    )


GOOD = row(0, 600, 3, [1, 2])
TIME_MOST = 9_000_000_000_000


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes"),
        ("5", "is 5, expected an object"),
        ("[]", "is [], expected an object"),
        ("{}", "has no timestamp"),
        ("{} {}", "is not JSON: there is more after the object"),
        (b"{\xff}", "is not JSON: 'utf-8' codec can't decode byte 0xff in position 1"),
        ("[" * 100_000, "is not JSON: it is nested too deep"),
        ('{"timestamp": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
        ('{"timestamp": NaN}', "is not JSON: NaN is not a number of JSON"),
        (json.dumps(GOOD | {"timestamp": "0"}), "timestamp is '0', expected milliseconds"),
        (json.dumps(GOOD | {"timestamp": True}), "timestamp is True, expected milliseconds"),
        (json.dumps(GOOD | {"timestamp": -1}), f"timestamp is -1, expected 0 to {TIME_MOST}"),
        (
            json.dumps(GOOD | {"timestamp": 9.1e12}),
            f"timestamp is 9100000000000.0, expected 0 to {TIME_MOST}",
        ),
        (json.dumps(GOOD).replace("0,", "1e999,", 1), "timestamp is inf, expected 0 to"),
        (json.dumps(GOOD | {"input_length": 0}), "input_length is 0, expected 1 to 2147483647"),
        (json.dumps(GOOD | {"input_length": 2**31}), "input_length is 2147483648, expected 1 to"),
        (json.dumps(GOOD | {"input_length": 600.0}), "input_length is 600.0, expected a whole"),
        (json.dumps(GOOD | {"input_length": True}), "input_length is True, expected a whole"),
        (json.dumps(GOOD | {"output_length": -1}), "output_length is -1, expected 0 to"),
        (json.dumps(GOOD | {"output_length": None}), "output_length is None, expected a whole"),
        (json.dumps(GOOD | {"hash_ids": 5}), "hash_ids is 5, expected a list"),
        (json.dumps(GOOD | {"hash_ids": [1, "2"]}), "hash_ids holds '2', expected 0 to"),
        (json.dumps(GOOD | {"hash_ids": [1, -2]}), "hash_ids holds -2, expected 0 to"),
        (json.dumps(GOOD | {"hash_ids": [2**63]}), "hash_ids holds 9223372036854775808, expected"),
        (json.dumps(GOOD | {"hash_ids": [1, 2, 3]}), "hash_ids has 3 for 600 tokens, in blocks of"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}), "has no hash_ids"),
    ],
)
def test_mooncake_trace_names_bad_line(line: str | bytes, words: str, tmp_path: Path) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    good = json.dumps(GOOD).encode()
    what = fails(tmp_path / "a.jsonl", b"\n".join([good, b"", bad, good]), read_trace)
    assert what.startswith(f"line 3: {words}")
