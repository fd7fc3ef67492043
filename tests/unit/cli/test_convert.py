"""`equipoise convert`: statistics and placements, and what is lost."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.balancer.formats import format_names
from equipoise.cli.convert import COMMAND, ConvertRequest


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = np.arange(16, dtype=np.int64).reshape(1, 2, 8) ** 2
    np.save("counts.npy", counts)
    by_rank = np.stack([counts, counts])
    formats.write_statistics(
        "recorded", formats.ExpertStatistics(by_rank.sum(axis=0), (), by_rank, 7, 2)
    )
    placement_plan = plan(counts, slots=12, ranks=4)
    layout = formats.ExpertPlacement(placement_plan.placement, placement_plan.shares, 4)
    formats.write_placement("placement.json", layout)
    formats.write_placement("placement.yaml", layout)
    np.save("map.npy", placement_plan.placement)
    Path("words.json").write_text("{}")
    Path("broken.json").write_text("{")


BAD = {
    "no output": (("counts.npy",), "OUT is missing: see equipoise"),
    "a missing file": (("none.npy", "o.csv"), "none.npy: cannot be read"),
    "a file that is neither": (("words.json", "o.csv"), "is not statistics or a placement"),
    "a broken file": (("broken.json", "o.csv"), "broken.json: "),
    "a file onto itself": (("counts.npy", "./counts.npy"), "OUT: counts.npy is the file that IN"),
    "a file within a file": (("counts.npy", "counts.npy/o.csv"), "counts.npy is not a folder"),
    "statistics as a placement": (
        ("counts.npy", "o.yaml"),
        "counts.npy holds statistics: o.yaml: has a suffix that is not known to write",
    ),
    "a placement as statistics": (
        ("placement.json", "o.csv"),
        "placement.json holds a placement: o.csv: has a suffix that is not known to write",
    ),
    "an unknown format": (("counts.npy", "o.csv", "--format", "pdf"), "cannot be written as pdf"),
    "ranks that nobody says": (("placement.yaml", "o.json"), "said beside it, by --ranks"),
    "other ranks": (("placement.json", "o.yaml", "--ranks", "2"), "is for 4 ranks, not 2"),
    "ranks that do not divide": (("map.npy", "o.json", "--ranks", "5"), "do not divide among 5"),
    "ranks of statistics": (("recorded", "o.csv", "--ranks", "2"), "and not a placement"),
    "no rank": (("map.npy", "o.json", "--ranks", "0"), "--ranks must be 1 to 4096, got 0"),
    "a folder in use": (("counts.npy", "recorded"), "is there already, and is not an empty folder"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_convert_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(os.listdir(tmp_path))
    answer = equipoise("convert", *arguments)
    assert (answer.code, answer.out) == (2, ""), answer.err
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert sorted(os.listdir(tmp_path)) == before


def test_convert_keeps_counts_and_warns_of_lost_fields(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("convert", "recorded", "deep/counts.csv")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err.splitlines() == [
        "equipoise: warning: deep/counts.csv: csv does not carry counts by rank, "
        "experts per token: lost",
        "recorded (tensorrt-llm) -> deep/counts.csv, in a new folder (csv)",
    ]
    before, after = (formats.read_statistics(p) for p in ("recorded", "deep/counts.csv"))
    assert np.array_equal(before.counts, after.counts)


def test_convert_keeps_placement_and_warns_of_lost_shares(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("convert", "placement.json", "o.npz", "--quiet")
    assert answer.code == 0
    assert answer.err == "equipoise: warning: o.npz: vllm does not carry shares: lost\n"
    before, after = (formats.read_placement(p) for p in ("placement.json", "o.npz"))
    assert np.array_equal(before.placement, after.placement)


def test_convert_reads_plain_array_as_statistics_without_ranks(
    equipoise: Callable[..., Any],
) -> None:
    assert equipoise("convert", "map.npy", "as.csv").code == 0
    assert formats.read_statistics("as.csv").experts == 12
    assert equipoise("convert", "map.npy", "as.json", "--ranks", "4").code == 0
    assert formats.read_placement("as.json").ranks == 4


def test_convert_names_both_engines_of_a_map(equipoise: Callable[..., Any]) -> None:
    assert equipoise("convert", "placement.json", "sglang.json", "--format", "sglang").code == 0
    answer = equipoise("convert", "sglang.json", "new/o.yaml", "--ranks", "4")
    assert answer.code == 0, answer.err
    last = answer.err.splitlines()[-1]
    assert last == "sglang.json (vllm or sglang) -> new/o.yaml, in a new folder (tensorrt-llm)"


def test_convert_full_disk_exits_3_without_output(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = equipoise("convert", "counts.npy", "o.csv")
    assert answer.code == 3
    assert "o.csv: cannot be written: No space left on device" in answer.err
    assert not Path("o.csv").exists()


def test_convert_options_from_file_and_format_names(equipoise: Callable[..., Any]) -> None:
    Path("convert.yaml").write_text("format: eplb-table\nquiet: true\n")
    assert equipoise("convert", "placement.json", "o.json", "--config", "convert.yaml").code == 0
    assert formats.read_placement("o.json").source == "eplb-table: o.json"
    request_fields = set(ConvertRequest.__dataclass_fields__) - {"source", "out"}
    assert set(COMMAND.options) == request_fields
    assert (
        tuple(form.name for form in formats.known_formats()[:6] if form.write_suffixes)
        == format_names.STATISTICS_FORMAT_NAMES
    )


@pytest.mark.parametrize("experts", [12, None])
def test_convert_counts_folder_of_routed_experts(
    experts: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    equipoise: Callable[..., Any],
) -> None:
    """It was called a folder that has to be TensorRT-LLM's."""
    monkeypatch.chdir(tmp_path)
    Path("routed").mkdir()
    rng = np.random.default_rng(7)
    ids = [rng.permuted(np.tile(np.arange(8), (9, 3, 1)), axis=2)[..., :2] for _ in range(4)]
    for number, array in enumerate(ids):
        np.save(f"routed/{number}.npy", array.astype(np.uint8))
    if experts is not None:
        facts = {"format": "equipoise-trace", "version": 1, "experts": experts}
        Path("routed/trace.json").write_text(json.dumps(facts))
    answer = equipoise("convert", "routed", "counts.npz")
    if experts is None:
        assert answer.code == 2
        assert "routed: is a routing trace without the number of experts: write" in answer.err
        return
    assert answer.err == "routed (vllm-routed) -> counts.npz (npz)\n"
    counted = formats.read_statistics("counts.npz")
    assert (counted.experts, counted.top_k) == (experts, 2)
    expected = [np.bincount(np.concatenate(ids)[:, n].ravel(), minlength=12) for n in range(3)]
    assert counted.counts.sum(axis=0).tolist() == np.array(expected).tolist()
    assert equipoise("report", "routed", "--ranks", "4").code == 0
    options = ("--ranks", "4", "--slots", "16", "-o", "placement.json")
    assert equipoise("plan", "routed", *options).code == 0
    assert formats.read_placement("placement.json").experts == experts


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_plan_refuses_one_array_of_expert_ids(
    dtype: type[np.integer[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    equipoise: Callable[..., Any],
) -> None:
    """As counts, tokens would be windows, and places of a token experts."""
    monkeypatch.chdir(tmp_path)
    np.save("0.npy", np.tile(np.arange(8, dtype=dtype), (5, 2, 1)))
    answer = equipoise("plan", "0.npy", "--ranks", "4", "--slots", "12", "-o", "placement.json")
    if dtype is np.int32:
        assert answer.code == 0
        return
    assert answer.code == 2
    assert "0.npy: is a routing trace (three axes of small integers)" in answer.err
