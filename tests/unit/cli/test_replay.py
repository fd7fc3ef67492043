"""`equipoise replay`: the table, the figures, the page, and what it refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.cli.replay import COMMAND as REPLAY
from equipoise.cli.replay import ReplayRequest
from equipoise.report import svg

STEPS, LAYERS, EXPERTS = 60, 2, 8
OURS = ("--engine", "equipoise")
CADENCE = ("--window-size", "4", "--step-interval", "8")
MEMORY = ("--memory", "8MiB", "--kv-bytes-per-token", "1KiB")
COMMAND = ("replay", "counts.npy", "--ranks", "4", *OURS, *CADENCE)


@pytest.fixture(autouse=True)
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(3)
    counts = draw.poisson(5 * np.arange(EXPERTS), (STEPS, LAYERS, EXPERTS)).astype(np.int32)
    np.save("counts.npy", counts)
    Path("text.npy").write_text("no counts")
    np.save("zero.npy", np.zeros_like(counts))
    made: np.ndarray[Any, Any] = counts
    return made


BAD = {
    "no trace": ((), "TRACE is missing: see equipoise"),
    "no number of ranks": (("counts.npy", *OURS), "--ranks is needed"),
    "a missing file": (("none.npy", "--ranks", "4", *OURS), "none.npy: cannot be read"),
    "a file that is no trace": (("text.npy", "--ranks", "4", *OURS), "text.npy: array: not an npy"),
    "a trace without rows": (("zero.npy", "--ranks", "4", *OURS), "the trace has no rows"),
    "slots that ranks do not divide": (
        ("counts.npy", "--ranks", "4", "--slots", "12,13", *OURS),
        "--slots 13 is not divisible by 4 ranks",
    ),
    "fewer slots than experts": (
        ("counts.npy", "--ranks", "4", "--slots", "4", *OURS),
        "--slots must be 8 to 32",
    ),
    "nodes that do not divide ranks": (
        ("counts.npy", "--ranks", "4", "--nodes", "3", *OURS),
        "--nodes 3 do not divide 4 ranks",
    ),
    "memory without its partner": (
        ("counts.npy", "--ranks", "4", "--memory", "1GiB", *OURS),
        "--memory needs --kv-bytes-per-token",
    ),
    "memory without an expert": (
        ("counts.npy", "--ranks", "4", *MEMORY, *OURS),
        "--kv-bytes-per-token needs --expert-bytes, or --hidden and --intermediate",
    ),
    "memory that experts fill": (
        ("counts.npy", "--ranks", "4", *MEMORY, "--expert-bytes", "2MiB", *OURS),
        "8.0 MiB of a rank leave no KV cache beside its expert weights, 8.0 MiB",
    ),
    "usage without a KV cache": (
        ("counts.npy", "--ranks", "4", "--kv-usage", "0.5", *OURS),
        "--kv-usage needs --kv-bytes-per-token",
    ),
    "a link without hardware": (
        ("counts.npy", "--ranks", "4", "--link", "node", *OURS),
        "--link needs --hardware",
    ),
    "a window beyond its interval": (
        ("counts.npy", "--ranks", "4", "--window-size", "20", "--step-interval", "10", *OURS),
        "--window-size 20 is longer than --step-interval 10",
    ),
    "a phase of requests for counts": (
        ("counts.npy", "--ranks", "4", "--phase", "decode", *OURS),
        "--phase is for requests, and the trace holds steps",
    ),
    "an unknown engine": (("counts.npy", "--ranks", "4", "--engine", "x"), "expected names of"),
    "steps beyond the trace": (
        ("counts.npy", "--ranks", "4", "--range", "60-70", *OURS),
        "the trace has no step 60: it ends before",
    ),
    "the page over the trace": (
        ("counts.npy", "--ranks", "4", "--html", "counts.npy", *OURS),
        "--html: counts.npy is the file that TRACE is read from",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_replay_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(os.listdir(tmp_path))
    answer = equipoise("replay", *arguments, "--quiet")
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert sorted(os.listdir(tmp_path)) == before


def test_replay_table_follows_definitions(
    equipoise: Callable[..., Any], trace: np.ndarray[Any, Any]
) -> None:
    answer = equipoise(*COMMAND, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    rows = trace.reshape(STEPS, LAYERS, 4, -1).sum(axis=3)
    imbalance = (rows.max(axis=2) / rows.mean(axis=2) - 1).mean()
    [now] = [line for line in lines if line.startswith("no balancer")]
    assert now.split()[2:4] == ["8", f"{imbalance:.4f}"]
    assert lines[0].startswith("2 layers of 8 experts on 4 ranks, 60 steps of ")
    assert lines[1] == "a model, not a measurement"
    assert lines[3].startswith("equipoise ")
    assert " throughput, moves not counted; imbalance falls from " in lines[3]
    names = ["static", "lagged", "local", "exact", "no redundant slot"]
    assert all(any(line.startswith("equipoise") and n in line for line in lines) for n in names)
    assert max(map(len, lines)) <= 110


def test_replay_of_even_load_says_leave_it_off(equipoise: Callable[..., Any]) -> None:
    np.save("even.npy", np.full((STEPS, LAYERS, EXPERTS), 6, np.int32))
    answer = equipoise("replay", "even.npy", "--ranks", "4", *OURS, *CADENCE, "--quiet")
    assert answer.out.splitlines()[3].startswith("Leave it off: ")


def test_replay_writes_figures_and_page(
    equipoise: Callable[..., Any], trace: np.ndarray[Any, Any]
) -> None:
    answer = equipoise(*COMMAND, "--json", "f.json", "--html", "h/r.html")
    assert answer.code == 0
    assert answer.err.splitlines()[-2:] == ["figures: f.json", "page: h/r.html, in a new folder"]
    figures = json.loads(Path("f.json").read_text())
    assert figures["command"].startswith("equipoise replay counts.npy --ranks 4")
    assert figures["trace"] == "counts.npy"
    assert (figures["steps"], figures["ranks"], figures["layers"]) == (STEPS, 4, [0, 1])
    assert figures["rows"] == pytest.approx(trace.sum() / STEPS / LAYERS)
    assert figures["decision"] == " ".join(answer.out.split("\n\n")[1].split())
    now, *others = figures["outcomes"]
    assert (now["name"], now["gain"], now["copies"]) == ("no balancer", 0.0, 0)
    assert {one["engine"] for one in others} == {"equipoise"}
    assert len(now["step_imbalance"]) == len(now["step_time"]) == len(now["steps"]) == STEPS
    assert others[0]["rebalances"][0].keys() >= {"planned", "committed", "copies", "pause"}
    assert "<svg" in Path("h/r.html").read_text()


def test_replay_quiet_prints_only_table(equipoise: Callable[..., Any]) -> None:
    loud, quiet = (equipoise(*COMMAND, "--json", "f.json", *more) for more in ((), ("--quiet",)))
    assert (loud.err, quiet.err) == ("figures: f.json\n", "")
    assert quiet.out == loud.out


def test_replay_range_is_that_part_of_the_trace(
    equipoise: Callable[..., Any], trace: np.ndarray[Any, Any]
) -> None:
    np.save("part.npy", trace[20:50])
    part = equipoise("replay", "part.npy", *COMMAND[2:], "--quiet")
    assert equipoise(*COMMAND, "--range", "20-50", "--quiet").out == part.out


def test_replay_names_layers_that_it_leaves_out(
    equipoise: Callable[..., Any], trace: np.ndarray[Any, Any]
) -> None:
    np.save("dense.npy", np.insert(trace, 0, 0, axis=1))
    answer = equipoise("replay", "dense.npy", *COMMAND[2:], "--quiet")
    assert "dense.npy: no rows in layers 0 (dense?): they are left out" in answer.err
    assert answer.out == equipoise(*COMMAND, "--quiet").out


def test_replay_without_matplotlib_prints_table_and_warns(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> str:
        raise svg.PlotsMissing("matplotlib is missing")

    monkeypatch.setattr("equipoise.report.replay.plots.draw", missing)
    answer = equipoise(*COMMAND, "--html", "r.html", "--quiet")
    assert answer.code == 0
    assert answer.err == "equipoise: warning: no page: matplotlib is missing\n"
    assert "no balancer" in answer.out
    assert not Path("r.html").exists()


def test_replay_page_escapes_name_of_trace(equipoise: Callable[..., Any]) -> None:
    os.rename("counts.npy", "<u>&.npy")
    arguments = ("replay", "<u>&.npy", *COMMAND[2:], "--html", "r.html")
    assert equipoise(*arguments).code == 0
    page = Path("r.html").read_text()
    assert "<u>&" not in page
    assert "&lt;u&gt;&amp;.npy" in page


def test_replay_options_come_from_config_file(equipoise: Callable[..., Any]) -> None:
    Path("replay.yaml").write_text(
        "ranks: 4\nengine: [equipoise]\nwindow_size: 4\nstep_interval: 8\nquiet: true\n"
    )
    answer = equipoise("replay", "counts.npy", "--config", "replay.yaml")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == equipoise(*COMMAND).out
    fields = set(ReplayRequest.__dataclass_fields__)
    assert set(REPLAY.options) == fields - {"trace"}


def test_replay_memory_says_what_slots_cost(equipoise: Callable[..., Any]) -> None:
    more = (*MEMORY, "--expert-bytes", "1MiB", "--json", "f.json")
    answer = equipoise(*COMMAND, *more, "--quiet")
    assert answer.code == 0
    outcomes = json.loads(Path("f.json").read_text())["outcomes"]
    kv_tokens = {one["slots"]: one["kv_tokens"] for one in outcomes}
    assert kv_tokens == {8: 4096, 12: 2048}
    assert {one["slots"]: one["batch"] for one in outcomes} == {8: 1.0, 12: 0.5}


def test_replay_table_separates_columns_of_large_figures(equipoise: Callable[..., Any]) -> None:
    sizes = ("--memory", "60GiB", "--kv-bytes-per-token", "1KiB", "--expert-bytes", "1MiB")
    answer = equipoise(*COMMAND, *sizes, "--quiet")
    [row] = [line for line in answer.out.splitlines() if line.startswith("no balancer ")]
    assert row.split()[-3:] == ["-", "62,910,464", "-"]


def test_replay_takes_ranks_from_counts_that_name_them(
    equipoise: Callable[..., Any], trace: np.ndarray[Any, Any]
) -> None:
    by_rank = np.stack([trace.astype(np.int64)] * 4)
    statistics = formats.ExpertStatistics(by_rank.sum(axis=0), (), by_rank, 0, 2)
    formats.write_statistics("recorded", statistics)
    without = equipoise("replay", "recorded", *OURS, *CADENCE)
    assert without.code == 0, without.err
    assert without.out == equipoise("replay", "recorded", "--ranks", "4", *OURS, *CADENCE).out
    refused = equipoise("replay", "recorded", "--nodes", "3", *OURS)
    assert (refused.code, "--nodes 3 do not divide 4 ranks" in refused.err) == (2, True)
