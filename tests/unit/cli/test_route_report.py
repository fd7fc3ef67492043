"""`equipoise route-report`: the table, the figures, the page, and what it refuses."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.route_report import COMMAND, RouteReportRequest
from equipoise.report import svg
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.request_log import RequestRecord

ONE = RequestRecord(
    run=10.0, streamed=True, id="a", path="/v1/completions", model="m", worker="rank 0",
    attempts=1, arrived_at=11.0, bound_at=12.0, first_answer_at=13.0, ended_at=14.0, prompt=5,
    output=6, outcome=RequestOutcome.COMPLETED,
)  # fmt: skip
OTHER = replace(ONE, worker="rank 1", outcome=RequestOutcome.WORKER_LOST, ended_at=15.0)
LATER = replace(ONE, run=20.0)


def write_log(name: str, *records: RequestRecord, more: str = "") -> Path:
    path = Path(name)
    path.write_text("".join(one.to_line() for one in records) + more)
    return path


@pytest.fixture(autouse=True)
def logs(equipoise: Callable[..., Any]) -> None:
    del equipoise  # it changes into an empty folder
    write_log("log", ONE, OTHER)
    write_log("twice", ONE, LATER, OTHER, LATER, LATER)
    write_log("cut", ONE, more=OTHER.to_line()[:40])
    write_log("text", more="A text.\n")
    write_log("other", more='{"step": 1}\n')
    write_log("empty")
    write_log("begun", more=ONE.to_line()[:-20])
    os.mkfifo("pipe")
    Path("binary").write_bytes(b"\xff\xfe\x00\n")


BAD = {
    "no log": ((), "LOG is missing: see equipoise"),
    "a missing one": (("none",), "none: cannot be read: No such file"),
    "a folder": ((".",), ".: cannot be read: Is a directory"),
    "a pipe": (("pipe",), "pipe: is not a regular file"),
    "a text": (("text",), "text: line 1 is not JSON"),
    "lines of something else": (("other",), "other: line 1: expected an object with arrived_at"),
    "no text at all": (("binary",), "binary: is not UTF-8"),
    "nothing": (("empty",), "empty: no request has ended in this log"),
    "less than a line": (("begun",), "begun: no request has ended in this log"),
    "several runs": (
        ("twice",),
        "twice holds 2 runs of the proxy, of 2, 3 requests: choose one by --run",
    ),
    "a run that was not": (("twice", "--run", "3"), "--run must be 1 to 2, got 3"),
    "no run": (("log", "--run", "0"), "--run must be 1 to 1, got 0"),
    "a time that is none": (("log", "--from", "noon"), "expected a time such as 2026-11-27T14:05"),
    "a time without requests": (
        ("log", "--from", "2026-11-27T14:05"),
        "--from, --to: no request arrived then; the first of the log arrived at "
        "1970-01-01 00:00:11 UTC, the last at 1970-01-01 00:00:11 UTC",
    ),
    "an output that is the log": (("log", "--json", "log"), "is the file that LOG is read from"),
    "two outputs at once": (("log", "--json", "x", "--html", "x"), "--json is written to"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_route_report_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(Path().iterdir())
    answer = equipoise("route-report", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert sorted(Path().iterdir()) == before


def test_route_report_writes_table_figures_and_page(equipoise: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    answer = equipoise("route-report", "log", "--json", "out/f.json", "--html", "out/page.html")
    assert answer.code == 0
    assert "log: 2 requests in 4.0 s on 2 workers" in answer.out
    assert "1 completed, 1 worker_lost" in answer.out
    assert answer.err.splitlines() == [
        "figures: out/f.json, in a new folder",
        "page: out/page.html",
    ]
    figures = json.loads(Path("out/f.json").read_text())
    assert figures["command"].startswith("equipoise route-report log")
    assert figures["outcomes"] == {"completed": 1, "worker_lost": 1}
    assert list(figures["workers"]) == ["rank 0", "rank 1"]
    assert "1 of 2 requests completed" in Path("out/page.html").read_text()


def test_route_report_selects_run_by_number(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("route-report", "twice", "--run", "2", "--json", "f.json", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert json.loads(Path("f.json").read_text())["total"]["requests"] == 3


@pytest.mark.parametrize(
    ("arguments", "requests"),
    [
        (("--from", "1970-01-01T00:00:11"), 2),
        (("--from", "1970-01-01T00:00:12Z"), 1),
        (("--to", "1970-01-01T00:00:12"), 1),
        (("--to", "1970-01-01T02:00:12+02:00"), 1),
        (("--from", "1970-01-01T00:00:11", "--to", "1970-01-01T00:00:12"), 1),
    ],
)
def test_route_report_selects_requests_by_arrival(
    equipoise: Callable[..., Any], arguments: tuple[str, ...], requests: int
) -> None:
    write_log("later", ONE, replace(OTHER, arrived_at=12.0))
    answer = equipoise("route-report", "later", *arguments, "--json", "f.json", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    figures = json.loads(Path("f.json").read_text())
    assert figures["total"]["requests"] == requests
    assert {"from", "to"} & set(figures) == {one[2:] for one in arguments[::2]}


def test_route_report_reads_times_from_config_file(equipoise: Callable[..., Any]) -> None:
    write_log("later", ONE, replace(OTHER, arrived_at=12.0))
    Path("c.yaml").write_text(
        'from: 1970-01-01T00:00:12\nto: "1970-01-01T00:00:13"\njson: f.json\n'
    )
    assert equipoise("route-report", "later", "--config", "c.yaml", "--quiet").code == 0
    assert json.loads(Path("f.json").read_text())["total"]["requests"] == 1


def test_route_report_skips_truncated_line(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("route-report", "cut")
    assert answer.code == 0
    assert "cut: 1 request " in answer.out
    assert "1 line of the log cut off and left out" in answer.out


def test_route_report_without_matplotlib_prints_table_and_warns(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> str:
        raise svg.PlotsMissing("matplotlib is missing")

    monkeypatch.setattr("equipoise.report.proxy_log.plots.draw", missing)
    answer = equipoise("route-report", "log", "--html", "page.html")
    assert answer.code == 0
    assert "warning: no page: matplotlib is missing" in answer.err
    assert not Path("page.html").exists()


def test_route_report_options_match_request_fields() -> None:
    fields = {"log", *(option.field for option in COMMAND.options.values())}
    assert set(RouteReportRequest.__dataclass_fields__) == fields
