"""The log of requests: what is written is read again, and nothing waits for its disk."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import FormatError, UsageError
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.request_log import RequestLog, RequestRecord, read_log

TIMES = st.floats(0, 2e9)
COUNTS = st.integers(0, 1 << 31)
RECORDS = st.builds(
    RequestRecord,
    run=TIMES,
    streamed=st.booleans(),
    id=st.text(),
    path=st.text(),
    model=st.text(),
    worker=st.none() | st.text(),
    attempts=COUNTS,
    arrived_at=TIMES,
    bound_at=st.none() | TIMES,
    first_answer_at=st.none() | TIMES,
    ended_at=TIMES,
    prompt=COUNTS,
    output=COUNTS,
    outcome=st.sampled_from(RequestOutcome),
)
ONE = RequestRecord(
    run=0.5, streamed=True, id="a", path="/v1/completions", model="m", worker="w", attempts=1,
    arrived_at=1.0, bound_at=2.0, first_answer_at=3.0, ended_at=4.0, prompt=5, output=6,
    outcome=RequestOutcome.COMPLETED,
)  # fmt: skip


@pytest.mark.slow
@given(records=st.lists(RECORDS, max_size=20))
def test_request_log_round_trips_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[RequestRecord]
) -> None:
    path = tmp_path_factory.mktemp("log") / "route.jsonl"
    log = RequestLog(path)
    for record in records:
        log.append(record)
    log.close()
    assert list(read_log(path)) == records
    assert log.dropped == 0


def test_request_log_appends_to_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    for _ in range(2):
        log = RequestLog(path)
        log.append(ONE)
        log.close()
    assert list(read_log(path)) == [ONE, ONE]


@given(length=st.integers(0, len(ONE.to_line()) - 2))
def test_request_log_skips_truncated_last_line(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "route.jsonl"
    cut_lines: list[int] = []
    path.write_text(ONE.to_line() + ONE.to_line()[:length])
    assert list(read_log(path, cut_lines.append)) == [ONE]
    assert cut_lines == [2] * bool(length)
    log = RequestLog(path)  # the next proxy: what it writes can be read
    log.append(ONE)
    log.close()
    assert list(read_log(path)) == [ONE, ONE]


BAD = {
    "{]}": "line 2 is not JSON",
    "[]": "line 2: expected an object with arrived_at",
    "{}": "line 2: expected an object with arrived_at",
    json.dumps(json.loads(ONE.to_line()) | {"ended_at": None}): "line 2: ended_at cannot be None",
    json.dumps(json.loads(ONE.to_line()) | {"prompt": -1}): "line 2: prompt cannot be -1",
    json.dumps(json.loads(ONE.to_line()) | {"attempts": True}): "line 2: attempts cannot be True",
    json.dumps(json.loads(ONE.to_line()) | {"outcome": "good"}): "line 2: outcome cannot be 'good'",
    json.dumps(
        json.loads(ONE.to_line()) | {"arrived_at": "now"}
    ): "line 2: arrived_at cannot be 'now'",
    json.dumps(
        json.loads(ONE.to_line()) | {"arrived_at": float("nan")}
    ): "line 2: arrived_at cannot be nan",
    json.dumps(
        json.loads(ONE.to_line()) | {"first_answer_at": 10**400}
    ): "line 2: first_answer_at cannot be 1000",
    json.dumps(json.loads(ONE.to_line()) | {"streamed": 1}): "line 2: streamed cannot be 1",
    json.dumps(json.loads(ONE.to_line()) | {"run": None}): "line 2: run cannot be None",
    json.dumps(json.loads(ONE.to_line()) | {"more": 1}): "line 2: expected an object",
}


@pytest.mark.parametrize(("line", "says"), BAD.items())
def test_read_log_names_malformed_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "route.jsonl"
    path.write_text(f"{ONE.to_line()}{line}\n")
    with pytest.raises(FormatError, match=says):
        list(read_log(path))


def test_request_log_rejects_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        RequestLog(tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        list(read_log(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    with pytest.raises(FormatError, match="not UTF-8"):
        list(read_log(tmp_path / "binary"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_request_log_refuses_pipe_without_reader(tmp_path: Path) -> None:
    """It would wait for one, deaf to signals."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe cannot be written"):
        RequestLog(tmp_path / "pipe")


def test_request_log_counts_drops_on_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    for _ in range(5):
        log.append(ONE)
    log.close()
    assert log.dropped == 5
    assert [one.message for one in caplog.records] == [
        "/dev/full: records are dropped, and counted: No space left on device"
    ]


def test_request_log_counts_drops_on_full_queue(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "route.jsonl", capacity=0)
    log.append(ONE)
    log.close()
    assert log.dropped == 1
    assert list(read_log(tmp_path / "route.jsonl")) == []
