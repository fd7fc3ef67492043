"""Azure's CSV: every way in which its times are written, and every line that is wrong."""

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers.strategies.format_samples import fails
from hypothesis import given

from equipoise.balancer.requests.traces import read_trace, trace_file
from equipoise.balancer.requests.workload import MAX_TOKENS

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
TIMES = st.datetimes(datetime(1970, 1, 2), datetime(2199, 12, 30))
ZONES = st.none() | st.integers(-23 * 60, 23 * 60).map(lambda m: timezone(timedelta(minutes=m)))
ROWS = st.lists(
    st.tuples(TIMES, ZONES, st.integers(1, MAX_TOKENS), st.integers(1, MAX_TOKENS)),
    min_size=1,
    max_size=20,
)


def trace_text(rows: Sequence[tuple[datetime, timezone | None, int, int]], end: str) -> str:
    """The text of a trace, with times as Python writes them."""
    lines = [f"{time.replace(tzinfo=zone)},{s},{o}" for time, zone, s, o in rows]
    return end.join([HEADER, *lines])


def seconds(time: datetime, zone: timezone | None) -> float:
    """Since 1970, to the microsecond."""
    return (time.replace(tzinfo=zone or UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()


@given(ROWS, st.sampled_from(["\n", "\r\n", "\n\n"]), st.sampled_from(["", "\n", "\r\n\r\n"]))
def test_azure_trace_round_trips(
    rows: list[tuple[datetime, timezone | None, int, int]], end: str, last: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_bytes((trace_text(rows, end) + last).encode())
        workload = read_trace(path)
    sorted_rows = sorted(rows, key=lambda row: seconds(*row[:2]))
    assert workload.prompts.tolist() == [row[2] for row in sorted_rows]
    assert workload.outputs.tolist() == [row[3] for row in sorted_rows]
    begin = seconds(*sorted_rows[0][:2])
    expected = [seconds(*row[:2]) - begin for row in sorted_rows]
    assert np.asarray(workload.arrivals) == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
@given(st.lists(st.integers(1, 999), min_size=1, max_size=40), st.integers(45, 200), st.data())
def test_azure_trace_reads_whole_lines_at_any_piece_size(
    counts: list[int], piece: int, data: st.DataObject
) -> None:
    lines = [f"2024-05-10 00:00:{at:02},{count},1" for at, count in enumerate(counts)]
    most = data.draw(st.none() | st.integers(1, 45))
    with tempfile.TemporaryDirectory() as folder, patch.object(trace_file, "READ_BYTES", piece):
        path = Path(folder) / "a.csv"
        path.write_text("\n".join([HEADER, *lines]))
        workload = read_trace(path, most=most)
        assert workload.prompts.tolist() == counts[:most]
        bad = data.draw(st.integers(0, len(counts) - 1))
        path.write_text("\n".join([HEADER, *lines[:bad], "2024-05-10 00:00:00,?,1", *lines[bad:]]))
        what = fails(path, path.read_bytes(), read_trace)
    assert what == f"line {bad + 2}: ContextTokens is '?', expected a whole number"


def test_azure_trace_reads_releases_of_2023_and_2024(tmp_path: Path) -> None:
    for number, lines in enumerate(
        (
            ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"],
            ["2024-05-10 00:00:00+00:00,374,44", "2024-05-10 00:00:04.314579+00:00,396,109"],
        )
    ):
        path = tmp_path / f"trace{number}.csv"
        path.write_bytes("\r\n".join([HEADER, *lines]).encode())
        workload = read_trace(path)
        assert (workload.name, workload.notes, workload.hashes) == (f"trace{number}", (), None)
        assert np.asarray(workload.arrivals).tolist() == [0.0, 4.314579]
        assert workload.prompts.tolist() == [374, 396]
        assert workload.outputs.tolist() == [44, 109]


def test_azure_trace_finds_columns_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,GeneratedTokens,TIMESTAMP,y,ContextTokens\n,5,2024-05-10T00:00:00Z,,6\n")
    workload = read_trace(path)
    assert (workload.prompts.tolist(), workload.outputs.tolist()) == ([6], [5])


def test_azure_trace_sorts_and_counts_rows_out_of_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    times = ("00:05", "00:01", "00:03", "00:01")
    lines = [f"2024-05-10 00:{time},{at + 1},1" for at, time in enumerate(times)]
    path.write_text("\n".join([HEADER, *lines]))
    workload = read_trace(path)
    assert workload.prompts.tolist() == [2, 4, 3, 1]
    assert np.asarray(workload.arrivals).tolist() == [0.0, 0.0, 2.0, 4.0]
    assert workload.notes == ("2 requests were earlier than the one before them: sorted by time",)


def test_azure_trace_drops_and_counts_requests_without_output(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{HEADER}\n2024-05-10 00:00:00,1,0\n2024-05-10 00:00:01,2,3\n")
    workload = read_trace(path)
    assert (workload.prompts.tolist(), np.asarray(workload.arrivals).tolist()) == ([2], [0.0])
    assert workload.notes == ("1 of 2 requests had no output: dropped",)


TIME = "2024-05-10 00:00:00"
NOT_A_TIME = "expected a time such as 2024-05-10 00:00:00.009930+00:00"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (f"{TIME},1", "line 3: has 2 columns, expected 3"),
        (f"{TIME},1,2,3", "line 3: has 4 columns, expected 3"),
        ("nothing", "line 3: has 1 columns, expected 3"),
        (f"{TIME},0,2", "ContextTokens is '0', expected 1 to 2147483647"),
        (f"{TIME},-3,2", "ContextTokens is '-3', expected 1 to 2147483647"),
        (f"{TIME},3,-2", "GeneratedTokens is '-2', expected 0 to 2147483647"),
        (f"{TIME},2147483648,1", "ContextTokens is '2147483648', expected 1 to 2147483647"),
        (
            f"{TIME},{'9' * 30},1",
            "ContextTokens is '999999999999999999999999999999', expected 1 to",
        ),
        (f"{TIME},{'9' * 3000},1", "9', expected 1 to 2147483647"),
        (f"{TIME},1.5,2", "ContextTokens is '1.5', expected a whole number"),
        (f"{TIME},1,", "GeneratedTokens is '', expected a whole number"),
        (f"{TIME}, 1,2", "ContextTokens is ' 1', expected a whole number"),
        (f'{TIME},"1",2', "ContextTokens is '\"1\"', expected a whole number"),
        (f"{TIME},1e3,2", "ContextTokens is '1e3', expected a whole number"),
        (f"{TIME},\u0663,2", "ContextTokens is '\u0663', expected a whole number"),
        (f"{TIME},+1,2", "ContextTokens is '+1', expected a whole number"),
        (",1,2", f"line 3: TIMESTAMP is '', {NOT_A_TIME}"),
        ("2024-05-10,1,2", f"TIMESTAMP is '2024-05-10', {NOT_A_TIME}"),
        ("2024-02-30 00:00:00,1,2", f"TIMESTAMP is '2024-02-30 00:00:00', {NOT_A_TIME}"),
        ("2023-02-29 00:00:00,1,2", "TIMESTAMP is '2023-02-29 00:00:00'"),
        ("2024-13-01 00:00:00,1,2", "TIMESTAMP is '2024-13-01 00:00:00'"),
        ("2024-00-01 00:00:00,1,2", "TIMESTAMP is '2024-00-01 00:00:00'"),
        ("2024-01-00 00:00:00,1,2", "TIMESTAMP is '2024-01-00 00:00:00'"),
        ("2024-05-10 24:00:00,1,2", "TIMESTAMP is '2024-05-10 24:00:00'"),
        ("2024-05-10 00:60:00,1,2", "TIMESTAMP is '2024-05-10 00:60:00'"),
        ("2024-05-10 00:00:60,1,2", "TIMESTAMP is '2024-05-10 00:00:60'"),
        ("1969-12-31 00:00:00,1,2", "TIMESTAMP is '1969-12-31 00:00:00'"),
        ("9999-12-31 00:00:00,1,2", "TIMESTAMP is '9999-12-31 00:00:00'"),
        ("2024/05/10 00:00:00,1,2", "TIMESTAMP is '2024/05/10 00:00:00'"),
        (f"{TIME}.,1,2", f"TIMESTAMP is '{TIME}.'"),
        (f"{TIME}.12x,1,2", f"TIMESTAMP is '{TIME}.12x'"),
        (f"{TIME}x12,1,2", f"TIMESTAMP is '{TIME}x12'"),
        (f"{TIME}+0100,1,2", f"TIMESTAMP is '{TIME}+0100'"),
        (f"{TIME}+24:00,1,2", f"TIMESTAMP is '{TIME}+24:00'"),
        (f"{TIME}+01:60,1,2", f"TIMESTAMP is '{TIME}+01:60'"),
        (f"{TIME}+01.00,1,2", f"TIMESTAMP is '{TIME}+01.00'"),
    ],
)
def test_azure_trace_names_bad_line(row: str, words: str, tmp_path: Path) -> None:
    what = fails(tmp_path / "a.csv", f"{HEADER}\n{TIME},1,2\n{row}\n{TIME},1,2\n", read_trace)
    assert what.startswith("line 3: ")
    assert words in what


def test_azure_trace_ignores_lines_after_requested_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{HEADER}\n{TIME},1,2\n{TIME},3,2\nrubbish\n")
    assert read_trace(path, most=2).prompts.tolist() == [1, 3]
    assert fails(path, path.read_bytes(), read_trace) == "line 4: has 1 columns, expected 3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER, "has no requests"),
        (f"{HEADER}\n\n\r\n", "has no requests"),
        (f"{HEADER}\n{TIME},1,0\n", "has no requests: none of 1 has output"),
    ],
)
def test_azure_trace_without_requests_is_refused(text: str, words: str, tmp_path: Path) -> None:
    assert fails(tmp_path / "a.csv", text, read_trace) == words
