"""BurstGPT's CSV, of every release."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers.strategies.format_samples import fails
from hypothesis import given

from equipoise.balancer.requests.traces import read_trace

OLD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
NEW = OLD.replace(",Model", ",Ses" + "sion ID,Elapsed time,Model")
ROWS = st.lists(
    st.tuples(st.integers(0, 9 * 10**9), st.integers(1, 10**6), st.integers(0, 10**6)),
    min_size=1,
    max_size=20,
).filter(lambda rows: any(row[2] for row in rows))


@given(ROWS, st.sampled_from([OLD, NEW]), st.integers(0, 9))
def test_burstgpt_trace_round_trips(
    rows: list[tuple[int, int, int]], header: str, places: int
) -> None:
    middle = ",," if header == NEW else ""
    lines = [
        f"{decimal(time, places)}{middle},GPT-4,{s},{o},{s + o},Conversation log"
        for time, s, o in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        workload = read_trace(path)
    rows_with_output = sorted((row for row in rows if row[2]), key=lambda row: row[0])
    assert workload.prompts.tolist() == [row[1] for row in rows_with_output]
    assert workload.outputs.tolist() == [row[2] for row in rows_with_output]
    expected = [(row[0] - rows_with_output[0][0]) / 10**places for row in rows_with_output]
    assert np.asarray(workload.arrivals) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    failed_count = len(rows) - len(rows_with_output)
    notes = (f"{failed_count} of {len(rows)} requests had no output: dropped",)
    assert workload.notes[:1] == notes if failed_count else notes[0] not in workload.notes


def decimal(number: int, places: int) -> str:
    """With so many digits behind the point, and without one for none."""
    before, behind = divmod(number, 10**places)
    return f"{before}.{behind:0{places}}" if places else str(before)


def test_burstgpt_trace_truncates_times_to_nanoseconds(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{OLD}\n5,a,1,2,3,b\n5.000000001999999999,a,1,2,3,b\n6.5,a,1,2,3,b\n")
    assert np.asarray(read_trace(path).arrivals).tolist() == [0.0, 1e-9, 1.5]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("5,GPT-4,1,2,3", "line 3: has 5 columns, expected 6"),
        ("x,GPT-4,1,2,3,c", "line 3: Timestamp is 'x', expected seconds, 0 to 9000000000"),
        ("-5,GPT-4,1,2,3,c", "line 3: Timestamp is '-5', expected seconds"),
        ("5.,GPT-4,1,2,3,c", "line 3: Timestamp is '5.', expected seconds"),
        (".5,GPT-4,1,2,3,c", "line 3: Timestamp is '.5', expected seconds"),
        ("5.1.2,GPT-4,1,2,3,c", "line 3: Timestamp is '5.1.2', expected seconds"),
        ("9000000001,GPT-4,1,2,3,c", "line 3: Timestamp is '9000000001', expected seconds"),
        ("nan,GPT-4,1,2,3,c", "line 3: Timestamp is 'nan', expected seconds"),
        (",GPT-4,1,2,3,c", "line 3: Timestamp is '', expected seconds"),
        ("5,GPT-4,0,2,3,c", "line 3: Request tokens is '0', expected 1 to 2147483647"),
        ("5,GPT-4,1,-2,3,c", "line 3: Response tokens is '-2', expected 0 to 2147483647"),
        ("5,GPT-4,1,two,3,c", "line 3: Response tokens is 'two', expected a whole number"),
    ],
)
def test_burstgpt_trace_names_bad_line(row: str, words: str, tmp_path: Path) -> None:
    text = f"{OLD}\n5,ChatGPT,472,18,490,Conversation log\n{row}\n"
    assert fails(tmp_path / "a.csv", text, read_trace).startswith(words)
