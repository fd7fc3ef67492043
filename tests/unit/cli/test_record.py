"""`equipoise record`: what it asks the ranks for, what it writes, and what it refuses."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.balancer import formats
from equipoise.balancer.formats import IterationRange, StatisticsRecorder
from equipoise.cli.record import BY_KEY, RecordRequest, resolve_record_request
from equipoise.cli.run_options import BY_KEY as RUN_OPTIONS
from equipoise.demo import launcher
from equipoise.demo.model import ModelConfig
from equipoise.demo.progress import RunProgress
from equipoise.demo.routing_recorder import RoutingRecorder
from equipoise.demo.run_record import save_record
from equipoise.demo.settings import (
    EXPERTS,
    LAYERS,
    MOVES,
    PLANS,
    WATCHING,
    Balance,
    RecordedContent,
    RecordingSettings,
    RunSettings,
)
from equipoise.hal.errors import RankLost

Launches = list[tuple[RunSettings, RecordingSettings]]


def rows(step: int, rank: int) -> np.ndarray[Any, Any]:
    return np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) + 100 * step + rank


def token_ids(step: int, request: int) -> np.ndarray[Any, Any]:
    """(1, layers, 4), another for each token."""
    first = 7 * step + request + np.arange(LAYERS)[:, None]
    return ((first + np.arange(4)) % EXPERTS)[None]


def record_tokens(settings: RunSettings, recording: RecordingSettings) -> None:
    """Each rank has one request, of one token a step, whose first is a prompt."""
    for rank in range(settings.ranks):
        recorder = RoutingRecorder(recording.folder, rank, recording.steps, ModelConfig())
        for step in range(settings.steps):
            for layer in range(LAYERS):
                recorder.add_layer(layer, torch.from_numpy(token_ids(step, rank)[:, layer]))
            recorder.end_step(step, [(rank, 1, int(step == 0))])
        recorder.close()


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Ranks that record at once, without a model."""
    launches_seen: Launches = []

    def record_demo(
        settings: RunSettings, recording: RecordingSettings, progress: RunProgress
    ) -> None:
        launches_seen.append((settings, recording))
        progress.variant("unbalanced", settings.steps)
        if recording.content is RecordedContent.TOKENS:
            record_tokens(settings, recording)
            return
        for rank in range(settings.ranks):
            one = StatisticsRecorder(
                recording.folder,
                rank=rank,
                ranks=settings.ranks,
                iterations=recording.steps,
                layers=range(LAYERS),
                experts=EXPERTS,
                top_k=4,
            )
            for step in range(settings.steps):
                one.record(step, rows(step, rank))
            one.close()
        progress.step(settings.steps, 0.25, "")

    monkeypatch.setattr(launcher, "record_demo", record_demo)
    return launches_seen


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A run of 12 steps on four ranks."""
    from unit.cli.conftest import record_of

    (tmp_path / "done").mkdir()
    save_record(record_of(RunSettings()), tmp_path / "done" / "record.npz")
    return tmp_path / "done"


def test_record_writes_rows_of_every_rank(
    equipoise: Callable[..., Any], launches: Launches
) -> None:
    answer = equipoise("record", "--ranks", "2", "--steps", "9", "--range", "3-5", "-o", "new/rec")
    assert answer.code == 0, answer.err
    statistics = formats.read_statistics("new/rec")
    assert statistics.by_rank is not None
    assert np.array_equal(
        statistics.by_rank, [[rows(s, rank) for s in (3, 4)] for rank in range(2)]
    )
    assert (statistics.first_iteration, statistics.top_k) == (3, 4)
    total = f"{statistics.counts.sum():,}"
    assert answer.out == (
        f"recorded steps 3 to 4 on 2 ranks: {total} rows of 6 layers of 32 experts\n"
    )
    assert answer.err.splitlines()[-1] == "statistics: new/rec, in a new folder"
    [(settings, _)] = launches
    assert (settings.ranks, settings.steps, settings.balance) == (2, 9, Balance.OFF)


def test_record_without_range_covers_every_step(equipoise: Callable[..., Any]) -> None:
    assert equipoise("record", "--steps", "7", "-o", "rec", "--quiet").err == ""
    assert formats.read_statistics("rec").iteration_range == IterationRange(0, 7)


def test_record_writes_other_statistics_formats(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("record", "--steps", "3", "-o", "counts.csv")
    assert answer.code == 0
    assert "warning: counts.csv: csv does not carry" in answer.err
    assert formats.read_statistics("counts.csv").windows == 3


def test_record_passes_balancing_options(equipoise: Callable[..., Any], launches: Launches) -> None:
    wishes = ("--balance", "on", "--shares", "lagged", "--num-redundant-experts", "4")
    assert equipoise("record", *wishes, "--steps", "9", "-o", "rec").code == 0
    [(settings, _)] = launches
    assert (settings.balance, settings.shares, settings.slots) == (Balance.ON, "lagged", 36)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [(("--format", "vllm-routed", "-o", "new/rec"), "new/rec"), (("-o", "rec.jsonl"), "rec.jsonl")],
)
def test_record_writes_experts_of_every_token(
    equipoise: Callable[..., Any], arguments: tuple[str, ...], path: str
) -> None:
    answer = equipoise("record", "--ranks", "2", "--steps", "4", *arguments)
    assert answer.code == 0, answer.err
    trace = formats.read_trace(path)
    assert isinstance(trace, formats.RoutingTrace)
    for request, part in enumerate(trace.parts()):
        ids = np.concatenate([token_ids(step, request) for step in range(4)])
        assert np.array_equal(part.ids, ids)
        assert part.prompt_tokens == 1
    assert answer.out == (
        "recorded steps 0 to 3 on 2 ranks: 8 tokens of 2 requests, 6 layers of 32 experts\n"
    )
    assert answer.err.splitlines()[-1].startswith(f"routing trace: {path}")


def test_record_of_tokens_keeps_only_steps_of_range(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("record", "--ranks", "2", "--steps", "4", "--range", "1-3", "-o", "a.jsonl")
    assert answer.code == 0, answer.err
    trace = formats.read_trace("a.jsonl")
    assert isinstance(trace, formats.RoutingTrace)
    for request, part in enumerate(trace.parts()):
        assert np.array_equal(part.ids[0], token_ids(1, request)[0])
        assert (len(part.ids), part.prompt_tokens) == (2, 0)


def test_record_of_tokens_is_refused_under_launcher(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    answer = equipoise("record", "--ranks", "2", "-o", "a.jsonl")
    assert answer.code == 2
    assert "sglang-routed is not written under a launcher: start the ranks by --ranks" in answer.err


@pytest.mark.parametrize("out", ["new/rec", "new/counts.csv", "new/a.jsonl"])
def test_record_rejects_uncreatable_output_before_start(
    equipoise: Callable[..., Any], launches: Launches, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", refuse)
    answer = equipoise("record", "--steps", "3", "-o", out)
    assert (answer.code, answer.out, launches) == (2, "", [])
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: -o: new/")
    assert line.endswith("cannot be written: No such file or directory")


def test_record_rejects_shares_without_balance(
    equipoise: Callable[..., Any], launches: Launches
) -> None:
    answer = equipoise("record", "--shares", "lagged", "--steps", "9", "-o", "rec")
    assert (answer.code, answer.out, launches) == (2, "", [])
    assert "--shares has no meaning without --balance on: every expert has one slot" in answer.err


def test_record_of_finished_run_sums_over_ranks(
    equipoise: Callable[..., Any], launches: Launches, finished_run: Path
) -> None:
    answer = equipoise("record", "--run", "done", "--range", "2-5", "-o", "rec")
    assert answer.code == 0, answer.err
    statistics = formats.read_statistics("rec")
    assert statistics.iteration_range == IterationRange(2, 5)
    assert np.array_equal(statistics.counts, np.ones((3, 2, 32)))
    assert "all were written as those of rank 0" in answer.err
    assert "need --ranks 4" in answer.out
    assert launches == []


def test_record_accepts_path_of_run_record(
    equipoise: Callable[..., Any], finished_run: Path
) -> None:
    assert equipoise("record", "--run", "done/record.npz", "-o", "counts.npz").code == 0
    statistics = formats.read_statistics("counts.npz")
    assert (statistics.windows, statistics.by_rank, statistics.top_k) == (12, None, 4)


BAD = {
    "no output": ((), "-o is needed"),
    "a range that ends late": (
        ("-o", "rec", "--steps", "9", "--range", "3-10"),
        "--range 3-10 goes beyond the 9 steps of --steps",
    ),
    "an empty range": (("-o", "rec", "--range", "5-5"), "expected START-STOP, whole numbers with"),
    "a range backwards": (("-o", "rec", "--range", "5-2"), "START below STOP, got '5-2'"),
    "one number": (("-o", "rec", "--range", "5"), "expected START-STOP"),
    "a folder with something in it": (("-o", "full"), "-o: full is not empty"),
    "a file as folder": (("-o", "file"), "-o: file is not a folder"),
    "an unknown format": (
        ("-o", "rec", "--format", "abacus"),
        "sglang-routed, got abacus",
    ),
    "tokens of a finished run": (
        ("-o", "a.jsonl", "--run", "done"),
        "--run has counts, and sglang-routed the experts of every token",
    ),
    "tokens in a folder with something in it": (
        ("-o", "full", "--format", "vllm-routed"),
        "-o: full is not empty",
    ),
    "tokens in a file of another kind": (
        ("-o", "a.json", "--format", "sglang-routed"),
        "-o: a.json needs the suffix .jsonl for sglang-routed",
    ),
    "a suffix that nobody writes": (("-o", "rec.pt"), "-o: rec.pt: "),
    "no rank": (("-o", "rec", "--ranks", "0"), "--ranks must be 1 to 64, got 0"),
    "no step": (("-o", "rec", "--steps", "0"), "--steps must be 1 to 100000, got 0"),
    "a placement": (("-o", "rec", "--placement", "p.json"), "unknown option --placement"),
    "a word for balance": (("-o", "rec", "--balance", "maybe"), "expected on or off, got 'maybe'"),
    "a run that is not there": (("-o", "rec", "--run", "none"), "none is not the record of a run"),
    "a folder without a run": (("-o", "rec", "--run", "full"), "full/record.npz is not the record"),
    "a run and a wish": (
        ("-o", "rec", "--run", "done", "--steps", "4"),
        "--steps has no meaning with --run: nothing is served",
    ),
    "a range that the run has not": (
        ("-o", "rec", "--run", "done", "--range", "3-13"),
        "--range: done/record.npz: has iterations 0-12, and 3-13 is not within them",
    ),
    "the run's own record": (
        ("-o", "done/record.npz", "--run", "done"),
        "-o: done/record.npz is the file that --run is read from",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_record_rejects_bad_input_before_start(
    equipoise: Callable[..., Any],
    launches: Launches,
    finished_run: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    (tmp_path / "file").write_text("")
    before = sorted(os.listdir(tmp_path))
    answer = equipoise("record", *arguments)
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert launches == []
    assert sorted(os.listdir(tmp_path)) == before


def test_record_failure_leaves_no_files(
    equipoise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(settings: RunSettings, recording: RecordingSettings, progress: RunProgress) -> None:
        (recording.folder / "rank0.safetensors").write_bytes(b"half")
        raise RankLost(1, "was killed", "step 3")

    monkeypatch.setattr(launcher, "record_demo", fail)
    answer = equipoise("record", "-o", "rec", "--quiet")
    assert answer.code == 3
    assert answer.err.startswith("equipoise: error: rank 1 was killed")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("rank", "message"), [("0", "recorded steps 0 to 8 on 2 ranks\n"), ("1", "")]
)
def test_record_under_external_launcher_writes_into_folder(
    equipoise: Callable[..., Any],
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    message: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    answer = equipoise("record", "--ranks", "2", "--steps", "9", "-o", "rec")
    assert (answer.code, answer.out) == (0, message)
    [(_, recording)] = launches
    assert recording.folder == Path("rec")
    assert equipoise("record", "--ranks", "2", "-o", "counts.npz").code == 2


def test_record_options_reach_request(tmp_path: Path) -> None:
    options = {"range": IterationRange(1, 2), "run": Path("r"), "out": Path("o"), "format": "csv"}
    request = resolve_record_request(
        options | {"ranks": 8, "quiet": True}, {"ranks": 2, "steps": 5}
    )
    assert (request.range, request.run, request.out, request.format) == tuple(options.values())
    assert (request.settings.ranks, request.settings.steps, request.progress) == (8, 5, "hidden")
    assert resolve_record_request({}, {"out": Path("o")}) == RecordRequest(
        settings=RunSettings(balance=Balance.OFF),
        out=Path("o"),
        explicit_options=frozenset({"out"}),
    )
    absent = {"placement", "commit", "json", "html"}
    # Every rank counts all layers.
    absent |= {"pipeline_ranks", "micro_batches", "tensor_ranks"}
    # A recording is short and looked at afterwards, and counts come before any copy is chosen:
    # nothing watches it, and how experts move is nothing to it.
    groups = WATCHING, PLANS, MOVES
    absent |= {"exchange", "locality", "routing_rule", "variants"} | {
        option.key for option in RUN_OPTIONS.values() if option.group in groups
    }
    assert set(RUN_OPTIONS) - absent <= set(BY_KEY)


def test_record_options_come_from_config_file(
    equipoise: Callable[..., Any], launches: Launches, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text("range: 2-4\nout: rec\nbalance: on\nsteps: 9\n")
    assert equipoise("record", "--config", "r.yaml", "--quiet").code == 0
    [(settings, recording)] = launches
    assert (settings.balance, recording.steps) == (Balance.ON, IterationRange(2, 4))
