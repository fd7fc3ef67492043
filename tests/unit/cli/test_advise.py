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

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.cli import advise, kinds, progress
from equipoise.cli.advise import AdviseRequest
from equipoise.report.advice import advice as answers
from equipoise.report.advice.hardware import LINKS, PRECISIONS, shipped_hardware
from equipoise.report.advice.inputs import AdviceInputs, OnProgress

RANKS = ("--ranks", "4")
MACHINE = ("--hardware", "mine.yaml", "--expert-bytes", "1k", "--itl", "10")


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
    "no statistics": ((), "the following arguments are required: STATS"),
    "a missing file": (("none.npy", *RANKS), "none.npy: cannot be read"),
    "nothing counted": (("zero.npy", *RANKS), "all counts are 0"),
    "no ranks": (("counts.npy",), "--ranks is needed: there is no --installed"),
    "no rank": (("counts.npy", "--ranks", "0"), "--ranks must be at least 1"),
    "slots that do not divide": (
        ("counts.npy", *RANKS, "--slots", "13"),
        "--slots 13 is not divisible by 4 ranks",
    ),
    "too few slots": (("counts.npy", *RANKS, "--slots", "4"), "--slots must be 8 to 32"),
    "too many slots": (("counts.npy", *RANKS, "--slots", "36"), "one on every rank, got 36"),
    "no slot": (("counts.npy", *RANKS, "--slots", "0"), "--slots must be at least 1"),
    "other ranks than installed": (
        ("counts.npy", "--installed", "installed.json", "--ranks", "2"),
        "--installed: installed.json: is for 4 ranks, not 2",
    ),
    "installed for other experts": (
        ("few.npy", "--installed", "installed.json"),
        "places 8 experts, and the statistics are of 4",
    ),
    "a negative target": (("counts.npy", *RANKS, "--target", "-1"), "--target must be 0 to 1000"),
    "no rows": (("counts.npy", *RANKS, "--step-rows", "0"), "--step-rows must be at least 1"),
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
        "--hidden must be at least 1",
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
        "--hardware: mine: has no fp4_tflops; it has memory_gb",
    ),
    "hardware without the link": (
        ("counts.npy", *RANKS, *MACHINE, "--link", "host"),
        "--hardware: mine: has no host_link_gbs",
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
        "--memory-share must be above 0 and at most 1, got 1.5",
    ),
    "none of the latency": (
        ("counts.npy", *RANKS, "--moe-share", "0"),
        "--moe-share must be above 0 and at most 1, got 0",
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
    assert "3. On how many ranks?  not said: needs --hardware" in answer.out
    assert "  not said: needs --hardware, --itl" in answer.out
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


def test_advise_command_line_overrides_config_file(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise("advise", "counts.npy", "--config", "config.yaml", "--itl", "20")
    assert answer.code == 0
    assert "  20 experts in a step of 20 ms" in answer.out


def test_advise_option_defaults_match_question() -> None:
    request = {field.name: field.default for field in fields(AdviseRequest)}
    assert set(advise.BY_KEY) - {"quiet"} == set(request) - {"statistics", "progress"}
    for field in fields(AdviceInputs):
        if field.name in request and field.default is not MISSING:
            shown = advise.BY_KEY[field.name].shown_default if field.name in advise.BY_KEY else ""
            given = request[field.name]
            assert given == field.default or (given is None and shown == str(field.default))
    assert kinds.LINKS == LINKS
    assert tuple(PRECISIONS) == kinds.PRECISIONS


def test_advise_tells_which_part_it_plans(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT", 0.0)
    messages = equipoise("advise", "counts.npy", *RANKS).err.splitlines()
    assert any(line.startswith("planning: 12 slots on 4 ranks, after ") for line in messages)
    assert any(line.startswith("planning: 2 ranks, after ") for line in messages)
    assert equipoise("advise", "counts.npy", *RANKS, "--quiet").err == ""
