"""`equipoise advise`: what it answers, what it needs for it, and what it refuses."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.cli import advise, progress
from equipoise.cli.advise import AdviseRequest
from equipoise.report.advice import advice as answers
from equipoise.report.advice.hardware import LINKS, PRECISIONS, shipped_hardware
from equipoise.report.advice.inputs import AdviceInputs, OnProgress
from equipoise.report.advice.kv_cache import KvCache

RANKS = ("--ranks", "4")
MACHINE = ("--hardware", "mine.yaml", "--expert-bytes", "1k", "--itl", "10")

KV_CACHE = ("--expert-bytes", "1k", "--kv-bytes-per-token", "10")


@pytest.fixture(autouse=True)
def no_line_of_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT", math.inf)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = np.full((4, 3, 8), 100, dtype=np.int64)
    np.save("even.npy", counts)
    counts[..., 0] = 2000
    np.save("counts.npy", counts)
    np.save("zero.npy", np.zeros((3, 8), dtype=np.int64))
    np.save("few.npy", counts[..., :4])
    placement_plan = plan(counts, slots=12, ranks=4)
    layout = formats.ExpertPlacement(placement_plan.placement, placement_plan.shares, 4)
    formats.write_placement("installed.json", layout)
    Path("mine.yaml").write_text(
        "memory_gb: 1\nmemory_bandwidth_gbs: 2\nfp8_tflops: 0.1\nnode_link_gbs: 0.001\n"
    )
    Path("odd.yaml").write_text("memory_gb: lots\n")
    Path("config.yaml").write_text("ranks: 4\nitl: 5\nhardware: mine.yaml\nexpert_bytes: 1k\n")


BAD = {
    "no statistics": ((), "STATS is missing: see equipoise"),
    "a missing file": (("none.npy", *RANKS), "none.npy: cannot be read"),
    "nothing counted": (("zero.npy", *RANKS), "all counts are 0"),
    "no ranks": (("counts.npy",), "--ranks is needed: counts.npy does not say"),
    "no rank": (("counts.npy", "--ranks", "0"), "--ranks must be 1 to 4096, got 0"),
    "slots that do not divide": (
        ("counts.npy", *RANKS, "--slots", "13"),
        "--slots 13 is not divisible by 4 ranks",
    ),
    "too few slots": (("counts.npy", *RANKS, "--slots", "4"), "--slots must be 8 to 32"),
    "too many slots": (("counts.npy", *RANKS, "--slots", "36"), "one on every rank, got 36"),
    "no slot": (("counts.npy", *RANKS, "--slots", "0"), "--slots must be 1 to 65536, got 0"),
    "other ranks than installed": (
        ("counts.npy", "--installed", "installed.json", "--ranks", "2"),
        "--installed: installed.json: is for 4 ranks, not 2",
    ),
    "installed for other experts": (
        ("few.npy", "--installed", "installed.json"),
        "places 8 experts, and the statistics are of 4",
    ),
    "a negative target": (("counts.npy", *RANKS, "--target", "-1"), "--target must be 0 to 1000"),
    "no rows": (
        ("counts.npy", *RANKS, "--step-rows", "0"),
        "--step-rows must be 1 to 1099511627776, got 0",
    ),
    "hardware without an expert": (
        ("counts.npy", *RANKS, "--hardware", "h100"),
        "--hardware needs --expert-bytes, or --hidden and --intermediate",
    ),
    "precision without size": (
        ("counts.npy", *RANKS, "--precision", "fp4"),
        "--precision needs --hidden and --intermediate, or --hardware",
    ),
    "latency without hardware": (("counts.npy", *RANKS, "--itl", "5"), "--itl needs --hardware"),
    "half of a width": (
        ("counts.npy", *RANKS, "--hidden", "5"),
        "--hidden and --intermediate go together",
    ),
    "an expert said twice": (
        ("counts.npy", *RANKS, "--hidden", "5", "--intermediate", "5", "--expert-bytes", "1k"),
        "they say the same, twice",
    ),
    "a width of nothing": (
        ("counts.npy", *RANKS, "--hidden", "0", "--intermediate", "5"),
        "--hidden must be 1 to 1048576, got 0",
    ),
    "unknown hardware": (
        ("counts.npy", *RANKS, *MACHINE, "--hardware", "abacus"),
        "--hardware: abacus: is neither a file nor one of h100",
    ),
    "hardware that is no number": (
        ("counts.npy", *RANKS, *MACHINE, "--hardware", "odd.yaml"),
        "--hardware: odd.yaml: memory_gb must be a positive number",
    ),
    "hardware of another precision": (
        ("counts.npy", *RANKS, *MACHINE, "--precision", "fp4"),
        "--hardware: mine: has no fp4_tflops: --precision fp8 has a figure",
    ),
    "hardware without the link": (
        ("counts.npy", *RANKS, *MACHINE, "--link", "host"),
        "--hardware: mine: has no host_link_gbs",
    ),
    "a dead zone of two points": (
        ("counts.npy", *RANKS, "--dead-zone", "1:40,1.5:44"),
        "--dead-zone: needs points of at least 3 different max/mean",
    ),
    "a dead zone without step times": (
        ("counts.npy", *RANKS, "--dead-zone", "1,1.5,2"),
        "--dead-zone: expected pairs such as 1.0:41.2,1.1:41.3,1.5:47, got '1,1.5,2'",
    ),
    "memory without KV cache": (
        ("counts.npy", *RANKS, "--memory", "1G"),
        "--memory needs --kv-bytes-per-token",
    ),
    "usage without KV cache": (
        ("counts.npy", *RANKS, "--kv-usage", "0.5"),
        "--kv-usage needs --kv-bytes-per-token",
    ),
    "KV cache without an expert": (
        ("counts.npy", *RANKS, "--kv-bytes-per-token", "70k", "--memory", "1G"),
        "--kv-bytes-per-token needs --expert-bytes, or --hidden and --intermediate",
    ),
    "KV cache without memory": (
        ("counts.npy", *RANKS, "--kv-bytes-per-token", "70k", "--expert-bytes", "1k"),
        "--kv-bytes-per-token needs --memory, or --hardware",
    ),
    "KV cache used more than whole": (
        ("counts.npy", *RANKS, *KV_CACHE, "--memory", "1G", "--kv-usage", "1.1"),
        "--kv-usage must be above 0, up to 1, got 1.1",
    ),
    "weights that leave no KV cache": (
        ("counts.npy", *RANKS, *KV_CACHE, "--memory", "6k"),
        "--memory: 5.9 KiB of a rank leave no KV cache beside its expert weights, 5.9 KiB",
    ),
    "an unknown link": (
        ("counts.npy", *RANKS, *MACHINE, "--link", "string"),
        "node or network or host, got 'string'",
    ),
    "an unknown precision": (("counts.npy", "--precision", "fp3"), "fp4, got 'fp3'"),
    "no latency": (("counts.npy", *RANKS, *MACHINE, "--itl", "0"), "--itl must be above 0"),
    "a latency that is no number": (("counts.npy", "--itl", "nan"), "expected a number"),
    "more than all of the memory": (
        ("counts.npy", *RANKS, "--memory-share", "1.5"),
        "--memory-share must be above 0, up to 1, got 1.5",
    ),
    "none of the latency": (
        ("counts.npy", *RANKS, "--moe-share", "0"),
        "--moe-share must be above 0, up to 1, got 0",
    ),
    "a link of unknown hardware": (
        ("counts.npy", *RANKS, "--link", "network"),
        "--link needs --hardware",
    ),
    "a part of an unknown memory": (
        ("counts.npy", *RANKS, "--memory-share", "0.5"),
        "--memory-share needs --hardware",
    ),
    "a part of no latency": (
        ("counts.npy", *RANKS, "--moe-share", "0.5"),
        "--moe-share needs --itl",
    ),
    "an expert of no weight": (("counts.npy", "--expert-bytes", "0"), "expected whole bytes"),
    "an output over the input": (
        ("counts.npy", *RANKS, "--json", "counts.npy"),
        "--json: counts.npy is the file that STATS is read from",
    ),
    "an output over the placement": (
        ("counts.npy", "--installed", "installed.json", "--json", "installed.json"),
        "is the file that --installed is read from",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_advise_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    answer = equipoise("advise", *arguments)
    assert (answer.code, answer.out) == (2, ""), answer.err
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_advise_without_hardware_judges_whether_balancing_pays(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise("advise", "counts.npy", *RANKS)
    assert (answer.code, answer.err) == (0, "")
    assert "1. Is balancing worth it?  worth it" in answer.out
    assert "2. How many redundant slots?  1 on each rank: 12 slots" in answer.out
    assert "3. On how many ranks?  not said: needs --hardware and --expert-bytes\n" in answer.out
    assert "  not said: needs --hardware and --itl and --expert-bytes\n" in answer.out
    weighed = equipoise("advise", "counts.npy", *RANKS, "--expert-bytes", "24MiB")
    assert "3. On how many ranks?  not said: needs --hardware\n" in weighed.out
    assert "  not said: needs --hardware and --itl\n" in weighed.out
    even = equipoise("advise", "even.npy", *RANKS)
    assert "1. Is balancing worth it?  not worth it: what is uneven now is chance" in even.out
    assert "2. How many redundant slots?  none, since balancing is not worth it" in even.out


def test_advise_with_hardware_estimates_expert_moves_per_step(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise("advise", "counts.npy", *RANKS, *MACHINE, "--json", "advice.json")
    assert (answer.code, answer.err) == (0, "figures: advice.json\n")
    # A million bytes a second, experts of a thousand bytes, steps of 10 ms.
    assert "  10 experts in a step of 10 ms" in answer.out
    assert "a model, not a measurement" in answer.out
    for word in ("mine: memory_gb 1", "1,000 B in fp8", "10 ms; experts may take 50%"):
        assert word in " ".join(answer.out.split())
    figures = json.loads(Path("advice.json").read_text())
    assert figures["migration"]["experts_per_step"] == 10
    assert figures["inputs"]["hardware"]["sources"]["memory_gb"] == "mine.yaml"
    assert figures["command"].startswith("equipoise advise counts.npy")


def test_advise_begins_with_the_decision(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("advise", "counts.npy", *RANKS, "--json", "advice.json", "--quiet")
    sentence = (
        "Worth it with 1 redundant slot on each rank (12 slots): throughput +71% by this model."
    )
    assert " ".join(answer.out.split("\n\n")[0].split()) == sentence
    assert json.loads(Path("advice.json").read_text())["decision"] == {
        "action": "redundant_slots", "sentence": sentence,
    }  # fmt: skip
    even = equipoise("advise", "even.npy", *RANKS)
    assert even.out.startswith("Leave it off: ")


def test_advise_with_kv_cache_shows_tokens_and_gives_up_redundant_slots(
    equipoise: Callable[..., Any],
) -> None:
    arguments = ("counts.npy", *RANKS, *KV_CACHE, "--memory", "9k")
    answer = equipoise("advise", *arguments, "--json", "advice.json", "--quiet")
    assert answer.out.startswith("Leave it off: redundant slots take more from the KV cache")
    assert "not worth it: redundant slots cost too much KV cache" in answer.out
    assert "300 tokens of 10 B on a rank now, beside 5.9 KiB of expert weights" in " ".join(
        answer.out.split()
    )
    [heads] = [line for line in answer.out.splitlines() if "KV tokens" in line]
    assert heads.split() == [
        "slots",
        "connected",
        "measured",
        "weights",
        "KV",
        "tokens",
        "throughput",
    ]
    choices = json.loads(Path("advice.json").read_text())["slot_choices"]["choices"]
    assert [choice["kv_tokens"] for choice in choices[:2]] == [300, 0]
    ample = equipoise("advise", *arguments[:-1], "1G")
    assert ample.out.startswith("Worth it with 1 redundant slot")


def test_advise_takes_memory_share_of_hardware_for_kv_cache(equipoise: Callable[..., Any]) -> None:
    arguments = ("counts.npy", *RANKS, *MACHINE, "--kv-bytes-per-token", "1k")
    assert "799,994 tokens of 1,000 B" in equipoise("advise", *arguments).out
    half = equipoise("advise", *arguments, "--memory-share", "0.5")
    assert "499,994 tokens of 1,000 B" in half.out


def test_advise_fits_dead_zone_to_measured_points(equipoise: Callable[..., Any]) -> None:
    points = "1.0:40,1.5:40,4.0:40,5.0:44"
    flat = equipoise("advise", "counts.npy", *RANKS, "--dead-zone", points)
    assert flat.out.startswith(
        "Leave it off: up to an imbalance of 3.0000 step time does not depend on it"
    )
    Path("points.yaml").write_text("ranks: 4\ndead_zone: [[1.0, 40], [2.0, 80], [3.0, 120]]\n")
    line = equipoise("advise", "counts.npy", "--config", "points.yaml")
    assert "imbalance of 0, then 100.0% longer for each 1.0 more: 3 measured points" in " ".join(
        line.out.split()
    )


def test_advise_judges_installed_placement(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("advise", "counts.npy", "--installed", "installed.json")
    assert answer.code == 0
    assert "1. Is another plan worth it?  not worth it" in answer.out
    assert "2. How many redundant slots?  as installed: 12 slots" in answer.out


@pytest.mark.parametrize("more", [(), MACHINE, ("--hardware", "h200", *MACHINE[2:])])
def test_advise_table_fits_80_columns(equipoise: Callable[..., Any], more: tuple[str, ...]) -> None:
    answer = equipoise("advise", "counts.npy", *RANKS, *more)
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    assert answer.out == "\n".join(line.rstrip() for line in answer.out.split("\n"))


def test_advise_options_reach_question(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[AdviceInputs] = []
    answer = answers.advise

    def recording_advise(question: AdviceInputs, options: OnProgress) -> answers.Advice:
        questions.append(question)
        return answer(question, options)

    monkeypatch.setattr(answers, "advise", recording_advise)
    options = (
        "--slots", "16", "--target", "0.5", "--step-rows", "77", "--hidden", "10",
        "--intermediate", "20", "--precision", "bf16", "--hardware", "h200", "--itl", "40",
        "--link", "network", "--memory-share", "0.25", "--moe-share", "0.75",
        "--kv-bytes-per-token", "9k", "--memory", "9G", "--kv-usage", "0.5",
        "--dead-zone", "1:1,2:1,3:2,4:3",
    )  # fmt: skip
    assert equipoise("advise", "counts.npy", "--installed", "installed.json", *options).code == 0
    [question_seen] = questions
    assert (
        question_seen.ranks,
        question_seen.slots,
        question_seen.target,
        question_seen.step_rows,
    ) == (4, 16, 0.5, 77)
    assert (question_seen.link, question_seen.latency) == ("network", 0.04)
    assert (question_seen.memory_share, question_seen.moe_share) == (0.25, 0.75)
    assert question_seen.expert is not None
    assert (question_seen.expert.size, question_seen.expert.precision) == (3 * 10 * 20 * 2, "bf16")
    assert question_seen.hardware == shipped_hardware()["h200"]
    assert question_seen.installed is not None
    assert question_seen.kv_cache == KvCache(9000, 9 * 10**9)
    assert question_seen.kv_usage == 0.5
    assert question_seen.dead_zone is not None
    assert question_seen.dead_zone.knee == pytest.approx(2.0)


def test_advise_command_line_overrides_config_file(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise("advise", "counts.npy", "--config", "config.yaml", "--itl", "20")
    assert answer.code == 0
    assert "  20 experts in a step of 20 ms" in answer.out


def test_advise_option_defaults_match_question() -> None:
    request = {field.name: field.default for field in fields(AdviseRequest)}
    options = advise.COMMAND.options
    assert set(options) == set(request) - {"statistics"}
    for field in fields(AdviceInputs):
        if field.name in request and field.default is not MISSING:
            shown = options[field.name].shown_default if field.name in options else ""
            given = request[field.name]
            assert given == field.default or (given is None and shown == str(field.default))
    assert options["link"].kind.words == LINKS
    assert options["precision"].kind.words == tuple(PRECISIONS)


def test_advise_tells_which_part_it_plans(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT", 0.0)
    messages = equipoise("advise", "counts.npy", *RANKS).err.splitlines()
    assert any(line.startswith("planning: 12 slots on 4 ranks, after ") for line in messages)
    assert any(line.startswith("planning: 2 ranks, after ") for line in messages)
    assert equipoise("advise", "counts.npy", *RANKS, "--quiet").err == ""


def test_advise_takes_tokens_as_an_engine_returned_them(equipoise: Callable[..., Any]) -> None:
    tokens = str(ROOT / "tests" / "data" / "traces" / "shipped-model-vllm-routed")
    answer = equipoise("advise", tokens, *RANKS, "--step-tokens", "64", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert "6 layers of 32 experts" in answer.out


def test_advise_sums_steps_of_a_long_trace_into_windows(equipoise: Callable[..., Any]) -> None:
    steps = np.tile(np.load("counts.npy")[:1], (3000, 1, 1))
    np.save("long.npy", np.insert(steps, 0, 0, axis=1))
    answer = equipoise("advise", "long.npy", *RANKS)
    assert answer.code == 0
    assert "long.npy: no rows in layers 0 (dense?): they are left out" in answer.err
    words = " ".join(answer.out.split())
    assert "375 windows" in words
    [rows] = {int(layer.sum()) for layer in steps[0]}
    assert f"{rows:,} rows of a layer, as given or recorded" in words


def test_advice_takes_ranks_from_statistics_that_name_them(equipoise: Callable[..., Any]) -> None:
    by_rank = np.stack([np.load("counts.npy")] * 4)
    formats.write_statistics("recorded", formats.ExpertStatistics(by_rank.sum(axis=0), (), by_rank))
    without = equipoise("advise", "recorded")
    assert without.code == 0, without.err
    assert "slots on 4 ranks" in without.out
    assert without.out == equipoise("advise", "recorded", "--ranks", "4").out
